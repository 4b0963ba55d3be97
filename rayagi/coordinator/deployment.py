"""Deployment of a plan: reserve, start, partition, enter; then join the group and build. Registers the undo of each step."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from actors.gmi import ProgramFactory, WorkerInfo, WorkloadFactory
from actors.groups import GmiGroup, start, stop
from actors.partitioners import Partitioners
from placement.allocation import assign_allocated_gpus, assign_allocated_nodes
from placement.errors import ReservationError
from placement.plan import PlacementPlan
from placement.ray_groups import Reservation, current_reservation, left_out_held, release, reserve
from rayagi.config.spec import GmiSpec
from rayagi.coordinator.cluster import (
    BUILD_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    START_TIMEOUT_S,
    inherited_environment,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """GMIs on their slices."""

    plan: PlacementPlan
    """The plan with the nodes and GPUs that Ray allocated, and the shares of each GPU."""
    group: GmiGroup
    reservation: Reservation
    workers: tuple[WorkerInfo, ...]
    """Node and process of each GMI, as it reports them."""
    partitioners: Partitioners


def deploy(plan: PlacementPlan, *, task: str, run: str, gmi: GmiSpec, undo: ExitStack) -> Deployment:
    """Reserve the plan's bundles, start a GMI in each, partition the allocated GPUs, and enter the slices.

    Args:
        plan: the plan to deploy
        task: task id, for the names of the GMIs
        run: name of the run, for the ledgers
        gmi: time limits of the reservation and of silent processes
        undo: receives the undo of each step, in order, also if a step fails half-way

    Raises:
        ReservationError, PlanError: Ray does not grant the bundles, or allocated other resources than planned.
        PartitionError, SliceError: a GPU could not be partitioned, or a process not confined to its share.
        GmiLostError, GmiSilentError: a GMI did not start.
    """
    # 1. Reserve the bundles.
    reservation = current_reservation(plan)
    if reservation is None:
        with left_out_held(plan, gmi.reserve_timeout_s):
            reservation = reserve(plan, gmi.reserve_timeout_s)
    undo.callback(release, reservation)
    # Pin only on nodes without other jobs: two runs would pin to the same first cores.
    allocated_plan = assign_allocated_nodes(plan, reservation.bundle_node_ids, pinned=reservation.alone)
    # Registered before the GMIs start, so that the partitions are undone only after the GMIs have ended.
    partitioners = Partitioners(run)
    undo.callback(partitioners.restore)
    # 2. Start the GMIs, without any CUDA call. They report the GPUs that Ray allocated.
    group = start(
        allocated_plan, reservation, task, gmi.collective_timeout_s, inherited=inherited_environment()
    )
    undo.callback(stop, group, CLOSE_TIMEOUT_S, partitioners.evict)
    workers = _worker_infos(group, reservation)
    # 3. Partition these GPUs. 4. Each GMI enters its slice.
    partitioned = partitioners.partition(
        assign_allocated_gpus(allocated_plan, [worker.gpu_ids for worker in workers]), workers
    )
    refs = group.ask(lambda index, handle: handle.enter.remote(partitioned.slices[index]))
    return Deployment(
        plan=partitioned,
        group=group,
        reservation=reservation,
        workers=tuple(group.answers(refs, "entering its slice", START_TIMEOUT_S)),
        partitioners=partitioners,
    )


def join_and_build(group: GmiGroup, gmi: GmiSpec, factory: ProgramFactory | WorkloadFactory) -> None:
    """Form the collective group, then build every GMI's program.

    Raises:
        GmiLostError, GmiSilentError: a GMI was lost, or did not respond in time.
        Exception: an error of joining or building in a GMI.
    """
    members = [identity.index for identity in group.identities if identity.joins_group]
    refs = group.ask(
        lambda index, handle: handle.join_through.remote(
            timeout_s=gmi.collective_timeout_s, transport=gmi.transport, composition=gmi.composition
        ),
        members,
    )
    group.answers(refs, "joining the group", START_TIMEOUT_S + gmi.collective_timeout_s, members)
    refs = group.ask(lambda index, handle: handle.build.remote(factory))
    group.answers(refs, "building its program", BUILD_TIMEOUT_S)


def _worker_infos(group: GmiGroup, reservation: Reservation) -> tuple[WorkerInfo, ...]:
    """Wait until every GMI has started, and check that it is on its reserved node."""
    refs = group.ask(lambda index, handle: handle.worker_info.remote())
    workers: list[WorkerInfo] = group.answers(refs, "reporting its node", START_TIMEOUT_S)
    for worker in workers:
        group.pings.add(worker.index, worker.ping_address)
    for worker, node_id in zip(workers, reservation.bundle_node_ids, strict=True):
        if worker.node_id != node_id:
            raise ReservationError(
                f"GMI {worker.index} on Ray node {node_id}",
                f"it runs on {worker.node_id} ({worker.hostname})",
                "A node was replaced in the meantime: start again",
                0.0,
            )
    return tuple(workers)
