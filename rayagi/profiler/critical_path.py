"""What decides how long an iteration takes: the critical path over processes that meet in collectives.

A collective ends when the last process has arrived, so the time until then is that process's, and the others wait. With
a_pk the arrival of process p at the k-th collective of an iteration and d_pk its departure, the path is, for each k, the
time of q = argmax_p a_pk from d_q(k-1) to a_qk, then the collective itself until d_qk; after the last one it is the time of
the process whose iteration ends last. Process p waits for q from a_pk to a_qk.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayagi.profiler.intervals import Ints, Steps
from rayagi.profiler.overlap import (
    NO_ITERATION,
    NONE,
    ProcessEvents,
    ThreadEvents,
    iteration_numbers,
    process_events,
)
from rayagi.profiler.trace import Category, Events, Profile, join, select

COLLECTIVES = frozenset(("all_reduce", "all_merge", "all_gather"))
"""Names of communication that ends when all processes have called it."""


@dataclass(frozen=True)
class PathPart:
    """Time on the critical path.

    Attributes:
        process: its label; empty for a collective, of which all take part
        what: the innermost operation, or the collective; empty outside of operations
        ns: over all iterations
    """

    process: str
    what: str
    ns: int


@dataclass(frozen=True)
class Arrivals:
    """How one process arrives at collectives.

    Attributes:
        process: its label
        last: collectives at which it arrived last
        straggles: iterations for which it is on the path longest
        waited_ns: for later ones
        delayed_ns: for which others waited for it, added up
    """

    process: str
    last: int
    straggles: int
    waited_ns: int
    delayed_ns: int


@dataclass(frozen=True)
class CriticalPath:
    """Of the iterations that all processes recorded and in which all called the same collectives.

    Attributes:
        iterations: how many
        collectives: in all of them
        span_ns: sum of the iterations' lengths, each from its first start to its last end
        parts: the longest first
        arrivals: in the profile's order of processes
    """

    iterations: int
    collectives: int
    span_ns: int
    parts: tuple[PathPart, ...]
    arrivals: tuple[Arrivals, ...]


class Visits(NamedTuple):
    """One iteration of several processes that meet. ``starts``, ``ends``: (p,); ``arrived``, ``left``: (p, m)."""

    starts: Ints
    ends: Ints
    arrived: Ints
    left: Ints


class PathSegment(NamedTuple):
    """A part of the path, of the process with this number; ``meeting``: number of the collective, -1 between two."""

    process: int
    start: int
    end: int
    meeting: int


def critical_path(profile: Profile) -> CriticalPath | None:
    """The path; None where no two processes recorded the same collectives in the same iterations.

    Raises:
        TraceError: times are years apart, or a file of events cannot be read any more.
    """
    every, _ = process_events(profile)
    members = [member for member in map(_Member.of, every) if member is not None]
    members, iterations = _who_meets(members)
    if len(members) < 2 or not iterations:
        return None
    return _sum_up(members, iterations)


@dataclass(frozen=True, eq=False)
class _Member:
    """A process that takes part in collectives, all from one thread."""

    process: ProcessEvents
    operations: Sequence[tuple[int, int, Steps]]
    """Start, end and operations of each of the thread's recordings."""
    spans: Mapping[int, tuple[int, int]]
    """Start and end by number of the iteration."""
    visits: Mapping[int, list[tuple[int, int, str]]]
    """Arrival, departure and name of each collective, ascending, by number of the iteration."""

    @classmethod
    def of(cls, process: ProcessEvents) -> _Member | None:
        """None for a process without collectives or iterations."""
        names = {number: name for number, name in process.trace.names.items() if name in COLLECTIVES}
        # A thread has a file for each recording.
        own: dict[int, list[int]] = defaultdict(list)
        for place, thread in enumerate(process.on_cpu):
            own[thread.trace.thread_id].append(place)
        found = {
            thread: join(_events(process.on_cpu[place], list(names)) for place in places)
            for thread, places in own.items()
        }
        who = max(found, key=lambda thread: len(found[thread]), default=None)
        scopes = join(each.scopes_of(Category.ITERATION) for each in process.threads)
        if who is None or not len(found[who]) or not len(scopes):
            return None
        events = select(found[who], np.argsort(found[who]["start"], kind="stable"))
        # Iterations in others, or of other threads, have the same number and do not count.
        spans: dict[int, tuple[int, int]] = {}
        starts_ends = zip(scopes["start"].tolist(), scopes["end"].tolist(), strict=True)
        for number, (start, end) in zip(iteration_numbers(scopes).tolist(), starts_ends, strict=True):
            first, last = spans.get(number, (start, end))
            spans[number] = min(first, start), max(last, end)
        visits = defaultdict(list)
        bounds = sorted((start, end, number) for number, (start, end) in spans.items())
        places = np.searchsorted([start for start, _, _ in bounds], events["start"], "right") - 1
        for place, event in zip(places.tolist(), events, strict=True):
            if place >= 0 and event["end"] <= bounds[place][1]:
                visits[bounds[place][2]].append(
                    (int(event["start"]), int(event["end"]), names[int(event["name"])])
                )
        recordings = [
            (process.on_cpu[place].start, process.on_cpu[place].end, process.operations[place])
            for place in own[who]
        ]
        return cls(process, recordings, spans, dict(visits))


def _events(thread: ThreadEvents, names: Sequence[int]) -> Events:
    """Communication of these names, ascending."""
    events = join(
        select(block, (block["category"] == Category.COMMUNICATION) & np.isin(block["name"], names))
        for block in thread.blocks()
    )
    return select(events, np.argsort(events["start"], kind="stable"))


def _who_meets(members: Sequence[_Member]) -> tuple[list[_Member], list[int]]:
    """The largest set of processes that called the same collectives, and the iterations in which they did."""
    by_calls: dict[tuple[tuple[int, tuple[str, ...]], ...], list[_Member]] = defaultdict(list)
    common = set.intersection(*(set(each.spans) for each in members)) if members else set()
    for each in members:
        calls = {number: tuple(name for *_, name in each.visits.get(number, ())) for number in common}
        by_calls[tuple(sorted(calls.items()))].append(each)
    if not by_calls:
        return [], []
    same, together = max(by_calls.items(), key=lambda item: len(item[1]))
    return together, [number for number, names in same if names and number != NO_ITERATION]


def segments(visits: Visits) -> list[PathSegment]:
    """The critical path of one iteration, in the order of time. Between collectives that overlap there is no time."""
    path: list[PathSegment] = []
    since = visits.starts
    for meeting in range(visits.arrived.shape[1]):
        last = int(np.argmax(visits.arrived[:, meeting]))
        arrived, left = int(visits.arrived[last, meeting]), int(visits.left[last, meeting])
        start = min(int(since[last]), arrived)
        path += [PathSegment(last, start, arrived, -1), PathSegment(last, arrived, left, meeting)]
        since = visits.left[:, meeting]
    last = int(np.argmax(visits.ends))
    end = int(visits.ends[last])
    return [*path, PathSegment(last, min(int(since[last]), end), end, -1)]


def _sum_up(members: Sequence[_Member], iterations: Sequence[int]) -> CriticalPath:
    sums: Counter[tuple[str, str]] = Counter()
    last, straggles = np.zeros((2, len(members)), np.int64)
    waited, delayed = np.zeros((2, len(members)), np.int64)
    span = collectives = 0
    for number in iterations:
        visits = _visits(members, number)
        path = segments(visits)
        latest = visits.arrived.max(axis=0)
        who = visits.arrived.argmax(axis=0)
        waited += (latest - visits.arrived).sum(axis=1)
        np.add.at(delayed, who, (latest - visits.arrived).sum(axis=0))
        np.add.at(last, who, 1)
        own = [sum(each.end - each.start for each in path if each.process == p) for p in range(len(members))]
        straggles[int(np.argmax(own))] += 1
        span += int(visits.ends.max() - visits.starts.min())
        collectives += visits.arrived.shape[1]
        names = [name for *_, name in members[0].visits[number]]
        for segment in path:
            if segment.meeting >= 0:
                sums["", names[segment.meeting]] += segment.end - segment.start
            else:
                _add_operations(sums, members[segment.process], segment)
    parts = [PathPart(process, what, ns) for (process, what), ns in sums.items() if ns > 0]
    return CriticalPath(
        len(iterations),
        collectives,
        span,
        tuple(sorted(parts, key=lambda part: (-part.ns, part.process, part.what))),
        tuple(
            Arrivals(
                member.process.label, *(int(values[index]) for values in (last, straggles, waited, delayed))
            )
            for index, member in enumerate(members)
        ),
    )


def _visits(members: Sequence[_Member], number: int) -> Visits:
    spans = np.array([member.spans[number] for member in members], np.int64)
    times = np.array([[visit[:2] for visit in member.visits[number]] for member in members], np.int64)
    return Visits(spans[:, 0], spans[:, 1], times[:, :, 0], times[:, :, 1])


def _add_operations(sums: Counter[tuple[str, str]], member: _Member, segment: PathSegment) -> None:
    """Add a process's time between two collectives by its innermost operation."""
    left = segment.end - segment.start
    for first, last, operations in member.operations:
        start, end = max(segment.start, first), min(segment.end, last)
        if start >= end:
            continue
        starts, ends, values = operations.spans(start, end)
        for value, ns in zip(values.tolist(), (ends - starts).tolist(), strict=True):
            sums[member.process.label, member.process.cells.texts[value]] += ns
        left -= end - start
    sums[member.process.label, NONE] += left  # before or after what the thread recorded
