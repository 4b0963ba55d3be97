"""Capacity check: whether a plan fits a Ray cluster, and the error if not. Pure functions of Ray's resource counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.errors import ReservationError, counted
from placement.plan import PlacementPlan, bundle_of

ROUNDING = 1e-6
"""Tolerance for sums of floats; Ray counts resources in steps of 1e-4."""

MAX_NODES_IN_TEXT = 8
"""Nodes that an error lists; it only counts the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeResources:
    """Total and currently free resources of one live node. Keys are Ray's: CPU, GPU."""

    name: str
    node_id: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def text(self) -> str:
        """For example ``box1: 16 CPU (4 free), 2 GPU (0 free)``."""
        kinds = [kind for kind in ("CPU", "GPU") if self.total.get(kind)]
        parts = [f"{self.total[kind]:g} {kind} ({self.free.get(kind, 0.0):g} free)" for kind in kinds]
        return f"{self.name}: {', '.join(parts) or 'no CPU'}"


def planned_node_ids(plan: PlacementPlan) -> list[str] | None:
    """Ray's node id of each GMI, in GMI order; None if the machine was not read from a Ray cluster."""
    ids = [plan.machine.node(gmi_slice.node).ray_node_id for gmi_slice in plan.slices]
    known = [node_id for node_id in ids if node_id is not None]
    return known if len(known) == len(ids) else None


def plan_fits(plan: PlacementPlan, nodes: Sequence[NodeResources], *, only_free: bool = False) -> bool:
    """Whether these nodes can hold the plan's bundles: if they were empty, or with what is free now."""
    asked, planned, order = plan.bundles(), planned_node_ids(plan), plan.bundle_order()
    bundles = [asked[index] for index in order]
    capacities = {node.node_id: _FreeCapacity(node.free if only_free else node.total) for node in nodes}
    if planned is not None:
        wanted = zip([planned[index] for index in order], bundles, strict=True)
        return all(node_id in capacities and capacities[node_id].take(bundle) for node_id, bundle in wanted)
    if plan.strategy() == "STRICT_PACK":
        return any(all(capacity.take(bundle) for bundle in bundles) for capacity in capacities.values())
    largest_first = sorted(bundles, key=lambda bundle: (bundle.get("GPU", 0.0), bundle["CPU"]), reverse=True)
    return all(any(capacity.take(bundle) for capacity in capacities.values()) for bundle in largest_first)


def capacity_error(
    plan: PlacementPlan, nodes: Sequence[NodeResources], *, waited_s: float
) -> ReservationError:
    """The error for a plan that does not fit: the request, the available resources, and what would fit.

    Args:
        plan: the request
        nodes: the available resources
        waited_s: 0 if even the empty cluster is too small; else the wait, and only free resources count
    """
    here = {node.node_id for node in nodes}
    gone = [node_id for node_id in dict.fromkeys(planned_node_ids(plan) or ()) if node_id not in here]
    listed = [node.text() for node in nodes[:MAX_NODES_IN_TEXT]]
    if len(nodes) > MAX_NODES_IN_TEXT:
        listed.append(counted(len(nodes) - MAX_NODES_IN_TEXT, "more node"))
    listed += [f"planned node {node_id} is gone" for node_id in gone]
    hint = _would_fit(plan, nodes, only_free=waited_s > 0)
    if gone:
        hint = f"Plan again, since the cluster has changed. {hint}"
    return ReservationError(bundles_text(plan.bundles()), "; ".join(listed) or "no live node", hint, waited_s)


def bundles_text(bundles: Sequence[Mapping[str, float]]) -> str:
    """Bundles as text, equal ones counted: ``2 x {1 CPU, 0.5 GPU} + 1 x {2 CPU}``."""
    texts = Counter(", ".join(f"{amount:g} {kind}" for kind, amount in bundle.items()) for bundle in bundles)
    return " + ".join(f"{count} x {{{text}}}" for text, count in texts.items())


def _would_fit(plan: PlacementPlan, nodes: Sequence[NodeResources], *, only_free: bool) -> str:
    capacities = [node.free if only_free else node.total for node in nodes]
    largest = max(map(bundle_of, plan.slices), key=lambda bundle: bundle["CPU"])
    per_node = [_how_many(capacity, largest) for capacity in capacities]
    most = max(per_node, default=0) if plan.strategy() == "STRICT_PACK" else sum(per_node)
    now, wait = (" now", ", or wait until others have finished") if only_free else ("", "")
    if most > 0:
        ways = [f"num_gmis={min(most, plan.num_gmis)}"] if most < plan.num_gmis else []
        ways += ["threads_per_gmi lower"] if largest["CPU"] > 1 else []
        return f"{counted(most, 'GMI')} of this size would fit{now}: set {' or '.join(ways) or 'fewer'}{wait}"
    cores = max((int(capacity.get("CPU", 0.0)) for capacity in capacities), default=0)
    if "GPU" in largest and not any(
        capacity.get("GPU", 0.0) + ROUNDING >= largest["GPU"] for capacity in capacities
    ):
        return f"No {largest['GPU']:g} of one GPU is there{now}: use backend='cpu'{wait}"
    if cores > 0:
        return f"No GMI of this size would fit{now}: set threads_per_gmi to {cores} or less{wait}"
    if only_free:
        return "Nothing would fit now: no CPU is left. Wait until others have finished"
    return "Start Ray with at least one CPU"


class _FreeCapacity:
    """Free CPUs and GPUs of a node. A fraction of a GPU never spans two GPUs."""

    def __init__(self, amounts: Mapping[str, float]) -> None:
        self.cpus = amounts.get("CPU", 0.0)
        # Ray reports one sum per node. Read it as whole free GPUs and one that is partly free.
        whole, partly = divmod(amounts.get("GPU", 0.0) + ROUNDING, 1.0)
        self.gpus = [1.0] * int(whole) + [partly]

    def take(self, bundle: Mapping[str, float]) -> bool:
        """Reserve the bundle if it fits; return whether it did."""
        share = bundle.get("GPU", 0.0)
        gpu = next((i for i, left in enumerate(self.gpus) if left + ROUNDING >= share), None)
        if gpu is None or self.cpus + ROUNDING < bundle["CPU"]:
            return False
        self.gpus[gpu] -= share
        self.cpus -= bundle["CPU"]
        return True


def _how_many(amounts: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    capacity, count = _FreeCapacity(amounts), 0
    while capacity.take(bundle):
        count += 1
    return count
