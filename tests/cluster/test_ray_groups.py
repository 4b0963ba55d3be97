"""Reservations and the cluster inventory on a local Ray with four logical CPUs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import ray
from ray import cloudpickle
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement import ray_groups
from placement.allocation import assign_allocated_nodes
from placement.backends import get_backend
from placement.errors import InventoryError, ReservationError, SliceError
from placement.inventory import cluster_machine
from placement.plan import PlacementPlan, make_plan
from placement.ray_groups import (
    Reservation,
    _bundle_node_ids,
    _verify_nodes,
    current_reservation,
    is_placed,
    move,
    release,
    reserve,
    scheduling,
)
from placement.types import Machine, Node, Slice
from rayagi.cli import main
from tests.waiting import until

pytestmark = pytest.mark.cluster

NUM_CPUS = 4
LIMIT_S = 10.0


@pytest.fixture(scope="module", autouse=True)
def _local_ray() -> Iterator[None]:
    # Workers cannot import this file: its functions travel as values.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(address="local", num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _every_cpu_is_free(_local_ray) -> None:
    """Ray returns the resources of a removed group a moment later."""
    until(lambda: ray.available_resources().get("CPU") == NUM_CPUS)


@pytest.fixture
def hold(_every_cpu_is_free) -> Iterator[Callable[[PlacementPlan], Reservation]]:
    """Reserves a plan, and releases it when the test ends, however it ends."""
    held: list[Reservation] = []

    def reserve_until_the_end(plan: PlacementPlan) -> Reservation:
        held.append(reserve(plan, LIMIT_S))
        return held[-1]

    yield reserve_until_the_end
    for reservation in held:
        release(reservation)


def plan_for(num_gmis: int, threads: int = 1, ray_node_id: str | None = None) -> PlacementPlan:
    """A plan for a made-up machine of 16 cores, which Ray here does not have."""
    node = Node(name="large", cores=tuple(range(16)), memory_total_bytes=2**34, ray_node_id=ray_node_id)
    machine = Machine(nodes=(node,), origin="test")
    return make_plan(machine, backend="cpu", num_gmis=num_gmis, threads_per_gmi=threads, num_envs=8)


def node_id() -> str:
    return ray.get_runtime_context().get_node_id()


def pending_groups() -> list[dict]:
    return [group for group in placement_group_table().values() if group["state"] in ("PENDING", "CREATED")]


def test_rayagi_info_shows_the_cluster(capsys):
    assert main(["info", "--cluster"]) == 0
    shown = capsys.readouterr().out
    assert f"Ray grants {NUM_CPUS} CPUs and 0 GPUs" in shown
    assert f"node {cluster_machine().nodes[0].name}: " in shown


def test_a_plan_that_fits_is_reserved_verified_and_released(hold):
    plan = plan_for(num_gmis=3)
    reservation = hold(plan)
    assert reservation.bundle_node_ids == (node_id(),) * 3
    assert assign_allocated_nodes(plan, reservation.bundle_node_ids) == plan
    release(reservation)
    release(reservation)
    until(lambda: ray.available_resources().get("CPU") == NUM_CPUS)


def test_only_who_comes_to_an_idle_node_is_alone_there(hold):
    assert hold(plan_for(num_gmis=1)).alone
    until(lambda: ray.available_resources().get("CPU") == NUM_CPUS - 1)
    assert not hold(plan_for(num_gmis=2)).alone


def test_of_two_runs_that_find_a_node_idle_at_the_same_time_only_the_first_is_alone(hold, monkeypatch):
    ask, first = ray_groups.placement_group, []

    def ask_after_another_run(*arguments, **options):
        monkeypatch.setattr(ray_groups, "placement_group", ask)
        first.append(hold(plan_for(num_gmis=1)))  # the second has looked at the nodes already
        return ask(*arguments, **options)

    monkeypatch.setattr(ray_groups, "placement_group", ask_after_another_run)
    assert not hold(plan_for(num_gmis=2)).alone
    assert first[0].alone


def test_a_gmi_that_is_moved_has_a_place_of_its_own_once_there_is_one(hold):
    plan = plan_for(num_gmis=3)
    reservation = hold(plan)
    assert all(is_placed(reservation, index) for index in range(3))
    move(reservation, plan, 1)
    until(lambda: is_placed(reservation, 1))
    own, bundle = reservation.place_of(1)
    assert (own != reservation.group, bundle) == (True, 0)
    assert [reservation.place_of(index) for index in (0, 2)] == [
        (reservation.group, 0),
        (reservation.group, 2),
    ]
    there = ray.remote(node_id).options(num_cpus=1, scheduling_strategy=scheduling(reservation, 1))
    assert ray.get(there.remote(), timeout=30) == node_id()
    move(reservation, plan, 2)  # the node's CPUs are all taken
    assert not is_placed(reservation, 2)
    release(reservation)
    until(lambda: ray.available_resources().get("CPU") == NUM_CPUS)
    assert not pending_groups()


def test_the_bundles_of_a_node_from_this_cluster_are_held_to_it(hold):
    plan = plan_for(num_gmis=2, ray_node_id=node_id())
    reservation = hold(plan)
    assert set(reservation.bundle_node_ids) == {node_id()}


def test_a_request_larger_than_the_cluster_is_refused_at_once_with_the_numbers():
    started = time.monotonic()
    with pytest.raises(ReservationError) as caught:
        reserve(plan_for(num_gmis=3, threads=2), LIMIT_S)
    assert time.monotonic() - started < LIMIT_S
    error = caught.value
    assert error.waited_s == 0.0
    assert error.asked == "3 x {2 CPU}"
    assert "4 CPU" in error.available
    assert error.would_fit == "2 GMIs of this size would fit: set num_gmis=2 or threads_per_gmi lower"
    assert pending_groups() == []


def test_a_node_that_left_the_cluster_is_named():
    with pytest.raises(ReservationError, match="planned node beef is gone"):
        reserve(plan_for(num_gmis=1, ray_node_id="beef"), LIMIT_S)


def test_a_cluster_that_others_hold_is_refused_after_the_limit_with_what_is_free(hold):
    held = hold(plan_for(num_gmis=3))
    plan = plan_for(num_gmis=2)
    until(lambda: ray.available_resources().get("CPU") == 1.0)
    started = time.monotonic()
    with pytest.raises(ReservationError) as caught:
        reserve(plan, 1.0)
    assert time.monotonic() - started < LIMIT_S
    assert "4 CPU (1 free)" in caught.value.available
    assert caught.value.waited_s >= 1.0
    assert caught.value.would_fit.startswith("1 GMI of this size would fit now: set num_gmis=1")
    assert [group["placement_group_id"] for group in pending_groups()] == [held.group.id.hex()]
    release(held)
    hold(plan)


def test_a_group_that_was_removed_is_no_longer_verified(hold):
    plan = plan_for(num_gmis=1)
    reservation = hold(plan)
    release(reservation)
    with pytest.raises(ReservationError, match="state REMOVED"):
        _bundle_node_ids(reservation.group, plan, reservation.bundles)


def test_a_bundle_on_another_node_than_planned_names_both(hold):
    plan = plan_for(num_gmis=1)
    reservation = hold(plan)
    with pytest.raises(ReservationError, match=rf"GMI 0 planned on large \(beef\) is on {node_id()}"):
        _verify_nodes(plan_for(num_gmis=1, ray_node_id="beef"), reservation.bundle_node_ids)


def enter_slice(gmi_slice: Slice) -> tuple[list[int], str]:
    """What a GMI's process does first; returns its cores and its node."""
    get_backend(gmi_slice.backend).enter(gmi_slice)
    return sorted(os.sched_getaffinity(0)), ray.get_runtime_context().get_node_id()


def start(plan: PlacementPlan, reservation: Reservation, index: int) -> ray.ObjectRef:
    gmi_slice = plan.slices[index]
    return (
        ray.remote(enter_slice)
        .options(
            num_cpus=gmi_slice.num_threads,
            max_retries=0,
            scheduling_strategy=scheduling(reservation, index),
            runtime_env={"env_vars": gmi_slice.environment},
        )
        .remote(gmi_slice)
    )


def test_a_process_in_a_reserved_bundle_enters_its_slice(hold):
    plan = make_plan(cluster_machine(), num_envs=8, num_gmis=1, threads_per_gmi=1)
    reservation = hold(plan)
    assert ray.get(start(plan, reservation, 0), timeout=120) == (list(plan.slices[0].cores), node_id())


def test_a_slice_of_cores_that_do_not_exist_reaches_the_driver_as_slice_error(hold):
    node = Node(name="large", cores=(1023,), memory_total_bytes=2**34)
    plan = make_plan(Machine(nodes=(node,), origin="test"), num_envs=8)
    reservation = hold(plan)
    with pytest.raises(SliceError, match="Ray was started with more CPUs than there are cores"):
        ray.get(start(plan, reservation, 0), timeout=120)


def inside(plan: PlacementPlan) -> tuple[Reservation | None, int]:
    """Runs in a task of someone else's group, as a Tune trial does: its reservation, and its groups afterwards."""
    reservation = current_reservation(plan)
    if reservation is not None:
        release(reservation)
    return reservation, len(pending_groups())


def in_group(num_bundles: int, plan: PlacementPlan) -> tuple[Reservation | None, int]:
    group = placement_group([{"CPU": 1.0}] * num_bundles)
    try:
        assert group.wait(10)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        answer = (
            ray.remote(inside).options(num_cpus=1, max_retries=0, scheduling_strategy=strategy).remote(plan)
        )
        return ray.get(answer, timeout=60)
    finally:
        remove_placement_group(group)


def test_inside_a_trials_group_the_gmis_have_the_bundles_after_the_first():
    reservation, groups = in_group(3, plan_for(num_gmis=2))
    assert reservation is not None
    assert (reservation.bundles, reservation.owned, reservation.alone) == ((1, 2), False, False)
    assert reservation.bundle_node_ids == (node_id(),) * 2
    assert groups == 1  # release left the trial's group alone


def test_a_trial_without_a_bundle_of_its_own_starts_at_the_first():
    reservation, _ = in_group(2, plan_for(num_gmis=2))
    assert reservation is not None
    assert reservation.bundles == (0, 1)


def test_a_trials_group_that_is_too_small_is_refused_with_both_sides():
    with pytest.raises(ReservationError, match=r"Asked: 2 x \{2 CPU\}.*bundles 3 x \{1 CPU\}"):
        in_group(3, plan_for(num_gmis=2, threads=2))


def test_outside_of_a_group_there_is_no_current_reservation():
    assert current_reservation(plan_for(num_gmis=1)) is None


def test_the_cluster_inventory_has_real_cores_and_rays_grants():
    machine = cluster_machine()
    (node,) = machine.nodes
    assert machine.origin == "ray"
    assert node.ray_node_id == node_id()
    assert node.ray_cpus == NUM_CPUS
    assert set(node.usable_cores) <= os.sched_getaffinity(0)
    assert len(node.usable_cores) == min(NUM_CPUS, len(node.cores))
    assert node.gpus == ()


def test_a_node_that_does_not_answer_in_time_is_named():
    with pytest.raises(InventoryError, match=r"did not respond within .* s"):
        cluster_machine(timeout_s=0.0)


def test_a_reservation_outlives_ray_as_a_value(hold):
    reservation = hold(plan_for(num_gmis=1))
    ray.shutdown()
    try:
        release(reservation)
        assert current_reservation(plan_for(num_gmis=1)) is None
        with pytest.raises(InventoryError, match="not connected"):
            cluster_machine()
        assert not ray.is_initialized()
    finally:
        ray.init(address="local", num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False)
