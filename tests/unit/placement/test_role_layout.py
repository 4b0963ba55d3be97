"""Plans with several worker types: roles and slices, and invariants for every machine and request."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.allocation import assign_allocated_nodes
from placement.errors import PlanError
from placement.inventory import load_machine
from placement.plan import PlacementPlan, make_plan
from placement.role_layout import SERVING_WORKER_TYPES, TRAINING_WORKER_TYPES, served_simulators
from placement.types import Machine, Node
from tests.unit.placement.test_plan_properties import counts, machines

MACHINES = Path(__file__).parents[2] / "data" / "machines"
CPU2, CPU16 = (load_machine(MACHINES / f"{name}.json") for name in ("cpu2", "cpu16"))
COLLECTOR, LEARNER, SIMULATOR, AGENT = ("simulator", "agent"), ("trainer",), ("simulator",), ("agent",)

works = st.sampled_from(
    [(name, False) for name in TRAINING_WORKER_TYPES if name not in ("dp_only", "program")]
    + [(name, True) for name in SERVING_WORKER_TYPES]
)
requests = st.fixed_dictionaries(
    {
        "backend": st.sampled_from(["auto", "cpu", "direct"]),
        "num_gmis": counts,
        "gmis_per_gpu": st.none() | st.integers(1, 5),
        "num_agents": st.none() | st.integers(1, 3),
        "num_learners": st.none() | st.integers(1, 3),
        "threads_per_gmi": st.none() | st.integers(1, 6),
        "num_envs": st.integers(1, 4096),
    }
)


def plan_or_none(machine: Machine, work: tuple[str, bool], request: dict) -> PlacementPlan | None:
    template, serving = work
    try:
        return make_plan(machine, template=template, serving=serving, **request)
    except PlanError:
        return None


def check_cores(plan: PlacementPlan) -> None:
    """GMIs with a simulator have cores of their own; the others theirs, or those of such GMIs on their node.

    Idle threads spin for a moment on cores that no other GMI has, and sleep at once on the others.
    """
    owners: dict[tuple[str, int], int] = {}
    asked: Counter[str] = Counter()
    own = [gmi_slice.num_cpus is None for gmi_slice in plan.slices]
    for index, gmi_slice in enumerate(plan.slices):
        asked[gmi_slice.node] += plan.bundles()[index]["CPU"]
        if own[index] or "simulator" in plan.roles_of(index):
            assert len(gmi_slice.cores) == gmi_slice.num_threads >= 1
            for core in gmi_slice.cores:
                assert owners.setdefault((gmi_slice.node, core), index) == index
    for index, gmi_slice in enumerate(plan.slices):
        assert {(gmi_slice.node, core) for core in gmi_slice.cores} <= owners.keys()
        assert 1 <= gmi_slice.num_threads <= len(gmi_slice.cores) == len(set(gmi_slice.cores))
        assert plan.bundles()[index]["CPU"] > 0
        spins = "GOMP_SPINCOUNT" in gmi_slice.environment
        assert spins == (own[index] and gmi_slice.num_threads > 1)
    for node, cpus in asked.items():
        assert cpus <= len(plan.machine.node(node).usable_cores) + 1e-9


@given(machines(), works, requests)
def test_every_plan_has_every_kind_on_cores_that_exist(machine, work, request):
    plan = plan_or_none(machine, work, request)
    if plan is None:
        return
    check_cores(plan)
    template, serving = work
    worker_types = (SERVING_WORKER_TYPES if serving else TRAINING_WORKER_TYPES)[template]
    numbers = Counter(plan.worker_types)
    assert set(numbers) == set(worker_types)
    assert request["num_gmis"] in (None, plan.num_gmis)
    if LEARNER in worker_types or ("agent", "trainer") in worker_types:
        assert numbers[worker_types[-1]] == (request["num_learners"] or 1)
    if template == "dp_mp" and serving:
        assert numbers[SIMULATOR] == numbers[AGENT]
    elif AGENT in worker_types:
        assert numbers[AGENT] == (request["num_agents"] or 1)
    expected = [request["num_envs"] * ("simulator" in roles) for roles in plan.worker_types]
    assert list(plan.envs) == expected


@given(machines(), works, requests)
def test_gmis_are_ordered_by_node_and_bind_to_where_they_were_planned(machine, work, request):
    plan = plan_or_none(machine, work, request)
    if plan is None:
        return
    order = [node.name for node in machine.nodes]
    positions = [order.index(gmi_slice.node) for gmi_slice in plan.slices]
    assert positions == sorted(positions)
    assert (
        assign_allocated_nodes(plan, [machine.node(gmi_slice.node).ray_node_id for gmi_slice in plan.slices])
        == plan
    )


@given(machines(), works, requests, st.randoms(use_true_random=False))
def test_wherever_they_land_a_node_is_not_asked_for_more_cores_than_it_has(machine, work, request, random):
    plan = plan_or_none(machine, work, request)
    if plan is None:
        return
    ids = [random.choice(machine.nodes).ray_node_id for _ in plan.slices]
    try:
        bound = assign_allocated_nodes(plan, ids)
    except PlanError:
        return
    cpus: dict[str, float] = defaultdict(float)
    for gmi_slice, bundle in zip(bound.slices, bound.bundles(), strict=True):
        cpus[gmi_slice.node] += bundle["CPU"]
        assert set(gmi_slice.cores) <= set(machine.node(gmi_slice.node).usable_cores)
    for node, asked in cpus.items():
        assert asked <= len(machine.node(node).usable_cores) + 1e-4
    assert [bound.machine.node(gmi_slice.node).ray_node_id for gmi_slice in bound.slices] == ids


@given(st.integers(1, 12), st.integers(0, 12))
def test_every_simulator_is_served_once_and_nobody_serves_none(number, more):
    served = [served_simulators(index, number, number + more) for index in range(number)]
    assert [one for run in served for one in run] == list(range(number + more))
    assert max(map(len, served)) - min(map(len, served)) <= 1
    assert min(map(len, served)) >= 1


def test_ea_t_puts_a_learner_on_all_the_cores_that_its_collectors_leave_while_they_wait():
    plan = make_plan(CPU2, template="ea_t", num_envs=32)
    assert plan.worker_types == (COLLECTOR, COLLECTOR, LEARNER)
    assert [gmi_slice.cores for gmi_slice in plan.slices] == [(0,), (1,), (0, 1)]
    assert [gmi_slice.num_threads for gmi_slice in plan.slices] == [1, 1, 2]
    assert plan.bundles() == [{"CPU": 0.5}, {"CPU": 0.5}, {"CPU": 1.0}]
    assert plan.envs == (32, 32, 0)
    assert "1 learner on the same cores, which alternates with the collectors" in plan.reason


def test_decoupled_has_a_collector_on_every_core_and_a_learner_that_floats():
    plan = make_plan(CPU16, template="decoupled", num_envs=32)
    assert Counter(plan.worker_types) == {COLLECTOR: 8, LEARNER: 1}
    assert plan.slices[8].cores == tuple(range(16))
    assert plan.slices[8].num_threads == plan.slices[0].num_threads == 2
    assert plan.slices[8].environment["OMP_NUM_THREADS"] == "2"
    assert "concurrent with the collectors" in plan.reason


def test_enough_cores_for_all_gmis_are_divided_without_overlap():
    plan = make_plan(CPU16, template="decoupled", num_envs=32, num_gmis=4, num_learners=2)
    assert plan.worker_types == (COLLECTOR, COLLECTOR, LEARNER, LEARNER)
    assert [gmi_slice.cores for gmi_slice in plan.slices] == [
        tuple(range(4 * i, 4 * i + 4)) for i in range(4)
    ]
    assert plan.bundles() == [{"CPU": 4.0}] * 4


def test_dp_mp_serves_in_pairs_and_mp_dp_with_one_agent_for_several_simulators():
    pairs = make_plan(CPU16, template="dp_mp", serving=True, num_envs=8, num_gmis=4)
    assert pairs.worker_types == (SIMULATOR, AGENT) * 2
    shared = make_plan(CPU2, template="mp_dp", serving=True, num_envs=8)
    assert shared.worker_types == (SIMULATOR, SIMULATOR, AGENT)
    assert shared.envs == (8, 8, 0)


def test_a_learner_of_two_nodes_lies_on_that_of_its_first_collector():
    nodes = tuple(
        Node(name=name, cores=(0, 1), memory_total_bytes=8, ray_node_id=f"id-{name}") for name in ("a", "b")
    )
    plan = make_plan(
        Machine(nodes=nodes, origin="test"), template="ea_t", num_envs=1, num_gmis=6, num_learners=2
    )
    assert [gmi_slice.node for gmi_slice in plan.slices] == ["a"] * 3 + ["b"] * 3
    assert plan.worker_types == (COLLECTOR, COLLECTOR, LEARNER) * 2
    swapped = assign_allocated_nodes(plan, ["id-b"] * 3 + ["id-a"] * 3)
    assert [gmi_slice.cores for gmi_slice in swapped.slices] == [(0,), (1,), (0, 1)] * 2
    scattered = assign_allocated_nodes(plan, ["id-a", "id-b", "id-a", "id-b", "id-a", "id-b"])
    assert {gmi_slice.cores for gmi_slice in scattered.slices} == {()}


def test_one_gpu_is_partitioned_for_both_worker_types_by_default():
    plan = make_plan(load_machine(MACHINES / "a100x1.json"), template="decoupled", num_envs=64)
    assert plan.worker_types == (COLLECTOR, LEARNER)
    assert [gmi_slice.gpu_fraction for gmi_slice in plan.slices] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("asked", "texts"),
    [
        ({"template": "decoupled", "num_gmis": 5}, ("4 collectors", "2 fit", "num_gmis to 3 or less")),
        ({"template": "ea_t", "num_gmis": 1}, ("1 GMI", "1 collector and 1 learner", "num_gmis to 2")),
        ({"template": "dp_mp", "serving": True, "num_gmis": 1}, ("num_gmis=1", "pairs", "even")),
        ({"template": "dp_only", "num_learners": 1}, ("num_learners=1", "simulator+agent+trainer", "Leave")),
        ({"template": "ea_t", "num_agents": 2}, ("num_agents=2", "simulator+agent and trainer", "Leave")),
        ({"template": "ea_t", "serving": True}, ("template='ea_t'", "for serving are dp_mp, mp_dp, dp_only")),
        ({"template": "mp_dp"}, ("template='mp_dp'", "dp_only, dp_mp, e_at, ea_t, decoupled")),
        (
            {"template": "ea_t", "num_gmis": 3, "num_learners": 2},
            ("3 GMIs", "2 collectors and 2 learners", "num_gmis to 4"),
        ),
        ({"template": "ea_t", "num_learners": 3}, ("3 learners with 2 collectors", "fewer learners")),
        ({"template": "ea_t", "num_learners": 0}, ("num_learners=0", "at least 1")),
    ],
)
def test_an_impossible_request_is_refused_with_value_limit_and_hint(asked, texts):
    with pytest.raises(PlanError) as caught:
        make_plan(CPU2, num_envs=1, **asked)
    for text in texts:
        assert text in str(caught.value)
