"""Reserve a plan's bundles from Ray, see where they landed, and give them back. Every wait has a limit.

Ray holds a placement group that can never be met pending for ever and without a word. ``reserve`` compares the plan
with the cluster first, and says what was asked, what there is and what would fit.
"""

from __future__ import annotations

import time
from collections import Counter
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

from placement.binding import bind
from placement.errors import ReservationError
from placement.plan import Plan
from placement.types import Slice

__all__ = ["Reservation", "bind", "current_reservation", "release", "reserve", "scheduling", "verify"]

NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray puts on every node by itself."""

MAX_NODES_IN_TEXT = 8
"""Nodes that an error lists before it only counts the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """A placement group that holds a plan's bundles."""

    group: PlacementGroup
    bundle_node_ids: tuple[str, ...]
    """Ray's node id of each GMI's bundle, in GMI order."""
    first_bundle: int = 0
    """Index of GMI 0's bundle in the group; the ones before belong to others, as to a Tune trial's own process."""
    owned: bool = True
    """False for a group that someone else made and will remove."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _NodeResources:
    """What one live node has, and what of it nobody holds right now."""

    name: str
    node_id: str
    total: dict[str, float]
    free: dict[str, float]

    def text(self) -> str:
        kinds = [kind for kind in ("CPU", "GPU") if self.total.get(kind)]
        parts = [f"{self.total[kind]:g} {kind} ({self.free.get(kind, 0.0):g} free)" for kind in kinds]
        return f"{self.name}: {', '.join(parts) or 'no CPU'}"


def reserve(plan: Plan, timeout_s: float = 10.0) -> Reservation:
    """Reserve one bundle per GMI in the connected Ray.

    Slices whose node came from this cluster are held to that node by its label; others land where Ray has room, and
    ``bind`` then moves the plan.

    Raises:
        ReservationError: at once where the cluster is too small, after ``timeout_s`` where others hold it. Nothing is
            left reserved.
    """
    nodes = _live_nodes()
    bundles = plan.bundles()
    if not _fits(plan, nodes):
        raise _refusal(plan, nodes, waited_s=0.0)
    selectors = _node_selectors(plan)
    started = time.monotonic()
    group = placement_group(bundles, strategy=plan.strategy(), bundle_label_selector=selectors)
    try:
        if not _wait_until_ready(group, timeout_s):
            raise _refusal(plan, _live_nodes(), waited_s=time.monotonic() - started)
        reservation = Reservation(group=group, bundle_node_ids=_landed(group, plan, first_bundle=0))
        verify(plan, reservation)
    except (
        BaseException
    ):  # also Ctrl-C while waiting: a pending group would take the resources once they come free
        remove_placement_group(group)
        raise
    return reservation


def current_reservation(plan: Plan, first_bundle: int = 1) -> Reservation | None:
    """The placement group in which this process already runs, as a Tune trial does; None outside of one.

    Such a group belongs to who made it, and ``release`` leaves it alone. Other trials share its nodes: bind the plan
    with ``pinned=False``.

    Args:
        plan: what the group has to hold
        first_bundle: index of GMI 0's bundle; the ones before it are the trial's own. Tune leaves out a trial's own
            bundle when that is empty: a group with exactly one bundle per GMI starts at 0 whatever is given here.

    Raises:
        ReservationError: the group has too few bundles, or too small ones.
    """
    if not ray.is_initialized():
        return None
    group = get_current_placement_group()
    if group is None:
        return None
    specs = group.bundle_specs
    first = 0 if len(specs) == plan.num_gmis else first_bundle
    asked = plan.bundles()
    given = specs[first : first + len(asked)]
    enough = len(given) == len(asked) and all(
        have.get(kind, 0.0) >= amount
        for have, want in zip(given, asked, strict=True)
        for kind, amount in want.items()
    )
    if not enough:
        raise ReservationError(
            _bundles_text(asked),
            f"{len(specs)} bundles in this trial's placement group ({_bundles_text(specs)}), of which the first {first} "
            "are the trial's own",
            "Let the trial ask for its resources through the algorithm's default_resource_request, from the same plan",
            0.0,
        )
    return Reservation(
        group=group, bundle_node_ids=_landed(group, plan, first_bundle=first), first_bundle=first, owned=False
    )


def scheduling(reservation: Reservation, index: int) -> PlacementGroupSchedulingStrategy:
    """Where to start GMI ``index``: pass as ``scheduling_strategy`` in the actor's options."""
    return PlacementGroupSchedulingStrategy(
        placement_group=reservation.group,
        placement_group_bundle_index=reservation.first_bundle + index,
        placement_group_capture_child_tasks=False,
    )


def verify(plan: Plan, reservation: Reservation) -> dict[int, str]:
    """Ask Ray where each GMI's bundle is now, and compare with the plan. Returns GMI index -> Ray node id.

    Only nodes that came from this cluster are compared; for others there is nothing to compare with.

    Raises:
        ReservationError: the group is not up, or a bundle lies on another node than planned.
    """
    landed = _landed(reservation.group, plan, first_bundle=reservation.first_bundle)
    strays = []
    for index, (piece, node_id) in enumerate(zip(plan.slices, landed, strict=True)):
        planned = plan.machine.node(piece.node).ray_node_id
        if planned is not None and planned != node_id:
            strays.append(f"GMI {index} planned on {piece.node} ({planned}) is on {node_id}")
    if strays:
        raise ReservationError(
            _bundles_text(plan.bundles()),
            "; ".join(strays),
            "A node was replaced since the plan was made: bind the plan to the reservation's nodes, or plan again",
            0.0,
        )
    return dict(enumerate(landed))


def release(reservation: Reservation) -> None:
    """Give the bundles back. Safe to call twice, and after Ray has gone; leaves a group that others own alone."""
    if reservation.owned and ray.is_initialized():
        remove_placement_group(reservation.group)


def _wait_until_ready(group: PlacementGroup, timeout_s: float) -> bool:
    # PlacementGroup.wait counts whole seconds: a limit below one second is rounded up to one.
    return bool(group.wait(max(1, int(timeout_s))))


def _node_selectors(plan: Plan) -> list[dict[str, str]] | None:
    node_ids = [plan.machine.node(piece.node).ray_node_id for piece in plan.slices]
    known = [{NODE_ID_LABEL: node_id} for node_id in node_ids if node_id is not None]
    return known if len(known) == len(node_ids) else None


def _landed(group: PlacementGroup, plan: Plan, *, first_bundle: int) -> tuple[str, ...]:
    table = placement_group_table(group)
    if table.get("state") != "CREATED":
        raise ReservationError(
            _bundles_text(plan.bundles()),
            f"a placement group in state {table.get('state', 'unknown')}",
            "A node that held a part of it has gone, or it was removed: reserve again",
            0.0,
        )
    nodes = table["bundles_to_node_id"]
    return tuple(nodes[first_bundle + index] for index in range(plan.num_gmis))


def _live_nodes() -> list[_NodeResources]:
    free = available_resources_per_node()
    return [
        _NodeResources(
            name=node["NodeManagerHostname"],
            node_id=node["NodeID"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _fits(plan: Plan, nodes: list[_NodeResources]) -> bool:
    """Whether the empty cluster could hold the plan as it will be asked for."""
    bundles = plan.bundles()
    left = {node.node_id: dict(node.total) for node in nodes}
    if _node_selectors(plan) is not None:
        wanted = [plan.machine.node(piece.node).ray_node_id for piece in plan.slices]
        return all(
            _take(left.get(str(node_id), {}), bundle) for node_id, bundle in zip(wanted, bundles, strict=True)
        )
    if plan.strategy() == "STRICT_PACK":
        return any(all(_take(room, bundle) for bundle in bundles) for room in left.values())
    largest_first = sorted(bundles, key=lambda bundle: (bundle.get("GPU", 0.0), bundle["CPU"]), reverse=True)
    return all(any(_take(room, bundle) for room in left.values()) for bundle in largest_first)


def _take(room: dict[str, float], bundle: dict[str, float]) -> bool:
    """Take the bundle out of the room if it fits. Fractions of a GPU never span GPUs; Ray's steps are 1e-4."""
    if any(room.get(kind, 0.0) + 1e-6 < amount for kind, amount in bundle.items()):
        return False
    for kind, amount in bundle.items():
        room[kind] -= amount
    return True


def _refusal(plan: Plan, nodes: list[_NodeResources], *, waited_s: float) -> ReservationError:
    listed = [node.text() for node in nodes[:MAX_NODES_IN_TEXT]]
    if len(nodes) > MAX_NODES_IN_TEXT:
        listed.append(f"and {len(nodes) - MAX_NODES_IN_TEXT} more nodes")
    missing = [node_id for node_id in _planned_ids(plan) if node_id not in {node.node_id for node in nodes}]
    if missing:
        listed.append(f"planned nodes that are not there: {', '.join(missing)}")
    held = "what others hold is not counted; wait for it or " if waited_s > 0 else ""
    return ReservationError(
        _bundles_text(plan.bundles()),
        "; ".join(listed) or "no live node",
        _would_fit(plan, nodes, use_free=waited_s > 0) + (f" ({held}stop the other work)" if held else ""),
        waited_s,
    )


def _planned_ids(plan: Plan) -> list[str]:
    ids = [plan.machine.node(piece.node).ray_node_id for piece in plan.slices]
    return list(dict.fromkeys(node_id for node_id in ids if node_id is not None))


def _would_fit(plan: Plan, nodes: list[_NodeResources], *, use_free: bool) -> str:
    pieces: list[Slice] = list(plan.slices)
    piece = max(pieces, key=lambda one: one.num_threads)
    rooms = [dict(node.free if use_free else node.total) for node in nodes]
    bundle = plan.bundles()[pieces.index(piece)]
    counts = [_how_many(room, bundle) for room in rooms]
    most = max(counts, default=0) if plan.strategy() == "STRICT_PACK" else sum(counts)
    if most > 0:
        return f"{most} GMIs of this size would fit: set num_gmis={min(most, plan.num_gmis)}, or threads_per_gmi lower"
    cores = max((int(room.get("CPU", 0.0)) for room in rooms), default=0)
    if cores > 0:
        return f"No GMI of this size would fit: set threads_per_gmi to {cores} or less"
    return "Nothing would fit now: no CPU is free" if use_free else "Nothing would fit: start Ray with CPUs"


def _how_many(room: dict[str, float], bundle: dict[str, float]) -> int:
    return min(int((room.get(kind, 0.0) + 1e-6) / amount) for kind, amount in bundle.items())


def _bundles_text(bundles: list[dict[str, float]]) -> str:
    """Equal bundles counted: ``2 x {1 CPU, 0.5 GPU} + 1 x {2 CPU}``."""
    counted = Counter(
        ", ".join(f"{amount:g} {kind}" for kind, amount in bundle.items()) for bundle in bundles
    )
    return " + ".join(f"{count} x {{{text}}}" for text, count in counted.items())
