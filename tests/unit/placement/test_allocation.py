from __future__ import annotations

from dataclasses import replace

import pytest

from placement.allocation import assign_allocated_gpus, assign_allocated_nodes, assign_moved
from placement.errors import PlanError
from placement.plan import bundle_of, make_plan
from placement.types import Gpu, Machine, Node, Share


def node(name: str, cores: range, gpus: int = 0, ray_node_id: str | None = None) -> Node:
    return Node(
        name=name,
        cores=tuple(cores),
        memory_total_bytes=2**30,
        gpus=tuple(
            Gpu(index=i, uuid=f"GPU-{name}{i}", name="fake", memory_total_bytes=2**30) for i in range(gpus)
        ),
        ray_node_id=ray_node_id,
    )


TWO_NODES = Machine(nodes=(node("a", range(4), 1, "ida"), node("b", range(8, 12), 1, "idb")), origin="ray")


def test_swapped_nodes_swap_cores_and_gpus():
    plan = make_plan(TWO_NODES, num_envs=1)
    bound = assign_allocated_nodes(plan, ["idb", "ida"])
    assert [(gmi_slice.node, gmi_slice.cores, gmi_slice.gpu_uuid) for gmi_slice in bound.slices] == [
        ("b", (8, 9, 10, 11), "GPU-b0"),
        ("a", (0, 1, 2, 3), "GPU-a0"),
    ]


@pytest.mark.parametrize("left_out", range(4))
@pytest.mark.parametrize("backend", ["cpu", "direct"])
def test_gmis_keep_their_cores_and_gpus_beside_one_that_is_left_out(backend, left_out):
    counts = {"num_gmis": 4} if backend == "cpu" else {"gmis_per_gpu": 2}
    plan = make_plan(TWO_NODES, backend=backend, num_envs=1, left_out=[left_out], **counts)
    ids = ["ida" if gmi_slice.node == "a" else "idb" for gmi_slice in plan.slices]
    assert assign_allocated_nodes(plan, ids) == plan
    ((gone,), used) = plan.left_out, [core for gmi_slice in plan.slices for core in gmi_slice.cores]
    assert sorted((*gone.cores, *used)) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_more_gmis_on_a_node_than_its_cores_hold_are_refused():
    plan = make_plan(TWO_NODES, num_envs=1, backend="cpu", num_gmis=4)
    with pytest.raises(PlanError, match="2 cores for GMI 2 on node a: 0 of 0-3 are left"):
        assign_allocated_nodes(plan, ["ida"] * 4)


def test_more_gmis_on_a_node_than_its_gpus_hold_are_refused():
    plan = make_plan(TWO_NODES, num_envs=1, threads_per_gmi=1)
    with pytest.raises(PlanError, match="1 of a GPU for GMI 1 on node a: it has 1 GPU, all taken"):
        assign_allocated_nodes(plan, ["ida", "ida"])


def test_the_gpus_that_ray_gave_replace_the_planned_ones():
    machine = Machine(nodes=(node("a", range(8), 2, "ida"),), origin="ray")
    plan = make_plan(machine, num_envs=1, gmis_per_gpu=2)
    by_index_or_uuid = [("1",), ("1",), ("GPU-a0",), ("GPU-a0",)]
    given = assign_allocated_gpus(plan, by_index_or_uuid)
    assert [gmi_slice.gpu_uuid for gmi_slice in given.slices] == ["GPU-a1", "GPU-a1", "GPU-a0", "GPU-a0"]
    assert [gmi_slice.cores for gmi_slice in given.slices] == [gmi_slice.cores for gmi_slice in plan.slices]


@pytest.mark.parametrize("given", [("7",), ()])
def test_a_gpu_that_the_inventory_does_not_know_is_refused(given):
    machine = Machine(nodes=(node("a", range(2), 1, "ida"),), origin="ray")
    with pytest.raises(PlanError, match=r"a GPU for GMI 0 on node a: Ray gave (7|none), .* 0 \(GPU-a0\)"):
        assign_allocated_gpus(make_plan(machine, num_envs=1), [given])


def test_a_gpu_that_cannot_be_used_is_refused():
    read = node("a", range(8), 2, "ida")
    closed = replace(read, gpus=(replace(read.gpus[0], compute_mode="prohibited"), read.gpus[1]))
    plan = make_plan(Machine(nodes=(closed,), origin="ray"), num_envs=1)
    assert [gmi_slice.gpu_uuid for gmi_slice in plan.slices] == ["GPU-a1"]
    message = "Ray gave GPU 0, which cannot be used: GPU-a0 admits no process .* CUDA_VISIBLE_DEVICES"
    with pytest.raises(PlanError, match=message):
        assign_allocated_gpus(plan, [("0",)])


def test_more_of_a_gpu_than_there_is_is_refused():
    machine = Machine(nodes=(node("a", range(8), 2, "ida"),), origin="ray")
    plan = make_plan(machine, num_envs=1, gmis_per_gpu=2)
    with pytest.raises(PlanError, match=r"shares 0.5, 0.5, 0.5 of GPU-a1 on node a: Ray gave more of it"):
        assign_allocated_gpus(plan, [("1",), ("1",), ("1",), ("0",)])


def test_slices_of_cores_are_given_no_gpu():
    plan = make_plan(TWO_NODES, num_envs=1, backend="cpu", num_gmis=2)
    assert assign_allocated_gpus(plan, [(), ("0",)]) == plan


@pytest.mark.parametrize("shares", range(1, 41))
def test_a_gpu_with_equal_shares_is_allocated_to_all_of_them(shares):
    machine = Machine(nodes=(node("a", range(2 * shares), 2, "ida"),), origin="ray")
    plan = make_plan(machine, num_envs=1, gmis_per_gpu=shares)
    assert assign_allocated_nodes(plan, ["ida"] * (2 * shares)) == plan


def test_a_shared_reservation_keeps_threads_and_drops_cores():
    bound = assign_allocated_nodes(
        make_plan(TWO_NODES, num_envs=1, backend="cpu", num_gmis=2), ["ida", "idb"], pinned=False
    )
    assert [(gmi_slice.cores, gmi_slice.num_threads) for gmi_slice in bound.slices] == [((), 4), ((), 4)]
    assert not any("GOMP_SPINCOUNT" in gmi_slice.environment for gmi_slice in bound.slices)


def test_a_machine_read_without_ray_is_the_one_node_that_ray_gave():
    plan = make_plan(Machine(nodes=(node("here", range(2)),), origin="local"), num_envs=1)
    assert assign_allocated_nodes(plan, ["any", "any"]) == plan


def test_a_machine_read_without_ray_cannot_be_two_nodes():
    plan = make_plan(Machine(nodes=(node("here", range(2)),), origin="local"), num_envs=1)
    with pytest.raises(PlanError, match=r"here \(not from Ray\).*cluster_machine"):
        assign_allocated_nodes(plan, ["one", "two"])


def test_a_gmi_that_ray_has_started_on_another_node_shares_that_ones_cores_with_those_that_are_there():
    plan = make_plan(TWO_NODES, num_envs=1, backend="cpu", num_gmis=4)
    assert plan.slices[1].cores == (2, 3)
    assert assign_moved(plan, 1, "ida") == plan
    after = assign_moved(plan, 1, "idb")
    moved = after.slices[1]
    assert (moved.node, moved.cores, moved.num_threads, moved.environment["OMP_NUM_THREADS"]) == (
        "b",
        (),
        2,
        "2",
    )
    assert after.slices[:1] + after.slices[2:] == plan.slices[:1] + plan.slices[2:]
    assert bundle_of(moved) == bundle_of(plan.slices[1])
    assert assign_moved(after, 1, "ida").slices[1].node == "a"


def test_a_gmi_on_another_node_has_the_gpu_that_ray_gave_it_there():
    machine = Machine(nodes=(node("a", range(4), 1, "ida"), node("b", range(4), 2, "idb")), origin="ray")
    plan = make_plan(machine, num_envs=1, backend="direct", gmis_per_gpu=2, num_gmis=2, threads_per_gmi=1)
    assert [gmi_slice.gpu_uuid for gmi_slice in plan.slices] == ["GPU-a0"] * 2
    moved = assign_moved(plan, 0, "idb", ["1"]).slices[0]
    assert (moved.node, moved.gpu_uuid, moved.gpu_fraction) == ("b", "GPU-b1", 0.5)
    assert moved.share == Share(kind="direct", gpu_uuid="GPU-b1")
    with pytest.raises(PlanError, match=r"a GPU for GMI 0 on node b: Ray gave none"):
        assign_moved(plan, 0, "idb")


def test_a_gmi_whose_gpu_is_partitioned_cannot_move():
    plan = make_plan(TWO_NODES, num_envs=1, backend="mps", gmis_per_gpu=2, threads_per_gmi=1)
    with pytest.raises(
        PlanError, match=r"a share of a GPU for GMI 0 on node b: .* mps partitions .*Resume the run"
    ):
        assign_moved(plan, 0, "idb", ["0"])


def test_a_node_that_the_plan_does_not_know_is_named():
    with pytest.raises(
        PlanError, match=r"a GMI on Ray node idc: the plan's machine has a \(ida\), b \(idb\)"
    ):
        assign_moved(make_plan(TWO_NODES, num_envs=1, backend="cpu"), 0, "idc")
