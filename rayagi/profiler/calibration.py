"""The profiler's own cost: measured per hook, placed into the time-line, and subtracted (RL-Scope, section 3.4, appendix C).

Time in which nothing but the profiler ran is removed. Where another thread or the GPU was active at the same time, that time
stays theirs. Waiting for another process that the profiler slowed down is not corrected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, stdev

import numpy as np
from numpy.typing import NDArray

from rayagi.profiler.errors import ProfilerError
from rayagi.profiler.intervals import Ints, union
from rayagi.profiler.layout import ACTIVITY, ANNOTATION, CALL, FROM_PYTHON
from rayagi.profiler.overlap import BLOCK_EVENTS, PROFILER, Breakdown, Row, ThreadEvents, breakdown
from rayagi.profiler.trace import Category, Events, Profile, select

PROCESS = "process"
"""The profiler's start in a process, beside the kinds of hook: it is no event, and lies before or at imports."""
FEWEST_ROUNDS, LARGEST_SPREAD = 3, 0.03
"""Standard deviation by mean of so many uninstrumented blocks, above which costs of a few percent are not measurable."""

_CALLS = tuple(each for each in Category if Category.SIMULATOR <= each <= Category.OTHER_NATIVE)
"""Recorded when they end, by an interception or by Python code."""
_ANNOTATIONS = (Category.PHASE, Category.OPERATION, Category.ITERATION)


class CalibrationError(ProfilerError):
    """The blocks do not give the cost of a hook."""


@dataclass(frozen=True)
class CalibrationBlock:
    """One of several blocks of the same work, which alternate in one process.

    Attributes:
        cpu_ns: CPU time; not wall time, which depends on what else runs
        counts: how often each kind of hook ran; empty for an uninstrumented block
    """

    cpu_ns: int
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Calibration:
    """Mean costs in ns.

    Attributes:
        hooks: of one event, by kind of hook
        functions: within one call of a function that a library profiles itself, such as a CUDA API, by name
        spread: standard deviation of the uninstrumented blocks by their mean
        errors: standard errors of ``hooks``, where they are known
    """

    hooks: Mapping[str, float]
    functions: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)

    def total_ns(self, counts: Mapping[str, int]) -> float:
        """What hooks took that ran so often; kinds whose cost is not known count as 0."""
        return sum(self.hooks.get(kind, 0.0) * count for kind, count in counts.items())


def count_hooks(profile: Profile) -> dict[str, int]:
    """How often each kind of hook ran, by the events of a profile, dropped ones not included."""
    counts = Counter({PROCESS: len(profile.processes)})
    for thread in (thread for process in profile.processes for thread in process.threads):
        for first in range(0, thread.num_events, BLOCK_EVENTS):
            block = thread.read(first, min(first + BLOCK_EVENTS, thread.num_events))
            counts.update({kind: int(chosen.sum()) for kind, chosen in kinds_of(block).items()})
    return dict(+counts)


def kinds_of(events: Events) -> dict[str, NDArray[np.bool_]]:
    """Which of some events were recorded by each kind of hook. Shape of each (n,)"""
    is_call = np.isin(events["category"], _CALLS)
    is_from_python = events["flags"] == FROM_PYTHON
    return {
        CALL: is_call & ~is_from_python,
        ACTIVITY: is_call & is_from_python,
        ANNOTATION: np.isin(events["category"], _ANNOTATIONS),
    }


def relative_spread(values: Sequence[float]) -> float:
    """Standard deviation by mean; infinite for a mean of 0."""
    return stdev(values) / mean(values) if mean(values) > 0 else math.inf


def largest_spread(count: int) -> float:
    """Of so many blocks: their mean is then as well known as that of three blocks that spread over ``LARGEST_SPREAD``."""
    return LARGEST_SPREAD * math.sqrt(count / FEWEST_ROUNDS)


def delta_calibration(blocks: Sequence[CalibrationBlock]) -> Calibration:
    """Costs of hooks: what blocks with a hook take longer than those without, by how often it ran (appendix C.1).

    Totals are compared, not single blocks. Blocks with several hooks are used after those with fewer: what is known of
    their cost is subtracted first. A cost below 0, which is noise, counts as 0.

    Args:
        blocks: uninstrumented and instrumented ones, alternating

    Raises:
        CalibrationError: the uninstrumented blocks spread too much, or the blocks leave a cost undetermined.
    """
    plain = [block.cpu_ns for block in blocks if not any(block.counts.values())]
    if len(plain) < 2:
        raise CalibrationError(f"a calibration needs at least 2 uninstrumented blocks, not {len(plain)}")
    spread = relative_spread(plain)
    if spread > largest_spread(len(plain)):
        raise CalibrationError(
            f"CPU times of the {len(plain)} uninstrumented blocks spread over {100 * spread:.1f} %, more than "
            f"{100 * largest_spread(len(plain)):.1f} %: calibrate again when less else runs, or with longer blocks"
        )
    groups: dict[frozenset[str], list[CalibrationBlock]] = {}
    for block in blocks:
        groups.setdefault(frozenset(kind for kind, count in block.counts.items() if count), []).append(block)
    hooks: dict[str, float] = {}
    for kinds in sorted(groups, key=lambda each: (len(each), sorted(each))):
        new = kinds - hooks.keys()
        if len(new) > 1:
            raise CalibrationError(
                f"the costs of {' and '.join(sorted(new))} cannot be told apart: add blocks with only one of them"
            )
        for kind in new:
            hooks[kind] = max(0.0, _cost(kind, groups[kinds], hooks, mean(plain)))
    return Calibration(hooks, spread=spread)


def _cost(
    kind: str, blocks: Sequence[CalibrationBlock], known: Mapping[str, float], plain_ns: float
) -> float:
    """(total with - total without - known costs) / count."""
    counts = {each: sum(block.counts[each] for block in blocks) for each in blocks[0].counts}
    others = sum(known[each] * count for each, count in counts.items() if each in known)
    return (sum(block.cpu_ns for block in blocks) - len(blocks) * plain_ns - others) / counts[kind]


def corrected(profile: Profile, calibration: Calibration) -> Breakdown:
    """The breakdown without the profiler's own time."""
    costs = _HookCosts(calibration, profile)
    found = breakdown(profile, costs.intervals)
    return replace(
        found,
        rows=_without_profiler(found.rows),
        merged=_without_profiler(found.merged),
        totals={label: _sets_without_profiler(sets.items()) for label, sets in found.totals.items()},
        removed_ns=found.totals.get("", {}).get(frozenset({PROFILER}), 0),
        uncorrected={kind: turns // 2 for kind, turns in costs.uncorrected.items() if turns > 1},
    )


def _without_profiler(rows: Iterable[Row]) -> tuple[Row, ...]:
    cells: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in rows:
        cells.setdefault(row.cell, []).append(row)
    return tuple(
        Row(several[0].cell, categories, ns)
        for several in cells.values()
        for categories, ns in _sets_without_profiler((row.categories, row.ns) for row in several).items()
    )


def _sets_without_profiler(sets: Iterable[tuple[frozenset[str], int]]) -> dict[frozenset[str], int]:
    """Time in which only the profiler ran is removed; else it counts for the others."""
    sums: dict[frozenset[str], int] = {}
    for categories, ns in sets:
        if others := categories - {PROFILER}:
            sums[others] = sums.get(others, 0) + ns
    return sums


class _HookCosts:
    """Where each thread's hooks spent time, window by window."""

    def __init__(self, calibration: Calibration, profile: Profile) -> None:
        self.calibration = calibration
        self.left: dict[int, float] = {}
        """By thread: cost that did not fit before the end of the last window."""
        self.uncorrected: Counter[str] = Counter()
        """Twice the number of events by kind of hook whose cost is not known: of an annotation both ends count."""
        self.functions = {
            id(thread): {
                number: calibration.functions[name]
                for number, name in process.names.items()
                if name in calibration.functions
            }
            for process in profile.processes
            for thread in process.threads
        }

    def intervals(self, thread: ThreadEvents, events: Events, start: int, end: int) -> tuple[Ints, Ints]:
        """When a thread ran the profiler in a window of time, disjoint and ascending.

        A hook's cost begins where its event was recorded. If the next hook comes before the cost is over, costs queue up:
        none is lost, and none is counted twice.
        """
        times, costs = self._arrivals(thread, events, start, end)
        left = self.left.pop(id(thread), 0.0)
        times, costs = np.concatenate([[start], times]), np.concatenate([[left], costs])
        order = np.argsort(times, kind="stable")
        times, costs = times[order], costs[order]
        # finish_i = max over j <= i of (time_j + cost_j + ... + cost_i), as in a queue with one server.
        until = np.rint(np.cumsum(costs)).astype(np.int64)
        before = np.concatenate([[0], until[:-1]])
        finish = until + np.maximum.accumulate(times - before)
        begin = finish - (until - before)
        self.left[id(thread)] = float(max(0, finish[-1] - end))
        return union(np.minimum(begin, end), np.minimum(finish, end))

    def _arrivals(
        self, thread: ThreadEvents, events: Events, start: int, end: int
    ) -> tuple[Ints, NDArray[np.float64]]:
        """Times at which costs begin, and how much."""
        hooks = self.calibration.hooks
        # A call's hook runs after the call, in the caller's time; one of length 0 may lie on the window's start.
        ends = events["end"]
        ended = (ends <= end) & ((ends > start) | (events["start"] == ends))
        calls = select(events, ended & np.isin(events["category"], _CALLS))
        from_python, intercepted = hooks.get(ACTIVITY, 0.0), hooks.get(CALL, 0.0)
        # An annotation's runs half after its opening and half after its closing.
        scopes = select(thread.scopes, np.isin(thread.scopes["category"], _ANNOTATIONS))
        turns = np.concatenate([scopes["start"], scopes["end"]])
        annotations = turns[(turns >= start) & (turns < end)]
        num_activities = int((calls["flags"] == FROM_PYTHON).sum())
        twice = {
            CALL: 2 * (len(calls) - num_activities),
            ACTIVITY: 2 * num_activities,
            ANNOTATION: len(annotations),
        }
        self.uncorrected.update({kind: count for kind, count in twice.items() if kind not in hooks})
        # A library's own profiling runs within the call.
        within = select(events, (events["start"] >= start) & (events["start"] < end))
        functions = self.functions[id(thread.trace)]
        inside = np.array([functions.get(name, 0.0) for name in within["name"].tolist()] if functions else [])
        times = np.concatenate([calls["end"], annotations, within["start"][: len(inside)]])
        costs = np.concatenate(
            [
                np.where(calls["flags"] == FROM_PYTHON, from_python, intercepted),
                np.full(len(annotations), hooks.get(ANNOTATION, 0.0) / 2),
                inside,
            ]
        )
        return times.astype(np.int64), costs
