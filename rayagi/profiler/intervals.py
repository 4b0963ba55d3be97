"""Arrays of time intervals: union, innermost, intersection, and the time of every set of active categories.

Times are int64 nanoseconds. Intervals are half open, ``[start, end)``; those of length 0 have no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayagi.profiler.keyed_sums import NOTHING, Ints, KeyedSums, add_up, merged

_TAG_BITS = 4
MASK_BITS = 16
"""Bits of a mask of categories, below those of a cell."""
_KEY_LIMIT = 2 ** (62 - _TAG_BITS)


@dataclass(frozen=True, eq=False)
class Steps:
    """A value that changes at some times.

    Attributes:
        times: when it changes, ascending; equal times are allowed, and the last of them counts. Shape (n,)
        values: its value from each of these times on. Shape (n,)
        before: its value before the first of them
    """

    times: Ints
    values: Ints
    before: int

    def at(self, times: Ints) -> Ints:
        """The values at some times, of the same shape."""
        return np.concatenate([[self.before], self.values])[np.searchsorted(self.times, times, "right")]

    def between(self, start: int, end: int) -> Steps:
        """The same without the changes before ``start``, and from ``end`` on."""
        low, high = (int(at) for at in np.searchsorted(self.times, [start, end]))
        before = int(self.values[low - 1]) if low else self.before
        return Steps(self.times[low:high], self.values[low:high], before)

    def spans(self, start: int, end: int) -> tuple[Ints, Ints, Ints]:
        """Start, end and value of each part of ``[start, end)``; none is empty. Shapes (m,), where m <= n + 1."""
        inside = self.between(start, end)
        bounds = np.concatenate([[start], inside.times, [end]])
        values = np.concatenate([[inside.before], inside.values])
        kept = bounds[1:] > bounds[:-1]
        return bounds[:-1][kept], bounds[1:][kept], values[kept]


def union(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """The union of intervals as disjoint ones, ascending. Those that touch become one."""
    kept = ends > starts
    starts, ends = starts[kept], ends[kept]
    if (starts[1:] < starts[:-1]).any():
        order = np.argsort(starts)
        starts, ends = starts[order], ends[order]
    # An interval begins a new group if it starts after all before it have ended: start_i > max(end_0..i-1).
    reach = np.maximum.accumulate(ends)
    first = np.ones(len(starts), bool)
    first[1:] = starts[1:] > reach[:-1]
    last = np.ones(len(starts), bool)
    last[:-1] = first[1:]
    return starts[first], reach[last]


def complement(starts: Ints, ends: Ints, start: int, end: int) -> tuple[Ints, Ints]:
    """The parts of ``[start, end)`` that no interval of a union covers."""
    starts, ends = union(np.clip(starts, start, end), np.clip(ends, start, end))
    gap_starts, gap_ends = np.concatenate([[start], ends]), np.concatenate([starts, [end]])
    kept = gap_ends > gap_starts
    return gap_starts[kept], gap_ends[kept]


def union_by_cell(cells: Ints, starts: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
    """The union of the intervals of each cell: cells, starts, ends, by cell and time. Shapes (m,)"""
    numbers = np.unique(cells)
    times, ranks = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    # Each cell gets a range of ranks of its own, so that one union handles all of them.
    shift = np.searchsorted(numbers, cells) * len(times)
    low, high = union(ranks[: len(starts)] + shift, ranks[len(starts) :] + shift)
    return (
        numbers[low // max(len(times), 1)],
        times[low % max(len(times), 1)],
        times[high % max(len(times), 1)],
    )


def intersect(
    starts: Ints, ends: Ints, window_starts: Ints, window_ends: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """Every non-empty intersection of an interval with a window.

    Args:
        starts: of disjoint intervals, ascending. Shape (n,)
        ends: of the same. Shape (n,)
        window_starts: of windows, in any order; they may overlap. Shape (w,)
        window_ends: of the same. Shape (w,)

    Returns:
        Start, end, index of the interval, index of the window, by window. Shapes (m,)
    """
    low = np.searchsorted(ends, window_starts, "right")  # the first that ends after the window starts
    high = np.searchsorted(starts, window_ends, "left")  # the first that starts when the window has ended
    counts = np.maximum(high - low, 0)
    window = np.repeat(np.arange(len(counts)), counts)
    interval = np.arange(counts.sum()) + np.repeat(low - (np.cumsum(counts) - counts), counts)
    cut_starts = np.maximum(starts[interval], window_starts[window])
    cut_ends = np.minimum(ends[interval], window_ends[window])
    kept = cut_ends > cut_starts
    return cut_starts[kept], cut_ends[kept], interval[kept], window[kept]


def innermost(starts: Ints, ends: Ints, depths: Ints, values: Ints, outside: int) -> tuple[Steps, Ints]:
    """The value of the innermost event at each time, and for each event the value in which it started.

    The innermost of the events at a time is the one that started last; of those the one that ends first; of those the
    deepest. For events that nest it is the deepest; those of interleaved coroutines need not nest.

    Args:
        starts: of one thread's events, in any order. Shape (n,)
        ends: of the same. Shape (n,)
        depths: of the same; 0 is outermost. Shape (n,)
        values: of the same. Shape (n,)
        outside: the value where there is no event

    Returns:
        The value over time; values of the enclosing events, ``outside`` without one. Shape (n,)
    """
    steps = Steps(np.empty(0, np.int64), np.empty(0, np.int64), outside)
    around = np.full(len(starts), outside, np.int64)
    for depth in np.flatnonzero(np.bincount(depths, minlength=1)):
        level = np.flatnonzero(depths == depth) if depths.any() else slice(None)
        painted = _paint_level(steps, starts[level], ends[level], values[level])
        if painted is None:
            return _latest_start(starts, ends, depths, values, outside)
        steps, around[level] = painted
    return steps, around


def _paint_level(steps: Steps, starts: Ints, ends: Ints, values: Ints) -> tuple[Steps, Ints] | None:
    """Steps with one level's events over them, and the values below; None if they overlap or cross one below."""
    order = None
    if (starts[1:] < ends[:-1]).any():
        order = np.lexsort((ends, starts))
        starts, ends, values = starts[order], ends[order], values[order]
        if (starts[1:] < ends[:-1]).any():
            return None
    at = np.searchsorted(steps.times, starts, "right")
    if (np.searchsorted(steps.times, ends, "left") > at).any():
        return None
    below = np.concatenate([[steps.before], steps.values])[at]
    times = np.stack([starts, ends], axis=1).ravel()
    # An event's value from its start on, and what was below it again from its end on.
    changed = np.stack([values, below], axis=1).ravel()
    painted = _inserted(steps, np.repeat(at, 2), times, changed)
    if order is not None:
        below[order] = below.copy()
    return painted, below


def _inserted(steps: Steps, at: Ints, times: Ints, values: Ints) -> Steps:
    """Steps with more changes; the i-th before the at[i]-th old one. ``at`` ascends."""
    if not len(steps.times):
        return Steps(times, values, steps.before)
    places = at + np.arange(len(at))
    is_old = np.ones(len(steps.times) + len(at), bool)
    is_old[places] = False
    all_times, all_values = np.empty(len(is_old), np.int64), np.empty(len(is_old), np.int64)
    all_times[places], all_values[places] = times, values
    all_times[is_old], all_values[is_old] = steps.times, steps.values
    return Steps(all_times, all_values, steps.before)


def _latest_start(starts: Ints, ends: Ints, depths: Ints, values: Ints, outside: int) -> tuple[Steps, Ints]:
    """As ``innermost``, for events that do not nest: a heap of the open ones, the one that started last on top."""
    order = np.lexsort((depths, -ends, starts))
    around = np.full(len(starts), outside, np.int64)
    opened: list[tuple[int, int, int]] = []  # (-rank, end, value)
    times, changed = [], []

    def close_until(time: int) -> None:
        """Close what ends until then; below an event that closes are those that have not ended."""
        while opened and opened[0][1] <= time:
            closed_at = heapq.heappop(opened)[1]
            while opened and opened[0][1] <= closed_at:
                heapq.heappop(opened)
            times.append(closed_at)
            changed.append(opened[0][2] if opened else outside)

    rows = zip(
        order.tolist(), starts[order].tolist(), ends[order].tolist(), values[order].tolist(), strict=True
    )
    for rank, (index, start, end, value) in enumerate(rows):
        close_until(start)
        around[index] = opened[0][2] if opened else outside
        if end > start:
            heapq.heappush(opened, (-rank, end, value))
            times.append(start)
            changed.append(value)
    close_until(np.iinfo(np.int64).max)
    return Steps(np.array(times, np.int64), np.array(changed, np.int64), outside), around


def paint_over(steps: Steps, starts: Ints, ends: Ints, value: int) -> Steps:
    """Steps with one value within disjoint ascending intervals, whatever they were there."""
    last = np.searchsorted(starts, steps.times, "right") - 1
    covered = (last >= 0) & (steps.times < np.concatenate([ends, [0]])[last])
    kept = Steps(steps.times[~covered], steps.values[~covered], steps.before)
    at = np.searchsorted(kept.times, np.stack([starts, ends], axis=1).ravel())
    changed = np.stack([np.full(len(starts), value), steps.at(ends)], axis=1).ravel()
    return _inserted(kept, at, np.stack([starts, ends], axis=1).ravel(), changed)


def zip_steps(first: Steps, second: Steps) -> tuple[Ints, Ints, Ints]:
    """Both values over time: times of change (m,), and both values before the first and from each on (m + 1,)."""
    at = np.searchsorted(first.times, second.times, "right")
    padded = np.concatenate([[first.before], first.values])
    both = _inserted(first, at, second.times, padded[at])
    count = np.zeros(len(both.times) + 1, np.int64)  # how many changes of the second came until then
    count[at + np.arange(len(at)) + 1] = 1
    np.cumsum(count, out=count)
    return (
        both.times,
        np.concatenate([[first.before], both.values]),
        np.concatenate([[second.before], second.values])[count],
    )


@dataclass(frozen=True, eq=False)
class Part:
    """Intervals in which something is active, such as one thread. Those of one cell are disjoint.

    Attributes:
        categories: bit of each interval's category in the masks, 0 to 14. Shape (n,)
        cells: where each counts, such as an operation; at least 0. Shape (n,)
        starts: of the intervals, in any order. Shape (n,)
        ends: of the same. Shape (n,)
    """

    categories: Ints
    cells: Ints
    starts: Ints
    ends: Ints

    def by_category(self) -> Iterator[tuple[int, Ints, Ints, Ints]]:
        """Bit, cells, starts and ends of each category, without empty intervals."""
        filled = self.ends > self.starts
        for bit in np.flatnonzero(np.bincount(self.categories)).tolist():
            some = filled & (self.categories == bit)
            yield bit, self.cells[some], self.starts[some], self.ends[some]


class Times(NamedTuple):
    """Nanoseconds of every set of categories, without the empty one. Masks have the bits of ``Part.categories``.

    Attributes:
        by_cell: of each ``cell << MASK_BITS | mask``
        total: of each mask, whatever the cells; each moment counts once
    """

    by_cell: KeyedSums
    total: KeyedSums


def overlap_times(parts: Sequence[Part]) -> Times:
    """Time of every set of categories, exact. Two parts of one category that overlap in a cell count once."""
    found: dict[int, list[tuple[Ints, Ints]]] = {}
    for part in parts:
        for bit, _, starts, ends in part.by_category():
            found.setdefault(bit, []).append((starts, ends))
    unions = []
    for bit, several in found.items():
        starts, ends = union(*map(np.concatenate, zip(*several, strict=True)))
        unions.append(Part(np.full_like(starts, bit), np.zeros_like(starts), starts, ends))
    return Times(_overlap(parts), _overlap(unions))  # of cell 0: its keys are masks


def overlap_by_process(processes: Sequence[Sequence[Part]]) -> list[Times]:
    """``overlap_times`` of the parts of each process, and then of all parts together."""
    each = [overlap_times(parts) for parts in processes]
    every = [part for parts in processes for part in parts]
    return [*each, each[0] if len(each) == 1 else overlap_times(every)]


def _overlap(parts: Sequence[Part]) -> KeyedSums:
    """Time of every set of categories in every cell, exact, without the empty set.

    Two parts of one category that overlap in a cell count once.
    """
    parts = [part for part in parts if len(part.starts)]
    if not parts:
        return NOTHING
    cells = np.unique(np.concatenate([ranks(part.cells)[0] for part in parts]))
    start = min(int(part.starts.min()) for part in parts)
    span = (
        max(int(part.ends.max()) for part in parts) - start + 1
    )  # one more: ranges of two cells do not touch
    # Each cell gets a range of times of its own, so that one sweep handles all: time' = number of the cell * span + time.
    group = max(1, _KEY_LIMIT // span)
    tables = []
    for first in range(0, len(cells), group):
        some = cells[first : first + group]
        tables.append(_sweep(_in_own_range(parts, some, start, span), some, span))
    return merged(tables)


def ranks(cells: Ints) -> tuple[Ints, Ints]:
    """Distinct values, ascending, and which of them each value is. Of equal neighbours only the first is searched for."""
    first = np.concatenate([[True], cells[1:] != cells[:-1]])[: len(cells)]
    values, index = np.unique(cells[first], return_inverse=True)
    return values, index[np.cumsum(first) - 1]


def _in_own_range(parts: Iterable[Part], cells: Ints, start: int, span: int) -> dict[int, tuple[Ints, Ints]]:
    """Disjoint intervals of each category with the cells' times one after the other."""
    found: dict[int, list[tuple[Ints, Ints]]] = {}
    for part in parts:
        for category, own, starts, ends in part.by_category():
            inside = (own >= cells[0]) & (own <= cells[-1])
            shift = np.searchsorted(cells, own) * span - start
            found.setdefault(category, []).append(((starts + shift)[inside], (ends + shift)[inside]))
    return {
        category: several[0] if len(several) == 1 else union(*map(np.concatenate, zip(*several, strict=True)))
        for category, several in found.items()
    }


def _sweep(intervals: dict[int, tuple[Ints, Ints]], cells: Ints, span: int) -> KeyedSums:
    """Left to right over all boundaries: the time of each set in each cell."""
    categories = sorted(intervals)
    # time' << 4 | number of the category: one sort of int64 orders all boundaries.
    size = 2 * sum(len(starts) for starts, _ in intervals.values())
    keys = np.empty(size, np.int64)
    at = 0
    for number, category in enumerate(categories):
        for times in intervals[category]:
            piece = keys[at : at + len(times)]
            np.left_shift(times, _TAG_BITS, out=piece)
            piece |= number
            at += len(times)
    keys.sort()
    toggles = np.array([1 << category for category in categories], np.uint16)
    masks = toggles[keys & ((1 << _TAG_BITS) - 1)]
    # A boundary toggles its category's bit; the running xor is the set that is active after it.
    np.bitwise_xor.accumulate(masks, out=masks)
    keys >>= _TAG_BITS
    spans, masks, keys = keys[1:] - keys[:-1], masks[:-1], keys[:-1]
    active = (masks != 0) & (spans > 0)
    spans, masks, keys = spans[active], masks[active], keys[active]
    return add_up(cells[keys // span] << MASK_BITS | masks, spans)
