"""MIG planner: maps requested sizes to legal MIG placements next to existing instances, or explains why none exists.

Exhaustive search: a GPU has a few hundred layouts at most. A fit is found whenever one exists, and the result is
deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import floor
from typing import TypeVar

from placement.errors import PlanError, counted
from placement.mig_geometry import Geometry, Layout, PlacedProfile, Placement, geometry_of, layouts
from placement.types import FRACTION_STEP, Gpu, MigInstance, core_ranges

MIN_GRANTED = 0.5
"""Smallest acceptable ratio of granted to requested size. MIG's sizes are coarse: 2 x 0.5 grants 3 of 7 compute slices each.
A smaller ratio is an error, not an approximation."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RelativeSize:
    """Size of an instance as fractions of the whole GPU, each in (0, 1]."""

    compute: float
    memory: float

    def granted(self, fraction: float) -> float:
        """Granted part of a requested fraction: min(1, compute / fraction, memory / fraction)."""
        return min(1.0, self.compute / fraction, self.memory / fraction)


def plan_instances(
    gpu: Gpu, requests: Sequence[float], taken: Iterable[Placement] | None = None
) -> tuple[PlacedProfile, ...]:
    """Plan new instances for the requests, in their order, next to existing ones.

    Maximises the smallest granted ratio; among equals, minimises the part of the GPU that is used.

    Args:
        gpu: the GPU to partition
        requests: fractions of the GPU, each in (0, 1]; at least one
        taken: placements of existing instances; None: those that the inventory could read

    Raises:
        PlanError: the GPU has no MIG, or no legal layout fits; the text says what would.
    """
    geometry = required_geometry(gpu)
    occupied = frozenset(known_placements(gpu) if taken is None else taken)

    def best(some: Sequence[float]) -> tuple[PlacedProfile, ...] | None:
        return _best_layout(geometry, layouts(geometry, occupied), some)

    return best(requests) or _raise_no_placement(gpu, geometry, requests, occupied, best)


def choose_existing(gpu: Gpu, requests: Sequence[float]) -> tuple[MigInstance, ...]:
    """Choose idle existing instances for the requests, in their order.

    Raises:
        PlanError: they do not fit the requests; the text lists them.
    """
    geometry = required_geometry(gpu)
    free = [one for one in gpu.mig_instances if not one.in_use]
    chosen = _best_layout_of(free, lambda one: _size_of(gpu, geometry, one), requests)
    if chosen is None:
        there = Counter(one.profile for one in free)
        raise PlanError(
            f"{_text(requests)} on {_name(gpu)}",
            f"of its {counted(len(gpu.mig_instances), 'MIG instance')}, free are {_counts(there)}",
            "Request these sizes, or have an administrator repartition it",
        )
    return chosen


def has_room(gpu: Gpu) -> bool:
    """Whether any instance fits next to the existing ones of a GPU with a known geometry."""
    return any(layouts(required_geometry(gpu), frozenset(known_placements(gpu))))


def idle_shares(gpu: Gpu) -> tuple[float, ...]:
    """The idle instances of a GPU with a known geometry as fractions of it, largest first.

    By the scarcer of compute and memory, in whole steps of Ray's fractions.
    """
    geometry = required_geometry(gpu)
    sizes = [_size_of(gpu, geometry, one) for one in gpu.mig_instances if not one.in_use]
    shares = [floor(min(size.compute, size.memory) / FRACTION_STEP + 1e-9) for size in sizes]
    return tuple(round(share * FRACTION_STEP, 4) for share in sorted(shares, reverse=True) if share)


def required_geometry(gpu: Gpu) -> Geometry:
    """The MIG geometry of a GPU.

    Raises:
        PlanError: the GPU has no MIG, or its geometry is unknown.
    """
    geometry = geometry_of(gpu)
    if geometry is None:
        raise PlanError(
            f"MIG on {_name(gpu)}",
            "its MIG geometry is not known, or it has no MIG",
            "Use backend='mps' or 'direct'",
        )
    return geometry


def known_placements(gpu: Gpu) -> tuple[Placement, ...]:
    """Placements of a GPU's instances, as far as the inventory could read them."""
    return tuple(
        Placement(one.start, one.size)
        for one in gpu.mig_instances
        if one.start is not None and one.size is not None
    )


def size_of(geometry: Geometry, placed: PlacedProfile) -> RelativeSize:
    """Relative size of a placed profile."""
    profile = placed.profile
    return RelativeSize(
        profile.compute_slices / geometry.compute_slices, profile.size / geometry.memory_slices
    )


def _size_of(gpu: Gpu, geometry: Geometry, instance: MigInstance) -> RelativeSize:
    """Relative size of an existing instance: by its profile if the table has it, else by its SM count."""
    whole = geometry.profiles[-1].sm_count
    profile = geometry.profile(instance.profile.removesuffix("+me"))
    if profile is not None:
        compute = profile.compute_slices / geometry.compute_slices
    else:
        compute = 0.0 if whole is None or instance.sm_count is None else instance.sm_count / whole
    return RelativeSize(compute, min(1.0, instance.memory_bytes / gpu.memory_total_bytes))


def _best_layout(geometry: Geometry, among: Iterable[Layout], requests: Sequence[float]) -> Layout | None:
    """The layout with the largest smallest granted ratio, then the least used, then the lowest starts."""
    ranked = []
    for layout in among:
        if len(layout) != len(requests):
            continue
        matched = _match(layout, lambda one: size_of(geometry, one), requests)
        if matched is not None:
            (granted, spent), order = matched
            ranked.append(((-granted, spent, [one.start for one in order]), order))
    return min(ranked, key=lambda pair: pair[0])[1] if ranked else None


def _best_layout_of(
    pieces: Sequence[T], size: Callable[[T], RelativeSize], requests: Sequence[float]
) -> tuple[T, ...] | None:
    """The best subset of existing instances, with one per request."""
    ranked = []
    for index, subset in enumerate(combinations(pieces, len(requests))):
        matched = _match(subset, size, requests)
        if matched is not None:
            (granted, spent), order = matched
            ranked.append(((-granted, spent, index), order))
    return min(ranked, key=lambda pair: pair[0])[1] if ranked else None


def _match(
    pieces: Sequence[T], size: Callable[[T], RelativeSize], requests: Sequence[float]
) -> tuple[tuple[float, float], tuple[T, ...]] | None:
    """Assign one instance to each request: the largest to the largest, and so on.

    Args:
        pieces: at least as many instances as requests
        size: relative size of an instance
        requests: fractions of the GPU

    Returns:
        (smallest granted ratio, part of the GPU that all pieces use), and the instances in the order of the requests; None:
        no match
    """
    largest_first = sorted(range(len(requests)), key=lambda index: -requests[index])
    # Stable: lower placements first.
    ordered = sorted(pieces, key=lambda one: (size(one).compute, size(one).memory), reverse=True)
    given = dict(zip(largest_first, ordered, strict=False))
    granted = min(size(piece).granted(requests[index]) for index, piece in given.items())
    if granted < MIN_GRANTED:
        return None
    spent = sum(size(one).compute + size(one).memory for one in pieces)
    return (granted, spent), tuple(given[index] for index in range(len(requests)))


def _raise_no_placement(
    gpu: Gpu,
    geometry: Geometry,
    requests: Sequence[float],
    occupied: frozenset[Placement],
    best: Callable[[Sequence[float]], Layout | None],
) -> tuple[PlacedProfile, ...]:
    possible = layouts(geometry, occupied)
    most = max(len(layout) for layout in possible)
    slices = core_ranges(slot for one in occupied for slot in range(one.start, one.end))
    taken = f" with memory slices {slices} taken" if occupied else ""
    if most == 0:
        limit = f"no instance fits{taken}"
    elif len(requests) > most:
        limit = f"it holds at most {counted(most, 'MIG instance')}{taken}"
    else:
        alone = [
            profile.name
            for profile in geometry.profiles
            if any(one.profile is profile for layout in possible for one in layout)
        ]
        limit = (
            f"no legal placement on its {counted(geometry.memory_slices, 'memory slice')}{taken}; "
            f"alone would fit any of {', '.join(alone)}"
        )
    raise PlanError(f"{_text(requests)} on {_name(gpu)}", limit, _hint(geometry, possible, requests, best))


def _hint(
    geometry: Geometry,
    possible: Iterable[Layout],
    requests: Sequence[float],
    best: Callable[[Sequence[float]], Layout | None],
) -> str:
    """The largest subset of the requests that fits, earlier requests first."""
    # Only the profiles of a layout count, not their places.
    alike = {tuple(sorted(one.profile.name for one in layout)): layout for layout in possible}
    fitting = (_first_subset(geometry, layout, requests) for layout in alike.values())
    chosen = min(fitting, key=lambda indices: (-len(indices), indices))
    part = [requests[index] for index in chosen]
    layout = best(part) if part else None
    if layout is None:
        return "Use another GPU, have its instances destroyed by their owner, or use backend='mps'"
    return f"{_text(part)} would fit as {_counts(Counter(one.profile.name for one in layout))}"


def _first_subset(geometry: Geometry, layout: Layout, requests: Sequence[float]) -> list[int]:
    """Indices of the largest subset of the requests that fits a layout, the first in lexicographic order.

    The sets of requests that can be matched to a layout's instances are the independent sets of a transversal matroid
    (Edmonds and Fulkerson 1965), so the greedy algorithm finds it.
    """
    chosen: list[int] = []
    for index in range(len(requests)):
        wider = [*chosen, index]
        part = [requests[each] for each in wider]
        if len(wider) <= len(layout) and _match(layout, lambda one: size_of(geometry, one), part) is not None:
            chosen = wider
    return chosen


def _text(requests: Sequence[float]) -> str:
    return _counts(Counter(f"{one:.3g}" for one in requests))


def _counts(names: Counter[str]) -> str:
    return " + ".join(f"{count} x {name}" for name, count in names.items()) or "none"


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name})"
