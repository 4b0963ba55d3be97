from __future__ import annotations

from dataclasses import replace

from placement.capacity import NodeResources, bundles_text, capacity_error, plan_fits
from placement.plan import make_plan
from placement.types import Gpu, Machine, Node

CPU8 = Machine(nodes=(Node(name="n", cores=tuple(range(8)), memory_total_bytes=8),), origin="local")


def resources(name: str, free: float | None = None, **total: float) -> NodeResources:
    left = total if free is None else total | {"CPU": free}
    return NodeResources(name=name, node_id=f"id-{name}", total=total, free=left)


def gpu_machine(num_gpus: int) -> Machine:
    gpus = tuple(Gpu(index=i, uuid=f"GPU-{i}", name="fake", memory_total_bytes=8) for i in range(num_gpus))
    return Machine(
        nodes=(Node(name="n", cores=tuple(range(64)), memory_total_bytes=8, gpus=gpus),), origin="local"
    )


def test_a_plan_of_one_node_does_not_fit_scattered_cpus():
    plan = make_plan(CPU8, num_envs=1, num_gmis=4, threads_per_gmi=1)
    assert plan_fits(plan, [resources("a", CPU=4.0)])
    assert not plan_fits(plan, [resources("a", CPU=2.0), resources("b", CPU=2.0)])


def test_a_plan_of_known_nodes_fits_only_those_nodes():
    nodes = tuple(
        Node(name=name, cores=(0, 1), memory_total_bytes=8, ray_node_id=f"id-{name}") for name in "ab"
    )
    plan = make_plan(Machine(nodes=nodes, origin="ray"), num_envs=1)
    assert plan_fits(plan, [resources("a", CPU=2.0), resources("b", CPU=2.0)])
    assert not plan_fits(plan, [resources("a", CPU=16.0)])
    error = capacity_error(plan, [resources("a", CPU=16.0)], waited_s=0.0)
    assert "planned node id-b is gone" in str(error)
    assert "Plan again" in error.would_fit


def test_a_fraction_of_a_gpu_never_spans_two():
    # 0.4 twice on each of two GPUs leaves 0.2 + 0.2: a fifth does not fit although the sum does
    plan = make_plan(gpu_machine(3), num_envs=1, gmis_per_gpu=2, num_gmis=5)
    plan = replace(plan, slices=tuple(replace(gmi_slice, gpu_fraction=0.4) for gmi_slice in plan.slices))
    assert not plan_fits(plan, [resources("a", CPU=64.0, GPU=2.0)])
    assert plan_fits(plan, [resources("a", CPU=64.0, GPU=3.0)])


def test_a_refusal_says_what_was_asked_what_there_is_and_what_would_fit():
    plan = make_plan(CPU8, num_envs=1, num_gmis=4)
    error = capacity_error(plan, [resources("box", CPU=5.0)], waited_s=0.0)
    assert error.asked == "4 x {2 CPU}"
    assert error.available == "box: 5 CPU (5 free)"
    assert error.would_fit == "2 GMIs of this size would fit: set num_gmis=2 or threads_per_gmi lower"
    assert "Waited" not in str(error)


def test_after_a_wait_only_what_is_free_counts():
    plan = make_plan(CPU8, num_envs=1, num_gmis=4, threads_per_gmi=2)
    error = capacity_error(plan, [resources("box", free=1.0, CPU=8.0)], waited_s=10.0)
    assert "box: 8 CPU (1 free)" in error.available
    assert error.would_fit.startswith("No GMI of this size would fit now: set threads_per_gmi to 1 or less")
    assert "Waited 10.0 s." in str(error)


def test_without_a_free_cpu_there_is_only_waiting():
    plan = make_plan(CPU8, num_envs=1, num_gmis=1, threads_per_gmi=2)
    error = capacity_error(plan, [resources("a", CPU=2.0, free=0.0)], waited_s=10.0)
    assert error.would_fit == "Nothing would fit now: no CPU is left. Wait until others have finished"


def test_a_cluster_without_the_gpu_says_use_the_cpu():
    error = capacity_error(make_plan(gpu_machine(1), num_envs=1), [resources("box", CPU=64.0)], waited_s=0.0)
    assert "use backend='cpu'" in error.would_fit


def test_a_cluster_of_many_nodes_is_listed_in_part():
    plan = make_plan(CPU8, num_envs=1, num_gmis=8)
    error = capacity_error(plan, [resources(f"n{i}", CPU=1.0) for i in range(20)], waited_s=0.0)
    assert "n7: 1 CPU (1 free); 12 more nodes" in error.available


def test_no_node_at_all_is_said_so():
    error = capacity_error(make_plan(CPU8, num_envs=1), [], waited_s=0.0)
    assert error.available == "no live node"
    assert error.would_fit == "Start Ray with at least one CPU"


def test_a_plan_that_fits_empty_nodes_may_not_fit_what_is_free():
    plan = make_plan(CPU8, num_envs=1, num_gmis=2, threads_per_gmi=2)
    nodes = [resources("box", free=3.0, CPU=8.0)]
    assert plan_fits(plan, nodes)
    assert not plan_fits(plan, nodes, only_free=True)
    assert plan_fits(plan, [resources("box", free=4.0, CPU=8.0)], only_free=True)


def test_equal_bundles_are_counted():
    text = bundles_text([{"CPU": 1.0, "GPU": 0.5}, {"CPU": 2.0}, {"CPU": 1.0, "GPU": 0.5}])
    assert text == "2 x {1 CPU, 0.5 GPU} + 1 x {2 CPU}"


def test_fractions_that_sum_up_but_do_not_pack_do_not_fit():
    plan = make_plan(gpu_machine(2), num_envs=1, gmis_per_gpu=3, num_gmis=5, threads_per_gmi=1, backend="mps")
    five = replace(plan, slices=tuple(replace(gmi_slice, gpu_fraction=0.4) for gmi_slice in plan.slices))
    # 5 x 0.4 = 2 GPUs, of which each holds two: the fifth never gets a place.
    nodes = [resources("n", CPU=64.0, GPU=2.0)]
    assert not plan_fits(five, nodes)
    assert (
        capacity_error(five, nodes, waited_s=0.0).would_fit == "4 GMIs of this size would fit: set num_gmis=4"
    )
    assert plan_fits(replace(five, slices=five.slices[:4]), nodes)
