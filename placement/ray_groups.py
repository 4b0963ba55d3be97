"""Ray placement groups: reserves a plan's bundles, verifies their nodes, releases them. Every wait has a limit.

Ray silently keeps an infeasible placement group pending forever. ``reserve`` therefore compares the plan with the cluster
first; its error states the request, the available resources, and what would fit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # a DeveloperAPI that ray.util does not re-export
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from placement.allocation import shares_per_gpu
from placement.capacity import (
    ROUNDING,
    NodeResources,
    bundles_text,
    capacity_error,
    plan_fits,
    planned_node_ids,
)
from placement.errors import ReservationError
from placement.plan import PlacementPlan, bundle_of
from placement.types import Machine, Node

NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray sets on every node."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """A placement group that holds a plan's bundles."""

    group: PlacementGroup
    bundle_node_ids: tuple[str, ...]
    """Ray's node id of each GMI's bundle, in GMI order."""
    bundles: tuple[int, ...]
    """Index of each GMI's bundle in the group, in GMI order; other bundles belong to others, such as a Tune trial itself."""
    owned: bool = True
    """False for a group that was created, and will be removed, by someone else."""
    alone: bool = False
    """Whether nobody else had CPUs of these nodes at reservation; only then are GMIs pinned to cores."""
    moved: dict[int, PlacementGroup] = field(default_factory=dict)
    """Groups of one bundle, by GMI, for those whose node has left the cluster."""

    def place_of(self, index: int) -> tuple[PlacementGroup, int]:
        """The group of a GMI's bundle, and the bundle's index in it."""
        return (self.moved[index], 0) if index in self.moved else (self.group, self.bundles[index])


def plan_beside_others(make_plan: Callable[[Machine], PlacementPlan], machine: Machine) -> PlacementPlan:
    """The plan for the connected cluster; if others hold what it needs, one that starts at the least used nodes.

    A plan fills nodes in order, so without this two runs of one node each would both want the first.
    """
    plan = make_plan(machine)
    nodes = _live_nodes()
    # Inside a placement group, such as a Tune trial's, everything is reserved already.
    if get_current_placement_group() is not None or plan_fits(plan, nodes, only_free=True):
        return plan
    used = {
        node.node_id: fsum(node.total.get(kind, 0.0) - node.free.get(kind, 0.0) for kind in ("CPU", "GPU"))
        for node in nodes
    }
    order = sorted(machine.nodes, key=lambda node: used.get(node.ray_node_id or "", 0.0))
    other = make_plan(replace(machine, nodes=tuple(order)))
    return other if plan_fits(other, nodes, only_free=True) else plan


def reserve(plan: PlacementPlan, timeout_s: float = 10.0) -> Reservation:
    """Reserve one bundle per GMI in the connected Ray.

    A label selector places slices whose node came from this cluster on that node. Ray places the others freely, and
    ``assign_allocated_nodes`` then updates the plan.

    Raises:
        ReservationError: immediately if the cluster is too small; after ``timeout_s`` (whole seconds, at least 1) if its
            resources are in use. Nothing stays reserved.
    """
    nodes = _live_nodes()
    if not plan_fits(plan, nodes):
        raise capacity_error(plan, nodes, waited_s=0.0)
    planned, order = planned_node_ids(plan), plan.bundle_order()
    selectors = None if planned is None else [{NODE_ID_LABEL: planned[index]} for index in order]
    started = time.monotonic()
    asked = plan.bundles()
    group = placement_group(
        [asked[index] for index in order], strategy=plan.strategy(), bundle_label_selector=selectors
    )
    bundles = _bundle_indices(plan, 0)
    try:
        if not group.wait(max(1, int(timeout_s))):  # Ray counts whole seconds
            raise capacity_error(plan, _live_nodes(), waited_s=time.monotonic() - started)
        node_ids = _bundle_node_ids(group, plan, bundles)
        _verify_nodes(plan, node_ids)
    except BaseException:
        # Also on Ctrl-C while waiting: a pending group would take the resources as soon as they are free.
        remove_placement_group(group)
        raise
    idle = {
        node.node_id for node in nodes if node.free.get("CPU", 0.0) + ROUNDING >= node.total.get("CPU", 0.0)
    }
    alone = idle.issuperset(node_ids) and not _holds_others(group, node_ids)
    return Reservation(group=group, bundle_node_ids=node_ids, bundles=bundles, alone=alone)


@contextmanager
def left_out_held(plan: PlacementPlan, timeout_s: float) -> Iterator[None]:
    """Hold the shares of GPUs that a plan leaves out or cannot use while it is reserved, so that no GMI gets them from Ray.

    Ray gives a partly used GPU before a free one, and the free one with the lowest index. The GPUs of a node are therefore
    taken in order, of each the part that is left out and the rest; then the rests are released. Logs a warning if others use
    some of these GPUs, since Ray then gives other ones.
    """
    parts = {place: round(fsum(sizes), 4) for place, sizes in shares_per_gpu(plan.left_out).items()}
    if any(gmi_slice.gpu_uuid is not None for gmi_slice in plan.slices):
        parts |= {(gpu.node, gpu.uuid): 1.0 for gpu in plan.unused}
    held: list[Any] = []
    try:
        for name in dict.fromkeys(name for name, _ in parts):
            node = plan.machine.node(name)
            if not _hold(
                node, {uuid: part for (of, uuid), part in parts.items() if of == name}, held, timeout_s
            ):
                _logger.warning(
                    "GPUs of node %s are in use by others: Ray may give the run one that it left out",
                    name,
                )
        yield
    finally:
        for holder in held:
            ray.kill(holder)


def _hold(node: Node, parts: dict[str, float], held: list[Any], timeout_s: float) -> bool:
    """Append actors that hold these parts of a node's GPUs, by UUID, to ``held``; returns whether they do."""
    rests: list[Any] = []
    taken = 1 + max(place for place, gpu in enumerate(node.usable_gpus) if gpu.uuid in parts)
    _wait_for_gpus(node, taken, timeout_s)  # a session that has just closed may still have them
    free = _free_gpus(node)
    try:
        for gpu in node.usable_gpus[:taken]:
            part = parts.get(gpu.uuid, 0.0)
            for amount, holders in ((part, held), (round(1.0 - part, 4), rests)):
                if amount > 0:
                    holders.append(_take_gpu(node, amount))
                    given = ray.get(holders[-1].gpu_id.remote(), timeout=timeout_s)
                    if not gpu.is_called(given):
                        return False
    except ray.exceptions.GetTimeoutError:
        return False
    finally:
        for holder in rests:
            ray.kill(holder)
    _wait_for_gpus(node, free - fsum(parts.values()), timeout_s)
    return True


def _take_gpu(node: Node, amount: float) -> Any:
    """An actor that holds ``amount`` of a GPU of the node."""
    here = node.ray_node_id and NodeAffinitySchedulingStrategy(node.ray_node_id, soft=False)
    return (
        ray.remote(_GpuHolder)
        .options(num_cpus=0, num_gpus=amount, scheduling_strategy=here or "DEFAULT")
        .remote()
    )


class _GpuHolder:
    """Actor whose only purpose is what Ray gave it."""

    def gpu_id(self) -> str:
        """Ray's id of its GPU."""
        return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


def _wait_for_gpus(node: Node, amount: float, timeout_s: float) -> None:
    """Wait until so much of the node's GPUs is free; Ray frees a process's share some time after its end."""
    deadline = time.monotonic() + timeout_s
    while _free_gpus(node) + ROUNDING < amount and time.monotonic() < deadline:
        time.sleep(0.05)


def _free_gpus(node: Node) -> float:
    nodes = [each for each in _live_nodes() if node.ray_node_id in (None, each.node_id)]
    return fsum(each.free.get("GPU", 0.0) for each in nodes)


def current_reservation(plan: PlacementPlan) -> Reservation | None:
    """The placement group in which this process already runs, such as a Tune trial's; None outside of one.

    Its creator owns it, so ``release`` does not remove it. Other trials share its nodes, so ``alone`` is False.

    Raises:
        ReservationError: the group has too few bundles, or too small ones.
    """
    if not ray.is_initialized():
        return None
    group = get_current_placement_group()
    if group is None:
        return None
    specs, asked = group.bundle_specs, plan.bundles()
    # The first bundle is the trial's own; Tune omits it if it is empty.
    first = 0 if len(specs) == plan.num_gmis else 1
    bundles = _bundle_indices(plan, first)
    enough = len(specs) >= first + len(asked) and all(
        specs[place].get(kind, 0.0) >= amount
        for place, want in zip(bundles, asked, strict=True)
        for kind, amount in want.items()
    )
    if not enough:
        raise ReservationError(
            bundles_text(asked),
            f"bundles {bundles_text(specs)} in this trial's placement group, the first {first} its own",
            "Let the trial ask for its resources through default_resource_request, from the same plan",
            0.0,
        )
    node_ids = _bundle_node_ids(group, plan, bundles)
    return Reservation(group=group, bundle_node_ids=node_ids, bundles=bundles, owned=False)


def scheduling(reservation: Reservation, index: int) -> PlacementGroupSchedulingStrategy:
    """Scheduling strategy for the actor of GMI ``index``."""
    group, bundle = reservation.place_of(index)
    return PlacementGroupSchedulingStrategy(
        placement_group=group,
        placement_group_bundle_index=bundle,
        placement_group_capture_child_tasks=False,
    )


def is_placed(reservation: Reservation, index: int) -> bool:
    """Whether the bundle of GMI ``index`` is on a node that is in the cluster."""
    group, bundle = reservation.place_of(index)
    return is_alive(placement_group_table(group).get("bundles_to_node_id", {}).get(bundle, ""))


def is_alive(node_id: str) -> bool:
    """Whether a node is in the cluster."""
    return any(node["Alive"] and node["NodeID"] == node_id for node in ray.nodes())


def move(reservation: Reservation, plan: PlacementPlan, index: int) -> None:
    """Ask Ray for another place for GMI ``index``, whose node has left the cluster. Does not wait: see ``is_placed``.

    ``reserve`` holds bundles to the plan's nodes, for good. This one may be on any node, and Ray moves it when that is lost.
    """
    reservation.moved[index] = placement_group([bundle_of(plan.slices[index])])


def no_other_place(whose: str, waited_s: float) -> ReservationError:
    """The error about bundles of a lost node, whose GMIs are ``whose``, that have found no other in this time."""
    return ReservationError(
        f"another place for {whose}, whose node has left the cluster",
        "; ".join(node.text() for node in _live_nodes()) or "no live node",
        "Add a node like that one, then resume the run",
        waited_s,
    )


def release(reservation: Reservation) -> None:
    """Release the bundles of an owned group. Idempotent; a no-op after Ray has shut down."""
    if reservation.owned and ray.is_initialized():
        for group in reservation.moved.values():
            remove_placement_group(group)
        remove_placement_group(reservation.group)


def _holds_others(group: PlacementGroup, node_ids: tuple[str, ...]) -> bool:
    """Whether another placement group has CPUs of these nodes.

    Of two runs that find a node idle at the same time, the one that Ray serves later sees the earlier one here.
    """
    own = group.id.hex()
    return any(
        bundle.get("CPU", 0.0) > 0 and other["bundles_to_node_id"].get(index) in node_ids
        for other in placement_group_table().values()
        if other["placement_group_id"] != own and other["state"] not in ("REMOVED", "PENDING")
        for index, bundle in other["bundles"].items()
    )


def _verify_nodes(plan: PlacementPlan, node_ids: tuple[str, ...]) -> None:
    """Raise ReservationError if a bundle is on another node than planned. Only nodes of this cluster are compared."""
    misplaced = []
    for index, (gmi_slice, node_id) in enumerate(zip(plan.slices, node_ids, strict=True)):
        planned = plan.machine.node(gmi_slice.node).ray_node_id
        if planned is not None and planned != node_id:
            misplaced.append(f"GMI {index} planned on {gmi_slice.node} ({planned}) is on {node_id}")
    if misplaced:
        raise ReservationError(
            bundles_text(plan.bundles()),
            "; ".join(misplaced),
            "Assign the plan to the reservation's nodes, or plan again from the current cluster",
            0.0,
        )


def _bundle_indices(plan: PlacementPlan, first: int) -> tuple[int, ...]:
    """Index of each GMI's bundle in a group whose bundles are in the plan's ``bundle_order`` from ``first`` on."""
    order = plan.bundle_order()
    return tuple(first + place for place in sorted(range(len(order)), key=order.__getitem__))


def _bundle_node_ids(group: PlacementGroup, plan: PlacementPlan, bundles: tuple[int, ...]) -> tuple[str, ...]:
    table = placement_group_table(group)
    if table.get("state") != "CREATED":
        raise ReservationError(
            bundles_text(plan.bundles()),
            f"a placement group in state {table.get('state', 'unknown')}",
            "It was removed, or one of its nodes has left the cluster: reserve again",
            0.0,
        )
    nodes = table["bundles_to_node_id"]
    return tuple(nodes[bundle] for bundle in bundles)


def _live_nodes() -> list[NodeResources]:
    free = available_resources_per_node()
    return [
        NodeResources(
            name=node["NodeManagerHostname"],
            node_id=node["NodeID"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
