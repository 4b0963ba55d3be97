"""``rayagi profile validate``: are times right once the profiler's cost is subtracted? (RL-Scope, figure 11)"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from rayagi.cli.failures import UsageError
from rayagi.cli.output import say
from rayagi.cli.profile_calibrate import by_mode, program_of
from rayagi.profiler.calibration import corrected
from rayagi.profiler.calibration_store import StoredCalibration, find, program_key
from rayagi.profiler.interception import packages_with
from rayagi.profiler.overlap import Breakdown, breakdown
from rayagi.profiler.program_runs import Mode, Run, rounds
from rayagi.profiler.summary import aligned, seconds
from rayagi.profiler.trace import Profile
from rayagi.run.atomic import replace_text


@dataclass(frozen=True)
class Validation:
    """Plain and instrumented runs by turns, and what is left once the profiler's cost is subtracted.

    Attributes:
        plain: CPU times in ns
        instrumented: CPU times in ns
        corrected: CPU times in ns without the profiler's
        plain_wall, instrumented_wall, corrected_wall: wall-clock times in ns; corrected by what the report removes from
            the process of which it removes most
    """

    plain: tuple[float, ...]
    instrumented: tuple[float, ...]
    corrected: tuple[float, ...]
    plain_wall: tuple[float, ...]
    instrumented_wall: tuple[float, ...]
    corrected_wall: tuple[float, ...]


def run(arguments: argparse.Namespace) -> int:
    """Compare plain, instrumented and corrected times; returns the exit code.

    Raises:
        UsageError: no program, or none that was calibrated here.
        ProfilerError: it cannot be run, fails, or records nothing; the result cannot be written.
    """
    program = program_of(arguments, "validate")
    stored = find(program_key(program, Path.cwd()))
    if stored is None:
        raise UsageError(
            "this program was not calibrated here: rayagi profile calibrate -- " + " ".join(program)
        )
    plain: list[Run] = []
    instrumented: list[Run] = []
    removed: list[float] = []
    modes = (Mode.PLAIN, Mode.ALL)
    for done, results in enumerate(
        rounds(program, packages_with(arguments.simulator), modes, arguments.limit_mb), 1
    ):
        for run, profile in results:
            (plain if run.mode is Mode.PLAIN else instrumented).append(run)
            if profile is not None:
                removed.append(removed_ns(profile, stored))
        say(f"round {done} of {arguments.rounds}: CPU time " + by_mode([run for run, _ in results]))
        if done == arguments.rounds:
            break
    found = Validation(
        tuple(run.cpu_ns for run in plain),
        tuple(run.cpu_ns for run in instrumented),
        tuple(corrected_cpu_ns(run, stored) for run in instrumented),
        tuple(run.wall_ns for run in plain),
        tuple(run.wall_ns for run in instrumented),
        tuple(run.wall_ns - ns - stored.setup_ns for run, ns in zip(instrumented, removed, strict=True)),
    )
    print("\n".join(validation_lines(found)))
    if arguments.json is not None:
        about = {"command": program, "calibration": stored.text, "validation": vars(found)}
        replace_text(arguments.json, json.dumps(about, indent=1) + "\n")
    return 0


def corrected_cpu_ns(run: Run, stored: StoredCalibration) -> float:
    """CPU time less the costs of all its hooks, and of intercepting everything."""
    hooks = sum(stored.costs.hooks.get(kind, 0.0) * count for kind, count in run.counts.items())
    return run.cpu_ns - hooks - stored.setup_ns


def removed_ns(profile: Profile, stored: StoredCalibration) -> float:
    """What a report removes from the process of which it removes most."""
    before, after = _by_process(breakdown(profile)), _by_process(corrected(profile, stored.costs))
    return max((ns - after.get(label, 0) for label, ns in before.items()), default=0)


def _by_process(found: Breakdown) -> dict[str, int]:
    return {label: sum(sets.values()) for label, sets in found.totals.items() if label}


def validation_lines(found: Validation) -> list[str]:
    """A table of means, their spread, and the errors."""
    rows = []
    for name, plain, *others in (
        ("CPU time", found.plain, found.instrumented, found.corrected),
        ("wall-clock time", found.plain_wall, found.instrumented_wall, found.corrected_wall),
    ):
        cells = [_with_spread(plain)]
        for each in others:
            cells += [_with_spread(each), f"{100 * (mean(each) / mean(plain) - 1):+.1f} %"]
        rows.append([name, *cells])
    head = ["", "uninstrumented", "instrumented", "error", "corrected", "error"]
    return aligned([head, *rows], left=1)


def _with_spread(values: Sequence[float]) -> str:
    spread = f" +- {stdev(values) / mean(values):.1%}" if len(values) > 1 else ""
    return seconds(mean(values)) + spread
