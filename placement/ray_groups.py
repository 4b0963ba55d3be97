"""Reserve a plan's bundles from Ray, see where they landed, and give them back. Every wait has a limit.

Ray keeps a placement group that can never be met pending for ever and without a word. ``reserve`` compares
the plan with the cluster first, and says what was asked, what there is and what would fit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node  # a DeveloperAPI that ray.util does not re-export
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.allocation import assign_allocated_nodes
from placement.capacity import (
    ROUNDING,
    NodeResources,
    bundles_text,
    capacity_error,
    plan_fits,
    planned_node_ids,
)
from placement.errors import ReservationError
from placement.plan import PlacementPlan

__all__ = [
    "Reservation",
    "assign_allocated_nodes",
    "current_reservation",
    "release",
    "reserve",
    "scheduling",
    "verify",
]

NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray puts on every node by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """A placement group that holds a plan's bundles."""

    group: PlacementGroup
    bundle_node_ids: tuple[str, ...]
    """Ray's node id of each GMI's bundle, in GMI order."""
    first_bundle: int = 0
    """Index of GMI 0's bundle in the group; the ones before belong to others, as to a Tune trial itself."""
    owned: bool = True
    """False for a group that someone else made and will remove."""
    alone: bool = False
    """Whether nobody else held CPUs of these nodes when they were reserved: only then may cores be pinned to."""


def reserve(plan: PlacementPlan, timeout_s: float = 10.0) -> Reservation:
    """Reserve one bundle per GMI in the connected Ray.

    Slices whose node came from this cluster are held to that node by its label; others land where Ray has
    room, and ``assign_allocated_nodes`` then moves the plan.

    Raises:
        ReservationError: at once where the cluster is too small, after ``timeout_s`` (in whole seconds, at
            least 1) where others hold it. Nothing is left reserved.
    """
    nodes = _live_nodes()
    if not plan_fits(plan, nodes):
        raise capacity_error(plan, nodes, waited_s=0.0)
    planned = planned_node_ids(plan)
    selectors = None if planned is None else [{NODE_ID_LABEL: node_id} for node_id in planned]
    started = time.monotonic()
    group = placement_group(plan.bundles(), strategy=plan.strategy(), bundle_label_selector=selectors)
    try:
        if not group.wait(max(1, int(timeout_s))):  # Ray counts whole seconds
            raise capacity_error(plan, _live_nodes(), waited_s=time.monotonic() - started)
        node_ids = _bundle_node_ids(group, plan, first_bundle=0)
        _verify_nodes(plan, node_ids)
    except BaseException:
        # Also on Ctrl-C while waiting: a pending group would take the resources as soon as they come free.
        remove_placement_group(group)
        raise
    return Reservation(group=group, bundle_node_ids=node_ids, alone=_untouched(nodes, node_ids))


def current_reservation(plan: PlacementPlan, first_bundle: int = 1) -> Reservation | None:
    """The placement group in which this process already runs, as a Tune trial does; None outside of one.

    Such a group belongs to who made it, and ``release`` leaves it alone. Other trials share its nodes, so that
    it never counts as alone there.

    Args:
        plan: what the group has to hold
        first_bundle: index of GMI 0's bundle; the ones before it are the trial's own. Tune leaves out a
            trial's own bundle when that is empty: a group of exactly one bundle per GMI starts at 0 anyway.

    Raises:
        ReservationError: the group has too few bundles, or too small ones.
    """
    if not ray.is_initialized():
        return None
    group = get_current_placement_group()
    if group is None:
        return None
    specs, asked = group.bundle_specs, plan.bundles()
    first = 0 if len(specs) == plan.num_gmis else first_bundle
    given = specs[first : first + len(asked)]
    enough = len(given) == len(asked) and all(
        have.get(kind, 0.0) >= amount
        for have, want in zip(given, asked, strict=True)
        for kind, amount in want.items()
    )
    if not enough:
        raise ReservationError(
            bundles_text(asked),
            f"bundles {bundles_text(specs)} in this trial's placement group, the first {first} its own",
            "Let the trial ask for its resources through default_resource_request, from the same plan",
            0.0,
        )
    node_ids = _bundle_node_ids(group, plan, first_bundle=first)
    return Reservation(group=group, bundle_node_ids=node_ids, first_bundle=first, owned=False)


def scheduling(reservation: Reservation, index: int) -> PlacementGroupSchedulingStrategy:
    """Where to start GMI ``index``: pass as ``scheduling_strategy`` in the actor's options."""
    return PlacementGroupSchedulingStrategy(
        placement_group=reservation.group,
        placement_group_bundle_index=reservation.first_bundle + index,
        placement_group_capture_child_tasks=False,
    )


def verify(plan: PlacementPlan, reservation: Reservation) -> dict[int, str]:
    """Ask Ray where each GMI's bundle is now, and compare with the plan. Returns GMI index -> Ray node id.

    Only nodes that came from this cluster are compared; for others there is nothing to compare with.

    Raises:
        ReservationError: the group is not up, or a bundle lies on another node than planned.
    """
    node_ids = _bundle_node_ids(reservation.group, plan, first_bundle=reservation.first_bundle)
    _verify_nodes(plan, node_ids)
    return dict(enumerate(node_ids))


def release(reservation: Reservation) -> None:
    """Give the bundles back. Safe to call twice and after Ray has gone. Others' groups are left alone."""
    if reservation.owned and ray.is_initialized():
        remove_placement_group(reservation.group)


def _untouched(nodes: list[NodeResources], node_ids: tuple[str, ...]) -> bool:
    """Whether all CPUs of these nodes are free."""
    free = {
        node.node_id for node in nodes if node.free.get("CPU", 0.0) + ROUNDING >= node.total.get("CPU", 0.0)
    }
    return free.issuperset(node_ids)


def _verify_nodes(plan: PlacementPlan, node_ids: tuple[str, ...]) -> None:
    """Raise if a bundle lies on another node than planned."""
    strays = []
    for index, (gmi_slice, node_id) in enumerate(zip(plan.slices, node_ids, strict=True)):
        planned = plan.machine.node(gmi_slice.node).ray_node_id
        if planned is not None and planned != node_id:
            strays.append(f"GMI {index} planned on {gmi_slice.node} ({planned}) is on {node_id}")
    if strays:
        raise ReservationError(
            bundles_text(plan.bundles()),
            "; ".join(strays),
            "Bind the plan to the reservation's nodes, or plan again from the cluster as it is now",
            0.0,
        )


def _bundle_node_ids(group: PlacementGroup, plan: PlacementPlan, *, first_bundle: int) -> tuple[str, ...]:
    table = placement_group_table(group)
    if table.get("state") != "CREATED":
        raise ReservationError(
            bundles_text(plan.bundles()),
            f"a placement group in state {table.get('state', 'unknown')}",
            "It was removed, or a node that held a part of it has gone: reserve again",
            0.0,
        )
    nodes = table["bundles_to_node_id"]
    return tuple(nodes[first_bundle + index] for index in range(plan.num_gmis))


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
