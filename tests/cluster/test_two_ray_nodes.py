"""Placement over two Ray nodes, simulated as two raylets on this host; their GPUs are logical."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.gmi import WorkerInfo
from actors.partitioners import Partitioners
from placement.allocation import assign_allocated_gpus, assign_allocated_nodes
from placement.errors import InventoryError, ReservationError
from placement.inventory import cluster_machine
from placement.ledger import all_ledgers
from placement.plan import PlacementPlan, make_plan
from placement.ray_groups import (
    plan_beside_others,
    release,
    reserve,
    scheduling,
)
from placement.types import Gpu, Machine
from rayagi.config.spec import EnvSpec, GmiSpec, RunSpec
from rayagi.coordinator.session import Session
from tests.cluster.two_nodes import two_nodes
from tests.fakes.mps import path_with_fakes
from tests.waiting import until

pytestmark = pytest.mark.cluster

LIMIT_S = 10.0


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    # Workers cannot import this file: its functions travel as values.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path_with_fakes())
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with two_nodes(num_gpus=2):
            yield cluster_machine(timeout_s=60.0)


def all_free() -> None:
    until(lambda: ray.available_resources().get("CPU") == 2.0)


def with_made_up_gpus(machine: Machine) -> Machine:
    """Eight cores and two GPUs on each node, of which Ray grants the cores too."""
    nodes = []
    for node in machine.nodes:
        gpus = tuple(
            Gpu(index=i, uuid=f"GPU-{node.name}-{i}", name="logical", memory_total_bytes=2**30)
            for i in range(2)
        )
        nodes.append(replace(node, cores=tuple(range(8)), ray_cpus=8.0, gpus=gpus))
    return Machine(nodes=tuple(nodes), origin="ray")


def test_each_node_has_a_name_of_its_own_and_no_gpu_is_made_up(machine):
    first, second = machine.nodes
    assert first.name != second.name
    assert {first.ray_node_id, second.ray_node_id} == {node["NodeID"] for node in ray.nodes()}
    assert (first.ray_gpus, second.ray_gpus) == (2.0, 2.0)
    assert machine.num_gpus == 0


def test_a_node_that_leaves_the_cluster_while_it_is_asked_is_left_out(machine, monkeypatch):
    """As where a Tune trial is moved from a node that is lost."""
    entries = ray.nodes()
    gone = {**entries[0], "NodeID": "e" * 56, "NodeManagerHostname": "gone"}
    answers = iter([[*entries, gone]])
    monkeypatch.setattr("placement.inventory.cluster.ray.nodes", lambda: next(answers, entries))
    assert cluster_machine(timeout_s=60.0) == machine
    # One that stays, and cannot be read, is an error.
    monkeypatch.setattr("placement.inventory.cluster.ray.nodes", lambda: [*entries, gone])
    with pytest.raises(InventoryError, match="Ray node gone: could not be read"):
        cluster_machine(timeout_s=60.0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_nodes_on_one_host_get_different_cores(machine):
    first, second = machine.nodes
    assert len(first.usable_cores) == len(second.usable_cores) == 1
    assert first.usable_cores != second.usable_cores


def test_every_gmi_lands_on_the_node_it_was_planned_for(machine):
    all_free()
    plan = make_plan(machine, num_envs=8)
    assert plan.strategy() == "PACK"
    reservation = reserve(plan, LIMIT_S)
    planned = {
        index: plan.machine.node(gmi_slice.node).ray_node_id for index, gmi_slice in enumerate(plan.slices)
    }
    assert dict(enumerate(reservation.bundle_node_ids)) == planned
    assert len(set(planned.values())) == 2
    assert assign_allocated_nodes(plan, reservation.bundle_node_ids) == plan
    release(reservation)


def test_a_run_of_one_node_leaves_the_node_that_another_run_has(machine):
    all_free()
    plan_one = partial(make_plan, num_envs=8, num_gmis=1)
    first = plan_beside_others(plan_one, machine)
    assert [gmi_slice.node for gmi_slice in first.slices] == [machine.nodes[0].name]
    reservation = reserve(first, LIMIT_S)
    try:
        second = plan_beside_others(plan_one, machine)
        assert [gmi_slice.node for gmi_slice in second.slices] == [machine.nodes[1].name]
        # One that needs both nodes is planned as if both were free: reserving it says what is missing.
        both = plan_beside_others(partial(make_plan, num_envs=8), machine)
        assert [gmi_slice.node for gmi_slice in both.slices] == [node.name for node in machine.nodes]
    finally:
        release(reservation)


@pytest.mark.slow
def test_a_run_whose_node_is_taken_while_it_starts_goes_to_the_other(machine, monkeypatch):
    all_free()
    gmi = GmiSpec(backend="cpu", num_gmis=1, num_envs=2, threads_per_gmi=1, reserve_timeout_s=1.0)
    spec = RunSpec(env=EnvSpec(id="InvertedPendulum-v5"), gmi=gmi)
    planned: list[PlacementPlan] = []
    with Session(spec) as first:
        second = Session(spec, on_plan=planned.append)
        late, before = second._planned_on_cluster, iter([first.plan])
        monkeypatch.setattr(second, "_planned_on_cluster", lambda: next(before, None) or late())
        with second:
            nodes = [first.workers[0].node_id, second.workers[0].node_id]
            assert nodes == [node.ray_node_id for node in machine.nodes]
            assert [plan.slices[0].node for plan in planned] == [machine.nodes[1].name]
            assert second.train(1)[0].metrics["env_steps"] > 0


def test_the_order_of_nodes_in_the_plan_is_kept_when_it_is_not_rays(machine):
    all_free()
    turned = Machine(nodes=machine.nodes[::-1], origin="ray")
    plan = make_plan(turned, num_envs=8)
    reservation = reserve(plan, LIMIT_S)
    assert reservation.bundle_node_ids == tuple(node.ray_node_id for node in turned.nodes)
    release(reservation)


def test_a_plan_for_one_node_is_not_scattered_over_two(machine):
    all_free()
    alone = replace(machine.nodes[0], name="alone", cores=(0, 1), ray_node_id=None, ray_cpus=None)
    plan = make_plan(Machine(nodes=(alone,), origin="local"), num_envs=8, num_gmis=2)
    with pytest.raises(ReservationError) as caught:
        reserve(plan, LIMIT_S)
    assert caught.value.available.count("1 CPU") == 2
    assert caught.value.would_fit.startswith("1 GMI of this size would fit: set num_gmis=1")


def test_gpu_gmis_that_need_more_cpus_than_the_nodes_have_are_refused_at_once(machine):
    plan = make_plan(with_made_up_gpus(machine), num_envs=8, gmis_per_gpu=2)
    with pytest.raises(ReservationError) as caught:
        reserve(plan, LIMIT_S)
    assert caught.value.waited_s == 0.0
    assert caught.value.asked == "8 x {2 CPU, 0.5 GPU}"
    assert "1 CPU (1 free), 2 GPU (2 free)" in caught.value.available


def test_gpu_gmis_are_reserved_on_the_nodes_of_their_gpus(machine):
    all_free()
    plan = make_plan(with_made_up_gpus(machine), num_envs=8, threads_per_gmi=1, gmis_per_gpu=1)
    plan = replace(plan, slices=plan.slices[::2])  # one GMI per node, as many as the CPUs here allow
    reservation = reserve(plan, LIMIT_S)
    assert len(set(reservation.bundle_node_ids)) == 2
    assert [
        gmi_slice.gpu_uuid for gmi_slice in assign_allocated_nodes(plan, reservation.bundle_node_ids).slices
    ] == [gmi_slice.gpu_uuid for gmi_slice in plan.slices]
    release(reservation)


def visible_gpus() -> tuple[str, list[str]]:
    """What a process sees, and what Ray says that it was given."""
    given = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return os.environ["CUDA_VISIBLE_DEVICES"], list(given)


def test_a_gmi_sees_the_gpu_that_no_other_tenant_of_its_node_has(machine):
    all_free()
    plan = make_plan(with_made_up_gpus(machine), num_envs=8, threads_per_gmi=1, gmis_per_gpu=1, num_gmis=1)
    (gmi_slice,) = plan.slices
    node = plan.machine.node(gmi_slice.node)
    elsewhere = NodeAffinitySchedulingStrategy(node.ray_node_id, soft=False)
    tenant = ray.remote(Tenant).options(num_cpus=0, num_gpus=1, scheduling_strategy=elsewhere).remote()
    taken, _ = ray.get(tenant.visible_gpus.remote(), timeout=60)
    reservation = reserve(plan, LIMIT_S)
    try:
        answer = ray.remote(visible_gpus).options(
            num_cpus=1,
            num_gpus=gmi_slice.gpu_fraction,
            max_retries=0,
            scheduling_strategy=scheduling(reservation, 0),
            runtime_env={"env_vars": gmi_slice.environment},
        )
        seen, given = ray.get(answer.remote(), timeout=60)
    finally:
        release(reservation)
        ray.kill(tenant)
    assert given == [seen]
    assert {taken, seen} == {"0", "1"}
    (bound,) = assign_allocated_gpus(
        assign_allocated_nodes(plan, reservation.bundle_node_ids), [given]
    ).slices
    assert bound.gpu_uuid == node.gpus[int(seen)].uuid


class Tenant:
    """Somebody else on the node."""

    def visible_gpus(self) -> tuple[str, list[str]]:
        return visible_gpus()


def test_each_node_has_a_partitioner_of_its_own(machine):
    made_up = with_made_up_gpus(machine)
    plan = make_plan(made_up, backend="mps", gmis_per_gpu=2, num_envs=1, threads_per_gmi=1)
    workers = [
        WorkerInfo(index=index, node_id=made_up.node(gmi_slice.node).ray_node_id, hostname="", pid=0, cores=(),
                num_threads=1, gpu_ids=())
        for index, gmi_slice in enumerate(plan.slices)
    ]  # fmt: skip
    partitioners = Partitioners("two nodes")
    try:
        partitioned = partitioners.partition(plan, workers)
        ledgers, _ = all_ledgers()
        assert len({ledger.owner.pid for ledger in ledgers}) == 2
        gpus = {frozenset(step.gpu_uuid for step in ledger.steps()) for ledger in ledgers}
        assert gpus == {frozenset(gpu.uuid for gpu in node.gpus) for node in made_up.nodes}
        assert [gmi_slice.share.gpu_uuid for gmi_slice in partitioned.slices] == [
            gmi_slice.gpu_uuid for gmi_slice in plan.slices
        ]
        assert len({gmi_slice.share.pipe_directory for gmi_slice in partitioned.slices}) == 4
        assert [health.state for health in partitioners.health()] == ["ok"] * 8
    finally:
        partitioners.restore()
    assert all_ledgers() == ([], [])
    assert not any(Path(gmi_slice.share.pipe_directory).exists() for gmi_slice in partitioned.slices)
