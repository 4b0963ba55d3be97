"""Cross-stack overlap (RL-Scope, section 3.3): the time of every set of active categories, by operation.

At each moment a thread is in one category: that of its innermost native event, or Python. It is also in one operation: its
innermost one. A process is in the operations of its threads, and a set of categories is active in each of them:

* those of the threads in the operation;
* native categories of threads without an operation, such as torch's backward threads, which work for whoever is;
* those of the GPU, on whatever stream.

While no thread is in an operation, the set of all threads counts for the operation ``NONE``. So each moment counts once,
unless threads are in different operations at a time; ``Breakdown.totals`` count it once then too. All sums are exact.
"""

from __future__ import annotations

import gc
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice, pairwise, repeat
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from rayagi.profiler.intervals import (
    MASK_BITS,
    Ints,
    Part,
    Steps,
    Times,
    complement,
    innermost,
    intersect,
    paint_over,
    union,
    union_by_cell,
    zip_steps,
)
from rayagi.profiler.keyed_sums import Accumulator, KeyedSums, add_up, merged
from rayagi.profiler.sweep import sweep
from rayagi.profiler.trace import (
    LATEST_NS,
    Category,
    Events,
    ProcessTrace,
    Profile,
    ThreadTrace,
    TraceError,
    join,
    select,
)

PYTHON = "python"
NONE = ""
"""Operation or phase of the time outside of all."""
NO_ITERATION = -1
GPU = frozenset({"gpu_kernel", "gpu_copy"})

_FIRST_NATIVE = 16
_NATIVE = tuple(category for category in Category if category >= _FIRST_NATIVE)
PROFILER = "profiler"
"""Only with an ``Overhead``."""
LABELS = (PYTHON, *(category.name.lower() for category in _NATIVE), PROFILER)
"""Names of the categories, by their bit in a mask."""
BITS = np.full(256, 1 + _NATIVE.index(Category.OTHER_NATIVE), np.int64)
BITS[list(_NATIVE)] = np.arange(1, 1 + len(_NATIVE))
_IS_GPU = np.array([label in GPU for label in LABELS])

BLOCK_EVENTS = 1 << 13
"""Events between two entries of the index of a thread's events."""
_In = TypeVar("_In")
_Out = TypeVar("_Out")
_MOST_THREADS = 4
WINDOW_BLOCKS = 16
"""Blocks of events that are in memory at a time: about 130,000 events, whose arrays stay in the cache."""
_LONGEST_NS = 2**57
"""Four years: what the sort keys of ``overlap`` can hold."""
_MAX, _MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min


class Cell(NamedTuple):
    """Where time is spent. ``process`` is empty for all processes together."""

    process: str
    phase: str
    iteration: int
    operation: str


class Row(NamedTuple):
    """The time for which exactly these categories were active in a cell."""

    cell: Cell
    categories: frozenset[str]
    ns: int


class Transition(NamedTuple):
    """The code of a cell goes from a category into another one, such as Python into a backend."""

    cell: Cell
    source: str
    target: str


@dataclass(frozen=True)
class ProcessSummary:
    """One process of a profile.

    Attributes:
        label: its name, with its process id if others have the same
        threads: how many were recorded
        life_ns: from its start to its end; to its last event if the end is not known
        unaccounted_ns: how much of it no thread was recorded for
        dropped: events that were not kept
        cut_threads: how many threads are not recorded after their first dropped event
        is_killed: whether it ended without ending its recording, or still runs
        end_is_known: whether its time is counted to its end
        is_replaced: whether it ended by replacing its program
    """

    label: str
    threads: int
    life_ns: int
    unaccounted_ns: int
    dropped: int
    cut_threads: int = 0
    is_killed: bool = False
    end_is_known: bool = True
    is_replaced: bool = False


@dataclass(frozen=True)
class Breakdown:
    """Where the time of a profile went.

    Attributes:
        processes: in the profile's order
        rows: of each process
        merged: of all processes; what two processes do in one cell at a time counts once
        totals: time of each set of categories, by process, and by ``""`` for all; each moment counts once
        transitions: how many each process made
        removed_ns: of all processes' time, what only the profiler ran in, and ``corrected`` has taken away
        uncorrected: number of events by kind of hook whose cost was not given to ``corrected``
    """

    processes: tuple[ProcessSummary, ...]
    rows: tuple[Row, ...]
    merged: tuple[Row, ...]
    totals: Mapping[str, Mapping[frozenset[str], int]]
    transitions: Mapping[Transition, int]
    removed_ns: int = 0
    uncorrected: Mapping[str, int] = field(default_factory=dict)


def resource(categories: frozenset[str]) -> str:
    """``cpu``, ``gpu``, ``cpu+gpu``; ``wait`` if all that was active is a wait, which uses neither."""
    on_gpu, on_cpu = bool(categories & GPU), bool(categories - GPU - {"wait"})
    return {(True, True): "cpu+gpu", (True, False): "gpu", (False, True): "cpu"}.get((on_gpu, on_cpu), "wait")


def breakdown(profile: Profile, overhead: Overhead | None = None) -> Breakdown:
    """Add up the time of every set of categories in every cell.

    Events are read in windows of time: memory does not depend on their number, only on that of annotations.

    Args:
        profile: what was recorded
        overhead: when threads ran the profiler, which then is a category of its own

    Raises:
        TraceError: times are years apart, or a file of events cannot be read any more.
    """
    processes, cells = process_events(profile)
    _check_span(profile.path, processes)
    for _ in _ahead(attrgetter("windows"), processes):  # computed once, before threads read them
        pass
    sums = _Sums(processes, overhead)
    with _no_collector():
        # What an overhead says of a window depends on the windows before it.
        for found in _ahead(sums.measured, time_windows(processes), 1 if overhead is not None else None):
            sums.add(found)
        return sums.result(cells)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Without Python's search for cycles, which a hundred thousand new sums and rows start again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def process_events(profile: Profile) -> tuple[list[ProcessEvents], CellNumbers]:
    """The annotations of all processes, on the first one's clock, and the numbers of their cells.

    Raises:
        TraceError: times are years apart, or a file of events cannot be read any more.
    """
    traces, cells = profile.processes, CellNumbers()
    own = [
        (each, offset)
        for trace, offset in zip(traces, clock_offsets(traces), strict=True)
        for each in trace.threads
    ]
    threads = _ahead(lambda given: ThreadEvents(*given), own)
    processes = [
        ProcessEvents(trace, label, list(islice(threads, len(trace.threads))), cells)
        for trace, label in zip(traces, process_labels(traces), strict=True)
    ]
    cells.freeze()
    return processes, cells


def unix_minus_monotonic(profile: Profile) -> int:
    """Unix time of moment 0 of the first process's clock, on which all times are, in ns; 0 without a process."""
    clocks = [each.clock.unix_ns - each.clock.monotonic_ns for each in profile.processes[:1]]
    return clocks[0] if clocks else 0


def _ahead(
    function: Callable[[_In], _Out], items: Iterable[_In], threads: int | None = None
) -> Iterator[_Out]:
    """Results in the order of the items, computed by some threads: NumPy and the sweep release the interpreter's lock."""
    threads = threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    if threads == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[_Out]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > threads:  # no more: results wait in memory
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def process_labels(processes: Sequence[ProcessTrace]) -> list[str]:
    """Distinct labels: names; with the process id where several have the same; with the folder's name if still."""
    by_name = Counter(each.name for each in processes)
    labels = [
        each.name if by_name[each.name] == 1 and each.name else f"{each.name} {each.pid}"
        for each in processes
    ]
    by_label = Counter(labels)
    return [
        label if by_label[label] == 1 else f"{label} {each.path.name}"
        for label, each in zip(labels, processes, strict=True)
    ]


def clock_offsets(processes: Sequence[ProcessTrace]) -> list[int]:
    """What to add to each process's times, so that they are on the first one's clock.

    Processes of a host share CLOCK_MONOTONIC; those of others are aligned by the Unix time.

    Raises:
        TraceError: the clocks of a process are before 1970 or after 2043.
    """
    if not processes:
        return []
    hosts: dict[str, int] = {}
    first = processes[0].clock.unix_ns - processes[0].clock.monotonic_ns
    for each in processes:
        for time in (each.clock.unix_ns, each.clock.monotonic_ns):
            if not 0 <= time <= LATEST_NS:
                raise TraceError(f"{each.path} is damaged: one of its clocks is at {str(time)[:20]} ns")
        hosts.setdefault(_host(each), each.clock.unix_ns - each.clock.monotonic_ns - first)
    return [hosts[_host(each)] for each in processes]


def _host(process: ProcessTrace) -> str:
    return process.path.name.split("-", 1)[0]  # HOST-PID-TICKS, or HOST-PID-TICKS-2 after an exec


class CellNumbers:
    """Numbers for phases, iterations and operations, common to all processes."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {NONE: 0}
        self.outer: dict[tuple[int, int], int] = {}
        """(phase, iteration) -> number."""

    def name(self, text: str) -> int:
        """Number of a phase's or operation's name."""
        return self.names.setdefault(text, len(self.names))

    def outers(self, phases: Ints, iterations: Ints) -> Ints:
        """Numbers of pairs of a phase's number and an iteration."""
        pairs = zip(phases.tolist(), iterations.tolist(), strict=True)
        return np.array([self.outer.setdefault(pair, len(self.outer)) for pair in pairs], np.int64)

    def freeze(self) -> None:
        """Names are complete. A cell's number: that of phase and iteration, times the names' count, plus the operation's."""
        self.texts = list(self.names)
        self.pairs = np.array(list(self.outer), np.int64).reshape(-1, 2)

    def cells(self, numbers: Ints, process: str) -> Iterator[Cell]:
        """The cell of each number, (n,); one object for neighbours that are equal."""
        first = np.concatenate([[True], numbers[1:] != numbers[:-1]])[: len(numbers)]
        phases, iterations, operations = self._columns(numbers[first])
        texts = self.texts.__getitem__
        distinct = list(
            map(
                Cell,
                repeat(process),
                map(texts, phases.tolist()),
                iterations.tolist(),
                map(texts, operations.tolist()),
            )
        )
        return map(distinct.__getitem__, (np.cumsum(first) - 1).tolist())

    def order(self, numbers: Ints, last: Ints) -> Ints:
        """What sorts by the cells of the numbers, (n,), and of equal cells by ``last``, (n,)."""
        rank = np.empty(len(self.texts), np.int64)
        rank[sorted(range(len(self.texts)), key=self.texts.__getitem__)] = np.arange(len(self.texts))
        phases, iterations, operations = self._columns(numbers)
        return np.lexsort((last, rank[operations], iterations, rank[phases]))

    def _columns(self, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """Numbers of phases, iterations and numbers of operations of cells."""
        outer, operations = np.divmod(numbers, len(self.texts))
        return self.pairs[outer, 0], self.pairs[outer, 1], operations


class ThreadEvents:
    """One thread's annotations, and an index of its other events by time."""

    def __init__(self, trace: ThreadTrace, offset: int) -> None:
        self.trace, self.offset = trace, offset
        scopes, self.low, self.high, self.has_cpu = [], [], [], trace.num_events == 0
        for first in range(0, trace.num_events, BLOCK_EVENTS):
            block = trace.read(first, min(first + BLOCK_EVENTS, trace.num_events))
            _check_times(trace.path, block)
            native = block["category"] >= _FIRST_NATIVE
            scopes.append(select(block, ~native))
            starts, ends = block["start"][native], block["end"][native]
            self.low.append(int(starts.min(initial=_MAX - max(offset, 0))) + offset)
            self.high.append(int(np.maximum(starts, ends).max(initial=_MIN - min(offset, 0))) + offset)
            self.has_cpu |= not _IS_GPU[BITS[block["category"][native]]].all()
        self.scopes = join(scopes)
        self.scopes["start"] += offset
        self.scopes["end"][self.scopes["end"] != 0] += offset
        # A file of nothing but a GPU's events is no thread; one without events is a thread that ran only Python.
        self.has_cpu |= not any(low <= high for low, high in zip(self.low, self.high, strict=True))
        self.last = max(self.high + [int(self.scopes[name].max(initial=_MIN)) for name in ("start", "end")])

    def is_open(self) -> bool:
        """Whether neither the thread nor its recording has ended."""
        return not self.scopes_of(Category.THREAD)["end"].all()

    def close(self, last: int) -> None:
        """Give open annotations an end: that of the thread, or ``last`` if the process was killed.

        Of a thread that dropped events nothing is known from the first one on, so it ends there.
        """
        own = self.scopes_of(Category.THREAD)
        own_ends = [last if end == 0 else end for end in own["end"].tolist()]
        within = select(self.scopes, self.scopes["category"] != Category.PROCESS)
        self.start = min([*self.low, int(within["start"].min(initial=last))])
        self.end = max([*own_ends, *self.high]) if own_ends else self.last
        scopes = self.scopes
        ends = np.where(scopes["end"] == 0, self.end, scopes["end"])
        if self.trace.dropped_from_ns:
            self.end = max(self.start, min(self.end, self.trace.dropped_from_ns + self.offset))
            is_own = scopes["category"] != Category.PROCESS
            ends[is_own] = np.minimum(ends[is_own], self.end)
        scopes["end"] = np.maximum(ends, scopes["start"])

    def scopes_of(self, category: Category) -> Events:
        """Annotations of one category."""
        return select(self.scopes, self.scopes["category"] == category)

    def natives(self, start: int, end: int) -> Events:
        """Events of categories other than annotations that are active in a window of time, or of length 0 in it."""
        near = (np.array(self.low, np.int64) < end) & (np.array(self.high, np.int64) >= start)
        found = [self._native_block(number) for number in np.flatnonzero(near).tolist()]
        events = join(found)
        inside = (events["start"] < end) & ((events["end"] > start) | (events["start"] >= start))
        return events if inside.all() else select(events, inside)

    def blocks(self) -> Iterator[Events]:
        """All events: annotations, then the others, a block of the file at a time."""
        yield self.scopes
        yield from map(self._native_block, range(len(self.low)))

    def _native_block(self, number: int) -> Events:
        """What is no annotation in a block of the file, on the profile's clock."""
        first = number * BLOCK_EVENTS
        block = self.trace.read(first, min(first + BLOCK_EVENTS, self.trace.num_events))
        native = block["category"] >= _FIRST_NATIVE
        events = block if native.all() else select(block, native)
        if self.offset:
            events["start"] += self.offset
            events["end"] += self.offset
        np.maximum(events["end"], events["start"], out=events["end"])
        return events


class ProcessEvents:
    """One process: which operations are active when, and the intervals of each category within them."""

    def __init__(
        self, trace: ProcessTrace, label: str, threads: Sequence[ThreadEvents], cells: CellNumbers
    ) -> None:
        self.trace, self.label, self.threads, self.cells = trace, label, threads, cells
        last = max((thread.last for thread in self.threads), default=0)
        if self.threads and trace.end_ns:
            last = max(last, trace.end_ns + self.threads[0].offset)
        self.is_killed = not trace.has_ended and any(thread.is_open() for thread in self.threads)
        for thread in self.threads:
            thread.close(last)
        self.start = min((thread.start for thread in self.threads), default=0)
        self.end = max((max(thread.end, thread.last) for thread in self.threads), default=0)
        _check_span(trace.path, [self])
        self.on_cpu = [thread for thread in self.threads if thread.has_cpu]
        self.outer = self._outer()
        self.operations = [
            self._steps([thread], Category.OPERATION, self._names(thread.scopes_of(Category.OPERATION)))
            for thread in self.on_cpu
        ]

    def _names(self, scopes: Events) -> Ints:
        names, index = np.unique(scopes["name"], return_inverse=True)
        numbers = [self.cells.name(self.trace.name_of(name)) for name in names.tolist()]
        return np.array(numbers, np.int64)[index]

    def _outer(self) -> Steps:
        """Number of the phase and iteration over time. They are the process's: of several, the last to start counts."""
        phases = [each.scopes_of(Category.PHASE) for each in self.threads]
        phase = self._steps(self.threads, Category.PHASE, self._names(join(phases)))
        iterations = join(each.scopes_of(Category.ITERATION) for each in self.threads)
        iteration = self._steps(self.threads, Category.ITERATION, iteration_numbers(iterations), NO_ITERATION)
        times, *values = zip_steps(phase, iteration)
        outers = self.cells.outers(*values)
        return Steps(times, outers[1:], int(outers[0]))

    def _steps(
        self, threads: Sequence[ThreadEvents], category: Category, values: Ints, outside: int = 0
    ) -> Steps:
        scopes = join(thread.scopes_of(category) for thread in threads)
        return innermost(scopes["start"], scopes["end"], scopes["depth"].astype(np.int64), values, outside)[0]

    @cached_property
    def thread_cells(self) -> list[Steps]:
        """The cell of each CPU thread over time."""
        found = []
        for operation in self.operations:
            times, outer, name = zip_steps(self.outer, operation)
            numbers = outer * len(self.cells.texts) + name
            found.append(Steps(times, numbers[1:], int(numbers[0])))
        return found

    @cached_property
    def windows(self) -> tuple[Ints, Ints, Ints]:
        """When each cell is active in any thread; those of no operation while no thread is in one. Cells, starts, ends."""
        names = len(self.cells.texts)
        spans = [
            steps.spans(thread.start, thread.end)
            for steps, thread in zip(self.thread_cells, self.on_cpu, strict=True)
        ]
        nothing = (np.empty(0, np.int64),) * 3
        starts, ends, cells = map(np.concatenate, zip(nothing, *spans, strict=True))
        inside = cells % names != 0
        active = union_by_cell(cells[inside], starts[inside], ends[inside])
        idle = complement(*active[1:], self.start, self.end)
        outer_starts, outer_ends, outer = self.outer.spans(self.start, self.end)
        starts, ends, _, window = intersect(*idle, outer_starts, outer_ends)
        cells, starts, ends = map(
            np.concatenate, zip(active, (outer[window] * names, starts, ends), strict=True)
        )
        return cells, starts, ends

    def summary(self) -> ProcessSummary:
        """Its length, and what of it was not recorded."""
        life = join(each.scopes_of(Category.PROCESS) for each in self.threads)
        start, end = min([*life["start"], self.start]), max([*life["end"], self.end])
        starts = np.array([each.start for each in self.on_cpu], np.int64)
        ends = np.array([each.end for each in self.on_cpu], np.int64)
        starts, ends = complement(starts, ends, int(start), int(end))
        return ProcessSummary(
            self.label,
            threads=len({each.trace.thread_id for each in self.on_cpu}),
            life_ns=int(end - start),
            unaccounted_ns=int((ends - starts).sum()),
            dropped=sum(each.dropped for each in self.trace.threads) + self.trace.lost,
            is_killed=self.is_killed,
            is_replaced=self.trace.is_replaced,
            end_is_known=bool(self.trace.end_ns) or not self.is_killed,
            cut_threads=len({each.trace.thread_id for each in self.on_cpu if each.trace.dropped_from_ns}),
        )

    def measure(self, start: int, end: int, overhead: Overhead | None) -> tuple[list[Part], KeyedSums]:
        """Intervals of each category in a window of time, and ``ThreadActivity.transitions`` that start in it."""
        cells, starts, ends = self.windows
        near = (starts < end) & (ends > start)
        windows = cells[near], starts[near], ends[near]
        parts: list[Part] = []
        counts: list[KeyedSums] = []
        gpu: dict[int, list[tuple[Ints, Ints]]] = {}
        on_cpu = iter(self.thread_cells)
        for thread in self.threads:
            events = thread.natives(start, end)
            bits = BITS[events["category"]]
            on_gpu = _IS_GPU[bits]
            for bit in np.unique(bits[on_gpu]).tolist():
                some = select(events, bits == bit)
                gpu.setdefault(bit, []).append((some["start"], some["end"]))
            if thread.has_cpu:
                steps = next(on_cpu)
                events = select(events, ~on_gpu) if on_gpu.any() else events
                busy = overhead(thread, events, start, end) if overhead is not None else None
                lane = ThreadActivity(thread, events, steps, start, end, busy)
                alone = len(self.on_cpu) == 1
                parts += lane.parts(len(self.cells.texts), None if alone else windows)
                counts.append(lane.transitions(len(self.cells.texts), None if alone else windows))
        for bit, several in gpu.items():
            both = union(*(np.clip(np.concatenate(each), start, end) for each in zip(*several, strict=True)))
            parts.append(_within(np.full(len(both[0]), bit), *both, windows))
        return parts, merged(counts)


def iteration_numbers(iterations: Events) -> Ints:
    """Numbers of iterations from their low 16 bits: they ascend over time."""
    order = np.argsort(iterations["start"], kind="stable")
    low = iterations["flags"][order].astype(np.int64)
    steps = np.diff(low, prepend=low[:1])
    wraps: Ints = np.cumsum(steps < -(1 << 15)) - np.cumsum(steps > 1 << 15)
    numbers = np.empty(len(low), np.int64)
    numbers[order] = low + (np.maximum(wraps, 0) << 16)
    return numbers


def _within(bits: Ints, starts: Ints, ends: Ints, windows: tuple[Ints, ...]) -> Part:
    """Disjoint intervals, cut by the windows of the cells that they count for."""
    cells, window_starts, window_ends = windows
    starts, ends, interval, window = intersect(starts, ends, window_starts, window_ends)
    return Part(bits[interval], cells[window], starts, ends)


class ThreadActivity:
    """What one thread does in a window of time."""

    def __init__(
        self,
        thread: ThreadEvents,
        events: Events,
        cells: Steps,
        start: int,
        end: int,
        busy: tuple[Ints, Ints] | None = None,
    ) -> None:
        self.starts = events["start"]
        self.bits = BITS[events["category"]]
        self.cells = cells
        self.inside = (self.starts >= start) & (self.starts < end)
        steps, self.around = innermost(
            self.starts, events["end"], events["depth"].astype(np.int64), self.bits, outside=0
        )
        if busy is not None:
            steps = paint_over(steps, *busy, LABELS.index(PROFILER))
        low, high = max(start, thread.start), max(min(end, thread.end), start, thread.start)
        self.active = zip_steps(steps, cells.between(low, high))
        self.low, self.high = low, high

    def parts(self, names: int, windows: tuple[Ints, Ints, Ints] | None) -> Iterator[Part]:
        """What the thread does. Outside of operations it counts where the process's windows say, if there are any."""
        times, bits, cells = self.active
        bounds = np.concatenate([[self.low], np.clip(times, self.low, self.high), [self.high]])
        starts, ends = bounds[:-1], bounds[1:]
        if windows is None:
            yield Part(bits, cells, starts, ends)
            return
        filled, outside = ends > starts, cells % names == 0
        own = filled & ~outside
        yield Part(bits[own], cells[own], starts[own], ends[own])
        # Python without an operation, often a thread that waits, counts for no operation; native code for all.
        idle = windows[0] % names == 0
        for chosen, near in ((bits != 0, windows), (bits == 0, tuple(each[idle] for each in windows))):
            lent = filled & outside & chosen
            yield _within(bits[lent], starts[lent], ends[lent], near)

    def transitions(self, names: int, windows: tuple[Ints, Ints, Ints] | None) -> KeyedSums:
        """How often each cell's code entered a category from another one; of ``cell << 8 | source << 4 | target``."""
        entered = self.inside & (self.bits != self.around)
        starts, pairs = self.starts[entered], (self.around << 4 | self.bits)[entered]
        cells = self.cells.at(starts)
        outside = np.zeros(len(cells), bool) if windows is None else cells % names == 0
        counts = [KeyedSums(*np.unique((cells << 8 | pairs)[~outside], return_counts=True))]
        if windows is not None:
            for pair in np.unique(pairs[outside]).tolist():
                times = np.sort(starts[outside & (pairs == pair)])
                low, high = (np.searchsorted(times, bound) for bound in windows[1:])
                some = high > low
                counts.append(add_up(windows[0][some] << 8 | pair, (high - low)[some]))
        return merged(counts)


def _check_times(path: Path, events: Events) -> None:
    for name in ("start", "end"):
        for time in (int(events[name].min(initial=0)), int(events[name].max(initial=0))):
            if abs(time) > LATEST_NS:
                raise TraceError(f"{path} is damaged: it has an event at {time} ns")


def _check_span(path: Path, processes: Sequence[ProcessEvents]) -> None:
    used = [each for each in processes if each.threads]
    span = max((each.end for each in used), default=0) - min((each.start for each in used), default=0)
    if span > _LONGEST_NS:
        raise TraceError(f"{path} is damaged: its events are {span / 3.15576e16:.0f} years apart")


def time_windows(processes: Sequence[ProcessEvents]) -> Iterator[tuple[int, int]]:
    """Windows of time with about as many events each."""
    lows = sorted(
        low for each in processes for thread in each.threads for low in thread.low if low < _MAX // 2
    )
    start = min((each.start for each in processes), default=0)
    end = max((each.end for each in processes), default=0) + 1
    cuts = sorted({start, end, *(low for low in lows[WINDOW_BLOCKS::WINDOW_BLOCKS] if start < low < end)})
    return pairwise(cuts)


_Measured = tuple[list[Times], list[KeyedSums]]
"""Times of each process and then of all together; transitions of each process."""


class _Sums:
    """Tables of times and counts, filled window by window; the last tables of times are those of all processes."""

    def __init__(self, processes: Sequence[ProcessEvents], overhead: Overhead | None) -> None:
        self.processes, self.overhead = processes, overhead
        self.sweep = sweep()
        self.tables = [Accumulator() for _ in [*processes, None]]
        self.totals = [Accumulator() for _ in [*processes, None]]
        self.transitions = [Accumulator() for _ in processes]

    def measured(self, window: tuple[int, int]) -> _Measured:
        """What happened in a window of time; changes nothing, so that several threads may call it."""
        found = [process.measure(*window, self.overhead) for process in self.processes]
        return self.sweep([parts for parts, _ in found]), [counts for _, counts in found]

    def add(self, measured: _Measured) -> None:
        """Add what was measured in a window."""
        times, transitions = measured
        for table, total, each in zip(self.tables, self.totals, times, strict=True):
            table.add(each.by_cell)
            total.add(each.total)
        for counted, counts in zip(self.transitions, transitions, strict=True):
            counted.add(counts)

    def result(self, cells: CellNumbers) -> Breakdown:
        """The tables with names in place of numbers."""
        labels = [*(process.label for process in self.processes), ""]
        rows = [_rows(table.result(), label, cells) for table, label in zip(self.tables, labels, strict=True)]
        return Breakdown(
            processes=tuple(process.summary() for process in self.processes),
            rows=tuple(row for own in rows[:-1] for row in own),
            merged=rows[-1],
            totals={
                label: dict(zip(map(labels_of, keys.tolist()), sums.tolist(), strict=True))
                for label, (keys, sums) in zip(labels, (each.result() for each in self.totals), strict=True)
            },
            transitions=dict(
                pair
                for label, table in zip(labels[:-1], self.transitions, strict=True)
                for pair in _transitions(table.result(), label, cells)
            ),
        )


def _rows(table: KeyedSums, process: str, cells: CellNumbers) -> tuple[Row, ...]:
    """Rows by cell."""
    numbers, masks = table.keys >> MASK_BITS, table.keys & ((1 << MASK_BITS) - 1)
    order = cells.order(numbers, masks)
    sets = map(labels_of, masks[order].tolist())
    return tuple(map(Row, cells.cells(numbers[order], process), sets, table.sums[order].tolist()))


def _transitions(table: KeyedSums, process: str, cells: CellNumbers) -> Iterator[tuple[Transition, int]]:
    """Transitions with their numbers, in the order of the keys."""
    sources, targets = (map(LABELS.__getitem__, (table.keys >> shift & 15).tolist()) for shift in (4, 0))
    named = map(Transition, cells.cells(table.keys >> 8, process), sources, targets)
    return zip(named, table.sums.tolist(), strict=True)


Overhead = Callable[[ThreadEvents, Events, int, int], tuple[Ints, Ints]]
"""When a thread ran the profiler, from its CPU events in a window of time: disjoint ascending intervals within it.

Windows come in ascending order.
"""


@cache
def labels_of(mask: int) -> frozenset[str]:
    """The categories of a mask."""
    return frozenset(label for bit, label in enumerate(LABELS) if mask >> bit & 1)
