"""Tables of a profile: operations, transitions, waits; and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from collectives.errors import counted
from rayagi.profiler.critical_path import CriticalPath
from rayagi.profiler.extrapolation import Extrapolation
from rayagi.profiler.layout import MAX_NAME
from rayagi.profiler.overlap import (
    BLOCK_EVENTS,
    GPU,
    NO_ITERATION,
    NONE,
    Breakdown,
    ProcessSummary,
    Row,
    process_labels,
    resource,
)
from rayagi.profiler.trace import Category, ProcessTrace, Profile, printable, select

LEAST_WAIT_SHARE = 0.01
"""Of a process's time, from which on waits of one cause are in the text."""
MOST_WAITS = 30
"""Causes of waits in the text."""
RESOURCES = ("cpu", "cpu+gpu", "gpu", "wait")
OUTSIDE = "(outside operations)"
MOST_OPERATIONS = 200
"""Rows of a table of operations: those with most time."""
_MOST_COLUMNS = 7
_AT_ONCE_NS = 10_000_000
"""In which a forked process replaces its program that was forked for nothing else."""
_WIDEST = 80


@dataclass(frozen=True)
class OperationTime:
    """Time of one operation of a phase.

    Attributes:
        name: with its phase, if it has one
        sets: time of every set of categories, in ns
    """

    name: str
    sets: Mapping[frozenset[str], int]

    @property
    def total_ns(self) -> int:
        """Of all sets."""
        return sum(self.sets.values())

    def resource_ns(self, name: str) -> int:
        """Time in which this resource was used, or these two together: one of RESOURCES."""
        return sum(ns for categories, ns in self.sets.items() if resource(categories) == name)


@dataclass(frozen=True)
class Wait:
    """Waits and communication of one cause: times include whatever they call.

    Attributes:
        process: its label
        category: ``wait`` or ``communication``
        cause: what the event is called, such as the peer that was waited for
        count: how many
        total_ns: together
        longest_ns: of one
        threads: how many of the process's threads have some
    """

    process: str
    category: str
    cause: str
    count: int
    total_ns: int
    longest_ns: int
    threads: int

    @property
    def mean_ns(self) -> float:
        """Mean total of a thread: threads can wait at a time, each for all of the process's life."""
        return self.total_ns / self.threads


def operation_times(rows: Iterable[Row]) -> list[OperationTime]:
    """Rows over all iterations by phase and operation, the longest first."""
    sums: dict[str, Counter[frozenset[str]]] = {}
    for row in rows:
        sums.setdefault(operation_name(row.cell.phase, row.cell.operation), Counter())[row.categories] += (
            row.ns
        )
    return sorted(
        (OperationTime(name, table) for name, table in sums.items()),
        key=lambda each: (-each.total_ns, each.name),
    )


def operation_name(phase: str, operation: str) -> str:
    """``phase / operation``."""
    return " / ".join(part for part in (phase, operation or OUTSIDE) if part != NONE)


def set_name(categories: frozenset[str]) -> str:
    """``backend + gpu kernel``."""
    return " + ".join(sorted(each.replace("_", " ") for each in categories))


def largest_sets(times: Iterable[OperationTime]) -> list[frozenset[str]]:
    """The sets with most time, the largest first."""
    sums: Counter[frozenset[str]] = Counter()
    for each in times:
        sums.update(each.sets)
    return [
        categories
        for categories, _ in sorted(sums.items(), key=lambda item: (-item[1], sorted(item[0])))[
            :_MOST_COLUMNS
        ]
    ]


def num_iterations(rows: Iterable[Row]) -> int:
    """How many iterations have time."""
    return len({row.cell.iteration for row in rows} - {NO_ITERATION})


def waits(profile: Profile) -> list[Wait]:
    """Waits and communication by process and cause, the longest in total first."""
    found: dict[tuple[str, int, str], tuple[int, int, int]] = {}
    threads: dict[tuple[str, int, str], set[int]] = {}  # a thread has a file for each time of recording
    for label, process in zip(process_labels(profile.processes), profile.processes, strict=True):
        for thread in process.threads:
            for first in range(0, thread.num_events, BLOCK_EVENTS):
                block = thread.read(first, min(first + BLOCK_EVENTS, thread.num_events))
                some = select(block, np.isin(block["category"], (Category.WAIT, Category.COMMUNICATION)))
                lasted = np.maximum(some["end"], some["start"]) - some["start"]
                for category, name in np.unique(some[["category", "name"]]).tolist():
                    own = lasted[(some["category"] == category) & (some["name"] == name)]
                    key = label, category, process.name_of(name)
                    count, total, longest = found.get(key, (0, 0, 0))
                    threads.setdefault(key, set()).add(thread.thread_id)
                    found[key] = count + len(own), total + int(own.sum()), max(longest, int(own.max()))
    rows = (
        Wait(label, Category(kind).name.lower(), cause, *sums, len(threads[label, kind, cause]))
        for (label, kind, cause), sums in found.items()
    )
    return sorted(rows, key=lambda each: (-each.total_ns, each.process, each.cause))


def seconds(ns: float) -> str:
    """``1.234 s``, ``12.3 ms``, ``450 us``, ``80 ns``."""
    for limit, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if abs(ns) >= limit * 0.9995:
            return f"{ns / limit:.4g} {unit}"
    return f"{ns:.4g} ns"


def report_text(
    profile: Profile,
    found: Breakdown,
    causes: Sequence[Wait],
    note: str = "",
    path: CriticalPath | None = None,
    run: Extrapolation | None = None,
    advice: Sequence[str] = (),
) -> str:
    """The whole report for a terminal, with a note on its times. Control characters of names are replaced."""
    lines = [f"profile of {command_text(profile)}", *filter(None, [note])]
    for each in recorded(found):
        lines += ["", process_line(found, each.label)]
        lines += [*core_lines(profile, each.label), *gpu_lines(profile, found, each.label)]
        rows = [row for row in found.rows if row.cell.process == each.label]
        lines += _operation_lines(operation_times(rows))
    lines += [
        line
        for each in (silent_processes(profile, found), missing_processes(profile))
        if each
        for line in ("", each)
    ]
    if len(found.processes) > 1:
        lines += ["", "all processes, what several do in one operation at a time counted once"]
        lines += gpu_lines(profile, found, "")
        lines += _operation_lines(operation_times(found.merged))
    lines += _run_lines(run)
    lines += _transition_lines(found)
    lines += _wait_lines(found, causes)
    lines += _path_lines(path)
    lines += ["", "what would help", *(f"  - {each}" for each in advice)] if advice else []
    return "\n".join(printable(line) for line in lines)


def command_text(profile: Profile) -> str:
    """The program with its arguments, cut off where they are very long."""
    return " ".join(profile.command)[:MAX_NAME]


def recorded(found: Breakdown) -> list[ProcessSummary]:
    """Processes of which there is something to show; not those that were forked to replace their program at once."""
    return [
        each
        for each in found.processes
        if each.dropped or each.life_ns >= (_AT_ONCE_NS if each.is_replaced else 1)
    ]


def silent_processes(profile: Profile, found: Breakdown) -> str:
    """How many others there are, and why; empty for none."""
    shown = {each.label for each in recorded(found)}
    labels = process_labels(profile.processes)
    silent = [each for label, each in zip(labels, profile.processes, strict=True) if label not in shown]
    if not silent:
        return ""
    text = f"{len(silent)} of {counted(len(labels), 'process', 'processes')} recorded nothing: "
    if profile.skipped is None:
        return f"{text}killed before any event, or replaced by another program at once"
    return text + iterations_not_reached(silent, profile.skipped)


def iterations_not_reached(processes: Sequence[ProcessTrace], skipped: int) -> str:
    """Why processes recorded nothing where iterations were chosen."""
    made = counted(max(each.iterations for each in processes), "iteration")
    return f"recording begins with iteration {skipped + 1} of a process, and they made at most {made}"


def nothing_of_package(profile: Profile, package: str) -> str:
    """Says that a package was imported, but has no native function to record; empty if it has, or was not imported."""
    counts = [each.intercepted[package] for each in profile.processes if package in each.intercepted]
    if not counts or any(counts):
        return ""
    own = f"_{package}"
    hint = f"; those that it calls may be in {own}: --native {own}" if find_spec(own) is not None else ""
    return f"{package} has no native functions of its own, so only calls by ctypes are recorded of it{hint}"


def missing_processes(profile: Profile) -> str:
    """How many processes could not be read; empty for none."""
    count = counted(profile.undescribed, "process", "processes")
    note = "missing: the disk was full, or they died at their start"
    return f"{count} {note}" if profile.undescribed else ""


def process_line(found: Breakdown, label: str) -> str:
    """Length, threads, and what is missing of one process."""
    (each,) = (each for each in found.processes if each.label == label)
    text = f"{label}: {seconds(each.life_ns)}, {counted(each.threads, 'thread')}"
    if count := num_iterations(row for row in found.rows if row.cell.process == label):
        text += f", {counted(count, 'iteration')}"
    if each.unaccounted_ns:
        text += (
            f"; not recorded: {seconds(each.unaccounted_ns)} ({_share(each.unaccounted_ns, each.life_ns)})"
        )
    if each.is_killed:
        text += (
            "; killed" if each.end_is_known else "; killed, or still running: unknown after its last event"
        )
    if each.dropped:
        text += f"; dropped {counted(each.dropped, 'event')}: {_dropped_note(each)}"
    return text


def _dropped_note(process: ProcessSummary) -> str:
    """What of a process's times is not right since it dropped events."""
    if not process.cut_threads:  # of threads without a file, or recorded by an earlier version
        return "times and counts are incomplete"
    return f"{process.cut_threads} of {counted(process.threads, 'thread')} not recorded from the first of them on"


def core_lines(profile: Profile, label: str) -> list[str]:
    """How many cores a process used on average, and what it had to do without; none if it died while it was recorded."""
    for name, process in zip(process_labels(profile.processes), profile.processes, strict=True):
        wall = process.cores.get("wall_ns", 0)
        if name == label and wall > 0:
            used, queued = (process.cores.get(key, 0) for key in ("cpu_ns", "queue_ns"))
            stolen = process.cores.get("stolen_ns", 0) / wall
            return [
                f"on {used / wall:.2f} cores; threads ready without a core {seconds(queued)}; "
                f"other machines took {stolen:.2f} of the host's cores"
            ]
    return []


def gpu_lines(profile: Profile, found: Breakdown, label: str) -> list[str]:
    """For how long a process used a GPU, beside what NVML calls its utilisation (RL-Scope, figure 8).

    Args:
        profile: the same as ``found``'s
        found: its times
        label: of the process; ``""`` for all together

    Returns:
        One line, or none if nothing ran on a GPU.
    """
    sets = found.totals[label]
    kernels, copies = (
        sum(ns for categories, ns in sets.items() if name in categories)
        for name in ("gpu_kernel", "gpu_copy")
    )
    busy = sum(ns for categories, ns in sets.items() if categories & GPU)
    if not busy:
        return []
    whole = sum(sets.values())
    shares = f"kernels {_share(kernels, whole)}, copies {_share(copies, whole)}"
    labels = process_labels(profile.processes)
    utilization = [
        f"NVML's utilisation of GPU {device} on average {percent:.0f} %"
        for name, process in zip(labels, profile.processes, strict=True)
        for device, percent in process.nvml_utilization.items()
        if name == label
    ]
    return ["; ".join([f"on a GPU for {_share(busy, whole)} of {seconds(whole)} ({shares})", *utilization])]


def _operation_lines(times: Sequence[OperationTime]) -> list[str]:
    columns = largest_sets(times)
    resources = [name for name in RESOURCES if any(each.resource_ns(name) for each in times)]
    whole = sum(each.total_ns for each in times)
    header = ["operation", "time", "share", *resources, *map(set_name, columns)]
    rows = [
        [
            each.name,
            seconds(each.total_ns),
            _share(each.total_ns, whole),
            *(_share(each.resource_ns(name), each.total_ns) for name in resources),
            *(_share(each.sets.get(categories, 0), each.total_ns) for categories in columns),
        ]
        for each in times[:MOST_OPERATIONS]
    ]
    more = [f"  and {note}"] if (note := omitted_operations(times)) else []
    return [*aligned([header, *rows], left=1), *more]


def omitted_operations(times: Sequence[OperationTime]) -> str:
    """How many operations tables leave out, and their time; empty for none."""
    rest = times[MOST_OPERATIONS:]
    return f"{len(rest):,} more: {seconds(sum(each.total_ns for each in rest))}" if rest else ""


def _run_lines(run: Extrapolation | None) -> list[str]:
    return [] if run is None else ["", run_line(run), *aligned([RUN_HEAD, *run_rows(run)], left=1)]


RUN_HEAD = ["operation", "per iteration", "in the run", "95 % within"]


def run_line(run: Extrapolation) -> str:
    """What the times of a run are."""
    few = counted(run.recorded, "recorded iteration")
    return f"the run's {counted(run.iterations, 'iteration')}, as estimated from {few}"


def run_rows(run: Extrapolation) -> list[list[str]]:
    """One row of RUN_HEAD for each operation."""
    return [
        [
            operation_name(each.phase, each.operation),
            seconds(each.iteration_ns),
            seconds(each.run_ns),
            "-" if each.error_ns is None else f"+-{seconds(each.error_ns)}",
        ]
        for each in run.operations[:MOST_OPERATIONS]
    ]


TRANSITION_HEAD = ["operation", "transition", "count", "per iteration"]


def transition_rows(found: Breakdown) -> list[list[str]]:
    """One row of TRANSITION_HEAD for each transition of an operation, of all processes, the most frequent first.

    The last number is the mean of those within iterations.
    """
    counts: Counter[tuple[str, str]] = Counter()
    inside: Counter[tuple[str, str]] = Counter()
    for each, number in found.transitions.items():
        source, target = (set_name(frozenset([label])) for label in (each.source, each.target))
        key = operation_name(each.cell.phase, each.cell.operation), f"{source} -> {target}"
        counts[key] += number
        inside[key] += number if each.cell.iteration != NO_ITERATION else 0
    iterations = num_iterations(found.rows)
    return [
        [*key, f"{count:,}", f"{inside[key] / iterations:,.1f}" if iterations else "-"]
        for key, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]


def _transition_lines(found: Breakdown) -> list[str]:
    rows = transition_rows(found)[:30]
    return ["", "transitions of all processes", *aligned([TRANSITION_HEAD, *rows], left=2)] if rows else []


WAIT_HEAD = ["process", "category", "cause", "count", "threads", "total", "share", "longest"]


def wait_rows(found: Breakdown, causes: Iterable[Wait]) -> list[list[str]]:
    """One row of WAIT_HEAD for each cause."""
    return [
        [
            each.process,
            each.category,
            each.cause,
            f"{each.count:,}",
            f"{each.threads:,}",
            seconds(each.total_ns),
            _share(each.mean_ns, _whole_ns(found, each.process)),
            seconds(each.longest_ns),
        ]
        for each in causes
    ]


def _wait_lines(found: Breakdown, causes: Sequence[Wait]) -> list[str]:
    """Waits of at least ``LEAST_WAIT_SHARE`` of their process's time, and how many others there are."""
    kept = [
        each
        for each in causes
        if each.total_ns > 0 and each.mean_ns >= LEAST_WAIT_SHARE * _whole_ns(found, each.process)
    ][:MOST_WAITS]
    lines = ["", "waits by cause"] if causes else []
    if kept:
        lines += aligned([WAIT_HEAD, *wait_rows(found, kept)], left=3)
    if left_out := len(causes) - len(kept):
        lines.append(f"left out: {counted(left_out, 'shorter cause')}; the page has all")
    return lines


def _whole_ns(found: Breakdown, process: str) -> int:
    return sum(found.totals.get(process, {}).values())


def _path_lines(path: CriticalPath | None) -> list[str]:
    if path is None:
        return []
    return [
        "",
        path_line(path),
        *aligned([["process", "what", "per iteration", "share"], *path_rows(path)[:30]], left=2),
        "",
        "who waits for whom at collectives",
        *aligned([ARRIVAL_HEAD, *arrival_rows(path)], left=1),
    ]


def path_line(path: CriticalPath) -> str:
    """What the critical path is of."""
    count = (
        f"{counted(path.collectives, 'collective')} of {counted(len(path.arrivals), 'process', 'processes')}"
    )
    return f"critical path of {counted(path.iterations, 'iteration')} with {count}"


def path_rows(path: CriticalPath) -> list[list[str]]:
    """Process, what it does, time per iteration, share; the longest first."""
    return [
        [
            each.process or "all",
            each.what or OUTSIDE,
            seconds(each.ns / path.iterations),
            _share(each.ns, path.span_ns),
        ]
        for each in path.parts
    ]


ARRIVAL_HEAD = ["process", "arrives last", "straggler of", "waits an iteration", "others wait for it"]


def arrival_rows(path: CriticalPath) -> list[list[str]]:
    """One row of ARRIVAL_HEAD for each process."""
    return [
        [
            each.process,
            _share(each.last, path.collectives),
            _share(each.straggles, path.iterations),
            seconds(each.waited_ns / path.iterations),
            seconds(each.delayed_ns / path.iterations),
        ]
        for each in path.arrivals
    ]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines with columns of equal width, the first ``left`` ones aligned to the left; long cells are cut off."""
    rows = [[cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 3]}..." for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
