"""What a profile says would help, in sentences with its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rayagi.profiler.critical_path import CriticalPath
from rayagi.profiler.overlap import PYTHON, Breakdown, process_labels
from rayagi.profiler.summary import OUTSIDE, Wait, operation_name, operation_times, seconds
from rayagi.profiler.trace import Profile

_WORTH = 0.05
"""Smallest share of the time that is worth a sentence."""
_LARGE = 0.2
"""Share from which an operation is named."""
_BUSY = 0.9
"""Cores that a process uses at least, on average, which is not blocked for long."""


def advice(
    profile: Profile, found: Breakdown, causes: Sequence[Wait], path: CriticalPath | None
) -> list[str]:
    """Sentences, those about the critical path first; none where nothing stands out.

    Args:
        profile: of which ``found`` has the times
        found: its times
        causes: its waits
        path: its critical path, if it has one
    """
    sentences = list(_of_path(path)) if path is not None else []
    return [*sentences, *_of_waits(found, causes), *_of_python(profile, found)]


def _of_path(path: CriticalPath) -> Iterator[str]:
    worst = max(path.arrivals, key=lambda each: each.delayed_ns)
    others = (len(path.arrivals) - 1) * path.span_ns
    if worst.delayed_ns >= _WORTH * others:
        yield (
            f"{worst.process} is the straggler of {worst.straggles / path.iterations:.0%} of iterations; each of the others "
            f"waits for it {seconds(worst.delayed_ns / path.iterations / (len(path.arrivals) - 1))} an iteration "
            f"({worst.delayed_ns / others:.1%}): give it fewer environments, or more cores"
        )
    sums: Counter[tuple[str, bool]] = Counter()
    for part in path.parts:
        sums[part.what or OUTSIDE, not part.process] += part.ns
    for (what, is_collective), ns in sums.most_common():
        share = ns / path.span_ns
        if is_collective and share >= _WORTH:
            yield f"{what} itself, after the last process has arrived, is {share:.1%} of the critical path"
        elif share >= _LARGE:
            yield (
                f"{what} is {share:.1%} of the critical path: a tenth less of it makes an iteration {share / 10:.1%} shorter"
            )


def _of_waits(found: Breakdown, causes: Sequence[Wait]) -> Iterator[str]:
    lives = {each.label: each.life_ns for each in found.processes}
    for each in causes:
        if each.category == "wait" and each.mean_ns >= _WORTH * lives[each.process]:
            threads = f", on average of {each.threads:,} threads" if each.threads > 1 else ""
            yield f"{each.process} waits for {each.cause} {each.mean_ns / lives[each.process]:.1%} of its time{threads}"


def _of_python(profile: Profile, found: Breakdown) -> Iterator[str]:
    times = operation_times(found.merged)
    whole = sum(each.total_ns for each in times)
    for each in times:
        own = each.sets.get(frozenset([PYTHON]), 0)
        if each.name != OUTSIDE and own >= _WORTH * whole and own >= _LARGE * each.total_ns:
            yield (
                f"{each.name} spends {own / each.total_ns:.0%} of its time in Python alone, {own / whole:.1%} of all: "
                + (_off_core(profile, found, each.name) or "larger batches, or fewer calls")
            )


def _off_core(profile: Profile, found: Breakdown, operation: str) -> str:
    """What an operation's time in Python may be where its processes used less than a core; empty where they used one.

    A call that blocks, such as ``time.sleep`` or a read from a pipe, is no call that is recorded, and shows as Python. So
    does time in which a thread was ready, but had no core. Of processes that were killed neither is known.
    """
    own = {
        row.cell.process
        for row in found.rows
        if operation_name(row.cell.phase, row.cell.operation) == operation
    }
    labels = process_labels(profile.processes)
    known = [each.cores for label, each in zip(labels, profile.processes, strict=True) if label in own]
    wall, used, queued = (
        sum(each.get(key, 0) for each in known) for key in ("wall_ns", "cpu_ns", "queue_ns")
    )
    if not wall or used >= _BUSY * wall:
        return ""
    if queued >= wall - used - queued:
        return (
            f"its processes were ready without a core for {queued / wall:.0%} of their time, since others had the cores: "
            "profile again when less else runs"
        )
    return (
        f"on {used / wall:.2f} cores on average, so part of it is a call that blocks, such as sleep or input "
        "(rayagi profile --native time --native select shows some)"
    )
