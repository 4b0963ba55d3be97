"""``rayagi comm bench``: measures compositions of collectives on this machine, and compares the cost models with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from shlex import quote

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from collectives.compositions import KNOWN_NAMES, is_composition_name
from collectives.errors import CommunicatorError, CompositionError
from collectives.layout import Layout
from placement.errors import counted
from placement.inventory import local_machine
from placement.types import Machine
from rayagi.benchmark.bench import (
    BeforeEach,
    BenchmarkRequest,
    Start,
    make_case,
    measure_all,
    on_this_machine,
)
from rayagi.benchmark.measure import BenchmarkCase, BenchmarkError, LayoutMeasurement, StoppedError
from rayagi.benchmark.results import fitted, profile_of, rows_of, table, to_dict
from rayagi.cli.failures import INTERRUPTED, UsageError
from rayagi.cli.output import complain, say, throttled
from rayagi.profiler.machine import cpu_model
from rayagi.run.atomic import replace_json
from rayagi.run.errors import disk_errors
from rayagi.run.interrupt import Interrupt
from rayagi.run.quantities import bytes_text, duration_text
from rayagi.run.versions import collect_versions

MOST_PER_CORE = 8
"""Processes per core beyond which a benchmark measures mostly the scheduler."""
_PLAIN_EVERY_S = 5.0
"""Minimum time between two lines of progress if the output is not a terminal."""


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write the results; returns the exit code.

    Raises:
        UsageError, LayoutError, CompositionError: the request cannot be measured here.
        WrongResultError: a composition reduced wrongly.
        CommunicatorError, BenchmarkError: a member is lost.
        DiskError: the results cannot be written.
    """
    machine = local_machine()
    request = _request(arguments, machine)
    start: Start = on_this_machine
    if arguments.ray is not None:
        # Imported here: Ray takes a second, and is not needed on one machine.
        from rayagi.benchmark.on_ray import on_cluster

        start = on_cluster(arguments.ray)
    folder = arguments.out or Path("runs") / f"comm-{datetime.now():%Y%m%d-%H%M%S}"
    profile_at = arguments.profile_out or folder / "profile.json"
    is_new = not folder.exists()
    for path in (profile_at, folder / "results.json", folder / "cost_model.png"):  # fail before measuring
        if path.is_dir():
            raise UsageError(
                f"{path} is a folder, and a file is written there; name another --out or --profile-out"
            )
    for path in (folder, profile_at.parent):
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
    found: list[LayoutMeasurement] = []
    try:
        stopped_by = _measured(request, start, found)
        if any(measurement.points for measurement in found):
            _report(found, folder, profile_at, machine)
    except (BenchmarkError, CommunicatorError) as error:
        if any(measurement.points for measurement in found):
            _report(found, folder, profile_at, machine)
            error.add_note("The measurements before that are kept.")
        raise
    finally:
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # only if it is empty
    if not stopped_by:
        return 0
    complain(f"rayagi: stopped early by {stopped_by}; the measurements so far are kept")
    return INTERRUPTED


def _request(arguments: argparse.Namespace, machine: Machine) -> BenchmarkRequest:
    """Validate the arguments."""
    for name in arguments.compositions:
        if not is_composition_name(name):
            raise CompositionError(
                name, " ".join(arguments.layouts), f"there is no such composition; there are {KNOWN_NAMES}"
            )
    for nbytes in arguments.sizes:
        if nbytes % 4:
            raise UsageError(f"--sizes {nbytes}: float32 elements take 4 bytes each")
    with_gpus = machine if arguments.ray is None else None
    cases = tuple(
        make_case(Layout.parse(text), arguments.compositions, with_gpus) for text in arguments.layouts
    )
    for case in cases:
        _refuse(case, machine, max(arguments.sizes), arguments.ray is not None)
    return BenchmarkRequest(
        cases=cases,
        sizes=tuple(sorted(set(arguments.sizes))),
        repeats=arguments.repeats,
        time_s=arguments.time,
    )


def _refuse(case: BenchmarkCase, machine: Machine, nbytes: int, elsewhere: bool) -> None:
    """UsageError for a layout of one GMI, or one that needs more cores or memory than this machine has."""
    layout, size = case.layout, case.layout.world_size
    if size == 1:
        raise UsageError(f"layout {layout}: a single GMI has nothing to reduce")
    if elsewhere:
        return
    most = MOST_PER_CORE * machine.num_cores
    if size > most and not case.gpus:
        raise UsageError(
            f"layout {layout}: {counted(size, 'process', 'processes')} on "
            f"{counted(machine.num_cores, 'core')} would measure mostly the scheduler; use at "
            f"most {most} here. `rayagi comm plan --layout {layout}` projects the cost without starting any"
        )
    needed = size * nbytes * (len(case.compositions) + 1)
    available = sum(node.memory_total_bytes for node in machine.nodes) // 2
    if needed > available:
        raise UsageError(
            f"layout {layout} with {bytes_text(nbytes)}: {counted(size, 'process', 'processes')} with "
            f"{counted(len(case.compositions), 'composition')} "
            f"need {bytes_text(needed)} of buffers, more than half of this machine's memory; "
            "measure smaller --sizes or fewer --compositions"
        )


def _measured(request: BenchmarkRequest, start: Start, found: list[LayoutMeasurement]) -> str:
    """Append the measurements to ``found``; returns the reason of an early end, empty if they are complete."""
    interrupt = Interrupt(lambda: complain("\nrayagi: ending; Ctrl-C once more quits at once"))
    with interrupt, _progress(request) as shown:

        def before_each(done: int, total: int, text: str) -> None:
            if interrupt.requested:
                raise StoppedError
            shown(done, total, text)

        complete = measure_all(request, start, before_each, found)
    return "" if complete else interrupt.reason


@contextmanager
def _progress(request: BenchmarkRequest) -> Iterator[BeforeEach]:
    """A progress bar on a terminal, else a line every few seconds; on standard error, so that the table can be piped."""
    say(
        f"timing {', '.join(str(case.layout) for case in request.cases)} with "
        f"{', '.join(f'{nbytes:,}' for nbytes in request.sizes)} bytes for about {duration_text(request.time_s)}, "
        "after processes have started and every composition is checked against a float64 sum"
    )
    console = Console(stderr=True)
    if not console.is_terminal:

        def show_line(done: int, total: int, text: str) -> None:
            print(f"{done} of {total} timings; next: {text}", file=sys.stderr, flush=True)

        yield throttled(show_line, _PLAIN_EVERY_S, at_once=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


def _report(found: Sequence[LayoutMeasurement], folder: Path, profile_at: Path, machine: Machine) -> None:
    """Print the table; write results.json, the profile and cost_model.png."""
    profile = profile_of(found, f"{cpu_model()}, {counted(machine.num_cores, 'core')}")
    model = fitted(profile)
    rows = rows_of(found, model)
    say(f"\n{table(found, rows, machine.num_cores)}")
    written = []
    if rows:
        header = {"origin": collect_versions(), "model": model.origin if model else None}
        written.append(folder / "results.json")
        replace_json(written[-1], to_dict(found, rows, header))
    written.append(profile_at)
    with disk_errors(profile_at):
        profile.save(profile_at)
    if rows:
        # Imported here: matplotlib loads slowly, and is needed only at the end.
        from rayagi.benchmark.plots import save_plot

        written.append(folder / "cost_model.png")
        save_plot(rows, written[-1])
    layout = found[-1].case.layout
    say(
        f"\nalpha-beta: {model.origin if model else 'too few measurements'}\nwritten: {', '.join(map(str, written))}\n"
        f"Next:\n  rayagi comm plan --layout '{layout}' --profile {quote(str(profile_at))}"
    )
