"""A profile's time-line in bounded space: shares of categories in bins of time, and the longest operations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayagi.profiler.intervals import Ints, union
from rayagi.profiler.overlap import (
    BITS,
    GPU,
    LABELS,
    ProcessEvents,
    ThreadActivity,
    process_events,
    time_windows,
)
from rayagi.profiler.trace import Category, Events, Profile, select

NUM_BINS = 2000
MOST_LANES = 64
MOST_SLICES = 1500
"""Operations, phases and iterations of a lane that are kept, the longest."""
_SCOPES = (Category.PHASE, Category.OPERATION, Category.ITERATION)


@dataclass(frozen=True)
class TimelineSlice:
    """One operation, phase or iteration; times in ns from the time-line's start."""

    start: int
    end: int
    depth: int
    name: str


@dataclass(frozen=True, eq=False)
class Lane:
    """One thread, or one process's GPU.

    Attributes:
        process: its label
        name: of the thread
        shares: how much of each bin each category takes, 0 to 1; by category (num_bins,)
        slices: outer ones first
        omitted: shorter slices that are left out
    """

    process: str
    name: str
    shares: dict[str, NDArray[np.float64]]
    slices: tuple[TimelineSlice, ...]
    omitted: int


@dataclass(frozen=True)
class Timeline:
    """All lanes of a profile, over ``span_ns``.

    Attributes:
        span_ns: from the first event to the last
        lanes: by process, threads in the order of their start
        omitted: threads with least recorded time that are left out
    """

    span_ns: int
    lanes: tuple[Lane, ...]
    omitted: int


def timeline(profile: Profile, num_bins: int = NUM_BINS) -> Timeline:
    """Reduce a profile to lanes of ``num_bins`` bins."""
    every, _ = process_events(profile)
    processes = [each for each in every if each.end > each.start]
    start = min((each.start for each in processes), default=0)
    end = max((each.end for each in processes), default=0)
    edges = np.linspace(start, max(end, start + 1), num_bins + 1).astype(np.int64)
    lengths = sorted(
        (thread.end - thread.start for each in processes for thread in each.on_cpu), reverse=True
    )
    shortest = lengths[MOST_LANES - 1] if len(lengths) > MOST_LANES else 0
    lanes = [lane for each in processes for lane in _process_lanes(each, edges, shortest)]
    return Timeline(end - start, tuple(lanes[: 2 * MOST_LANES]), max(0, len(lengths) - MOST_LANES))


def _process_lanes(process: ProcessEvents, edges: Ints, shortest: int) -> list[Lane]:
    """Lanes of the threads that are no shorter than ``shortest``, and of the GPU if it was used."""
    shown = [
        (thread, cells)
        for thread, cells in zip(process.on_cpu, process.thread_cells, strict=True)
        if thread.end - thread.start >= shortest
    ]
    spent = [np.zeros((len(LABELS), len(edges) - 1)) for _ in shown]
    on_gpu = np.zeros((len(LABELS), len(edges) - 1))
    for start, end in time_windows([process]):
        gpu: dict[int, list[tuple[Ints, Ints]]] = {}
        for thread in process.threads:
            events = thread.natives(start, end)
            bits = BITS[events["category"]]
            for bit in (LABELS.index(label) for label in GPU):
                some = select(events, bits == bit)
                gpu.setdefault(bit, []).append((some["start"], some["end"]))
            index = next((i for i, (each, _) in enumerate(shown) if each is thread), None)
            if index is not None:
                is_cpu = ~np.isin(bits, [LABELS.index(label) for label in GPU])
                activity = ThreadActivity(thread, select(events, is_cpu), shown[index][1], start, end)
                for part in activity.parts(len(process.cells.texts), None):
                    for bit, _, starts, ends in part.by_category():
                        spent[index][bit] += _time_in_bins(starts, ends, edges)
        for bit, several in gpu.items():
            merged = union(
                *(np.clip(np.concatenate(each), start, end) for each in zip(*several, strict=True))
            )
            on_gpu[bit] += _time_in_bins(*merged, edges)
    widths = np.maximum(np.diff(edges), 1)
    lanes = []
    for (thread, _), table in zip(shown, spent, strict=True):
        slices, omitted = _slices(process, thread.scopes, int(edges[0]))
        name = f"thread {thread.trace.thread_id}"
        lanes.append(Lane(process.label, name, _shares(table, widths), slices, omitted))
    if on_gpu.any():
        lanes.append(Lane(process.label, "GPU", _shares(on_gpu, widths), (), 0))
    return lanes


def _time_in_bins(starts: Ints, ends: Ints, edges: Ints) -> NDArray[np.float64]:
    """How much of each bin disjoint ascending intervals cover, in ns. Shape (num_bins,)"""
    if not len(starts):
        return np.zeros(len(edges) - 1)
    # Time covered until an edge: of the intervals that started before it, less what the last of them has left.
    before = np.searchsorted(starts, edges, "right")
    covered = np.concatenate([[0], np.cumsum(ends - starts)])[before]
    covered -= np.where(before > 0, np.maximum(ends[before - 1] - edges, 0), 0)
    return np.diff(covered).astype(np.float64)


def _shares(table: NDArray[np.float64], widths: Ints) -> dict[str, NDArray[np.float64]]:
    return {label: row / widths for label, row in zip(LABELS, table, strict=True) if row.any()}


def _slices(process: ProcessEvents, scopes: Events, start: int) -> tuple[tuple[TimelineSlice, ...], int]:
    some = select(scopes, np.isin(scopes["category"], _SCOPES))
    kept = select(some, np.argsort(some["start"] - some["end"], kind="stable")[:MOST_SLICES])
    kept = select(kept, np.lexsort((-kept["end"], kept["start"])))
    levels = np.searchsorted(np.unique(kept["depth"]), kept["depth"])
    slices = tuple(
        TimelineSlice(
            int(each["start"]) - start,
            int(each["end"]) - start,
            int(level),
            process.trace.name_of(int(each["name"])),
        )
        for each, level in zip(kept, levels, strict=True)
    )
    return slices, len(some) - len(kept)
