"""From a plan to GMIs on their slices: place, ask, carve, enter; then join and build. The undo of each step is beside it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from actors.gmi import ProgramFactory, WorkerInfo, WorkloadFactory
from actors.groups import GmiGroup, start, stop
from actors.partitioners import Partitioners
from placement.allocation import assign_allocated_gpus, assign_allocated_nodes
from placement.errors import ReservationError
from placement.plan import PlacementPlan
from placement.ray_groups import Reservation, current_reservation, release, reserve
from rayagi.config.spec import GmiSpec
from rayagi.coordinator.time_limits import BUILD_TIMEOUT_S, CLOSE_TIMEOUT_S, START_TIMEOUT_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """GMIs on their slices."""

    plan: PlacementPlan
    """On the nodes and GPUs that Ray gave, with the shares that were carved there."""
    group: GmiGroup
    reservation: Reservation
    workers: tuple[WorkerInfo, ...]
    """Where each GMI really is, by its own account."""
    partitioners: Partitioners


def deploy(
    plan: PlacementPlan, *, task: str, run: str, reserve_timeout_s: float, undo: ExitStack
) -> Deployment:
    """Reserve the plan's bundles, start a process in each, cut the GPUs that they were given, and let them in.

    Args:
        plan: what is wanted
        task: for the GMIs' names
        run: for the ledgers of what is carved
        reserve_timeout_s: for Ray to grant the bundles
        undo: gets what undoes each step, in order, also of a step that fails half-way

    Raises:
        ReservationError, PlanError: Ray does not grant it, or granted something else.
        PartitionError, SliceError: a GPU could not be cut, or a process not be confined to its share.
        GmiLostError, GmiSilentError: a GMI did not start.
    """
    reservation = current_reservation(plan)
    if reservation is None:
        reservation = reserve(plan, reserve_timeout_s)
    undo.callback(release, reservation)
    # Pinned to the same first cores, runs that share a node would starve each other.
    allocated_plan = assign_allocated_nodes(plan, reservation.bundle_node_ids, pinned=reservation.alone)
    # They cut after the GMIs have started, but undo it only after these have left: hence made before.
    partitioners = Partitioners(run)
    undo.callback(partitioners.restore)
    group = start(allocated_plan, reservation, task)
    undo.callback(stop, group, CLOSE_TIMEOUT_S, partitioners.evict)
    workers = _worker_infos(group, reservation)
    partitioned = partitioners.partition(
        assign_allocated_gpus(allocated_plan, [worker.gpu_ids for worker in workers]), workers
    )
    return Deployment(
        plan=partitioned,
        group=group,
        reservation=reservation,
        workers=_enter_slices(group, partitioned),
        partitioners=partitioners,
    )


def join_and_build(group: GmiGroup, gmi: GmiSpec, factory: ProgramFactory | WorkloadFactory) -> None:
    """Connect the GMIs that reduce together, and have every GMI build its program.

    Raises:
        GmiLostError, GmiSilentError: one is gone, or did not answer in time.
        Exception: what joining or building raised in a GMI.
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
    """Wait until every GMI is there, on the node that was reserved for it."""
    refs = group.ask(lambda index, handle: handle.worker_info.remote())
    workers: list[WorkerInfo] = group.answers(refs, "saying where it is", START_TIMEOUT_S)
    for worker, node_id in zip(workers, reservation.bundle_node_ids, strict=True):
        if worker.node_id != node_id:
            raise ReservationError(
                f"GMI {worker.index} on Ray node {node_id}",
                f"it runs on {worker.node_id} ({worker.hostname})",
                "A node was replaced meanwhile: start again",
                0.0,
            )
    return tuple(workers)


def _enter_slices(group: GmiGroup, plan: PlacementPlan) -> tuple[WorkerInfo, ...]:
    """Wait until every GMI is on its slice."""
    refs = group.ask(lambda index, handle: handle.enter.remote(plan.slices[index]))
    return tuple(group.answers(refs, "entering its slice", START_TIMEOUT_S))
