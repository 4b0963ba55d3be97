from __future__ import annotations

from dataclasses import replace

from placement.allocation import assign_allocated_gpus
from placement.inventory.cluster import _in_order, divide_hosts
from placement.inventory.nvml import select_visible
from placement.plan import make_plan
from placement.types import Gpu, GpuLink, Machine, MigInstance, Node

GPUS = tuple(Gpu(index=i, uuid=f"GPU-{i}", name="fake", memory_total_bytes=1) for i in range(2))


def node(name: str, cores: int, ray_cpus: float, ray_gpus: float = 0.0, gpus: tuple[Gpu, ...] = ()) -> Node:
    return Node(
        name=name,
        cores=tuple(range(cores)),
        memory_total_bytes=1,
        gpus=gpus,
        ray_cpus=ray_cpus,
        ray_gpus=ray_gpus,
    )


def test_nodes_of_one_host_get_disjoint_cores():
    first, second = divide_hosts([node("a", 4, 1.0), node("b", 4, 2.0)], ["host", "host"])
    assert first.usable_cores == (0,)
    assert second.usable_cores == (1, 2)
    assert first.pinnable
    assert second.pinnable


def test_nodes_are_in_one_order_whatever_order_ray_lists_them_in():
    listed = [{"NodeManagerHostname": host, "NodeID": number} for host, number in ("b1", "a3", "b0", "c2")]
    expected = ["a3", "b0", "b1", "c2"]
    for entries in (listed, listed[::-1]):
        assert [entry["NodeManagerHostname"] + entry["NodeID"] for entry in _in_order(entries)] == expected


def test_nodes_of_different_hosts_keep_their_cores():
    first, second = divide_hosts([node("a", 2, 2.0), node("b", 2, 2.0)], ["one", "other"])
    assert first.usable_cores == second.usable_cores == (0, 1)


def test_a_node_for_which_no_core_is_left_only_counts_them():
    first, second = divide_hosts([node("a", 2, 2.0), node("b", 2, 2.0)], ["host", "host"])
    assert first.pinnable
    assert second.usable_cores == (0, 1)
    assert not second.pinnable


def test_nodes_of_one_host_get_different_gpus():
    nodes = [node("a", 4, 1.0, 1.0, GPUS), node("b", 4, 1.0, 1.0, GPUS)]
    first, second = divide_hosts(nodes, ["host", "host"])
    assert [gpu.uuid for gpu in first.usable_gpus] == ["GPU-0"]
    assert [gpu.uuid for gpu in second.usable_gpus] == ["GPU-1"]


def test_links_go_where_both_of_their_gpus_go():
    linked = replace(node("a", 4, 1.0, 2.0, GPUS), gpu_links=(GpuLink(gpus=("GPU-0", "GPU-1"), nvlinks=4),))
    (whole,) = divide_hosts([linked], ["host"])
    assert whole.gpu_links == linked.gpu_links
    split = replace(linked, ray_gpus=1.0)
    assert divide_hosts([split, split], ["host", "host"])[1].gpu_links == ()


def test_logical_gpus_that_no_driver_knows_do_not_appear():
    (only,) = divide_hosts([node("a", 2, 2.0, ray_gpus=8.0)], ["host"])
    assert only.usable_gpus == ()


def cut_gpu(index: int) -> Gpu:
    instances = tuple(
        MigInstance(
            uuid=f"MIG-{index}{i}",
            profile="3g.20gb",
            start=4 * i,
            size=4,
            memory_bytes=20 * 2**30,
            sm_count=42,
        )
        for i in range(2)
    )
    return Gpu(
        index=index, uuid=f"GPU-{index}", name="A100", memory_total_bytes=40 * 2**30, sm_count=108,
        compute_capability=(8, 0), mig_enabled=True, mig_instances=instances,
    )  # fmt: skip


def test_mig_instances_with_which_ray_was_started_are_planned_and_bound_as_gpus():
    visible = select_visible((cut_gpu(0), cut_gpu(1)), "MIG-00,MIG-01,MIG-10,MIG-11")
    node = Node(name="n", cores=tuple(range(4)), memory_total_bytes=2**36, gpus=visible, ray_gpus=4.0)
    machine = Machine(nodes=(node,), origin="ray")
    plan = make_plan(machine, num_envs=1)
    assert plan.backend == "direct"
    assert plan.memory_bytes(0) == 20 * 2**30
    given = assign_allocated_gpus(plan, [("MIG-11",), ("MIG-00",), ("MIG-10",), ("MIG-01",)])
    assert [gmi_slice.gpu_uuid for gmi_slice in given.slices] == ["MIG-11", "MIG-00", "MIG-10", "MIG-01"]
    # Two GMIs on an instance share it by MPS, with a daemon for the instance.
    assert make_plan(machine, num_envs=1, gmis_per_gpu=2, num_gmis=4).backend == "mps"
