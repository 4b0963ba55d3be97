"""What holds for every machine and every request: the plan is valid, or it is refused with a PlanError."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from placement.allocation import assign_allocated_nodes
from placement.errors import PlanError
from placement.plan import PlacementPlan, make_plan
from placement.types import Gpu, Machine, Node


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    nodes = []
    for number in range(draw(st.integers(1, 4))):
        cores = sorted(draw(st.sets(st.integers(0, 63), min_size=1, max_size=24)))
        gpus = [
            Gpu(index=i, uuid=f"GPU-{number}-{i}", name="fake", memory_total_bytes=2**34)
            for i in range(draw(st.sampled_from([0, 0, 1, 2, 8])))
        ]
        nodes.append(
            Node(
                name=f"node{number}",
                cores=tuple(cores),
                memory_total_bytes=2**36,
                gpus=tuple(gpus),
                ray_node_id=f"id{number}",
                ray_cpus=draw(st.none() | st.integers(0, 32).map(float)),
            )
        )
    return Machine(nodes=tuple(nodes), origin="hypothesis")


counts = st.none() | st.integers(1, 40)
requests = st.fixed_dictionaries(
    {
        "backend": st.sampled_from(["auto", "cpu", "direct", "mps", "green"]),
        "num_gmis": counts,
        "gmis_per_gpu": st.none() | st.integers(1, 5),
        "threads_per_gmi": st.none() | st.integers(1, 6),
        "num_envs": st.integers(1, 4096),
    }
)


def plan_or_none(machine: Machine, request: dict) -> PlacementPlan | None:
    try:
        return make_plan(machine, **request)
    except PlanError:
        return None


def check_slices_fit(plan: PlacementPlan) -> None:
    taken: Counter[tuple[str, int]] = Counter()
    shares: Counter[str | None] = Counter()
    for gmi_slice in plan.slices:
        usable = plan.machine.node(gmi_slice.node).usable_cores
        assert len(gmi_slice.cores) == gmi_slice.num_threads >= 1
        assert set(gmi_slice.cores) <= set(usable)
        taken.update((gmi_slice.node, core) for core in gmi_slice.cores)
        shares[gmi_slice.gpu_uuid] += gmi_slice.gpu_fraction
    assert max(taken.values()) == 1
    assert max(shares.values()) <= 1 + 1e-9


@given(machines(), requests)
def test_slices_are_disjoint_and_lie_inside_their_nodes(machine, request):
    plan = plan_or_none(machine, request)
    if plan is not None:
        check_slices_fit(plan)
        assert request["num_gmis"] in (None, plan.num_gmis)
        assert request["threads_per_gmi"] in (None, *{gmi_slice.num_threads for gmi_slice in plan.slices})


@given(machines(), requests)
def test_the_same_arguments_give_the_same_plan(machine, request):
    assert plan_or_none(machine, request) == plan_or_none(machine, request)


@given(machines(), requests)
def test_gmis_are_ordered_by_node(machine, request):
    plan = plan_or_none(machine, request)
    if plan is not None:
        order = [node.name for node in machine.nodes]
        positions = [order.index(gmi_slice.node) for gmi_slice in plan.slices]
        assert positions == sorted(positions)


@given(machines(), st.integers(1, 100))
def test_cores_hold_a_number_of_gmis_exactly_when_there_is_a_core_for_each(machine, num_gmis):
    plan = plan_or_none(machine, {"backend": "cpu", "num_gmis": num_gmis, "num_envs": 1})
    assert (plan is not None) == (num_gmis <= machine.num_cores)


@given(machines(), requests)
def test_binding_to_the_planned_nodes_changes_nothing(machine, request):
    plan = plan_or_none(machine, request)
    if plan is not None:
        assert (
            assign_allocated_nodes(
                plan, [machine.node(gmi_slice.node).ray_node_id for gmi_slice in plan.slices]
            )
            == plan
        )


@given(machines(), requests, st.randoms(use_true_random=False))
def test_allocated_slices_are_disjoint_on_any_nodes(machine, request, random):
    plan = plan_or_none(machine, request)
    if plan is None:
        return
    ids = [random.choice(machine.nodes).ray_node_id for _ in plan.slices]
    try:
        bound = assign_allocated_nodes(plan, ids)
    except PlanError:
        return
    check_slices_fit(bound)
    assert [bound.machine.node(gmi_slice.node).ray_node_id for gmi_slice in bound.slices] == ids
