"""Whole runs of a program, with and without the profiler, and the CPU time that they took (RL-Scope, appendix C.1).

CPU time is that of the program and of all processes that it starts, also of those that outlive their parent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import mean

import numpy as np

from rayagi.profiler import supervisor
from rayagi.profiler.calibration import ANNOTATION, ANNOTATIONS, CALL, CALLS, Block
from rayagi.profiler.errors import ProfilerError
from rayagi.profiler.injection import injected
from rayagi.profiler.layout import Category
from rayagi.profiler.overlap import BLOCK_EVENTS
from rayagi.profiler.session import create_profile
from rayagi.profiler.trace import Profile, read_profile

_LAST_LINES = 5


class Mode(StrEnum):
    """How much of the profiler a run has."""

    PLAIN = "plain"
    READY = "ready"
    """Everything is intercepted, and nothing recorded."""
    CALLS = "calls"
    """Native calls are recorded, annotations are not."""
    ALL = "all"


@dataclass(frozen=True)
class Run:
    """One run of a program.

    Attributes:
        mode: of it
        cpu_ns: CPU time of all its processes
        wall_ns: from its start to its end
        counts: of events by kind of hook; empty unless it was recorded
    """

    mode: Mode
    cpu_ns: int
    wall_ns: int
    counts: Mapping[str, int]

    @property
    def block(self) -> Block:
        """For ``delta_calibration``, in which runs that record nothing are the uninstrumented ones."""
        return Block(self.cpu_ns, self.counts)


class RunError(ProfilerError):
    """A run of the program says nothing about the profiler's cost."""


def rounds(
    program: Sequence[str], packages: Mapping[str, Category], modes: Sequence[Mode], limit_mb: int
) -> Iterator[list[tuple[Run, Profile | None]]]:
    """Run the program once in each mode, again and again; every round begins with another mode.

    A profile, of a run that records, is on disk until the next step.

    Raises:
        RunError: it cannot be run, fails, records nothing, or more than fits.
    """
    number = 0
    while True:
        at = number % len(modes)
        number += 1
        with tempfile.TemporaryDirectory(prefix="rayagi-profile-") as folder:
            yield [
                _run(program, packages, mode, Path(folder) / mode, limit_mb)
                for mode in (*modes[at:], *modes[:at])
            ]


def _run(
    program: Sequence[str], packages: Mapping[str, Category], mode: Mode, folder: Path, limit_mb: int
) -> tuple[Run, Profile | None]:
    environment = dict(os.environ)
    if mode is not Mode.PLAIN:
        create_profile(folder, list(program), packages)
        environment = injected(
            os.environ,
            folder,
            packages,
            None,
            limit_mb,
            annotations=mode is Mode.ALL,
            record=mode is not Mode.READY,
        )
    cpu_ns, wall_ns = _timed(program, environment, mode)
    if mode in (Mode.PLAIN, Mode.READY):
        return Run(mode, cpu_ns, wall_ns, {}), None
    profile = read_profile(folder)
    if lost := sum(
        process.lost + sum(each.dropped for each in process.threads) for process in profile.processes
    ):
        raise RunError(
            f"{lost:,} events did not fit: calibrate a shorter run of it, or with a larger --limit-mb"
        )
    counts = count_hooks(profile)
    if not counts[CALL]:
        raise RunError(
            f"{program[0]} called nothing that is intercepted, so there is no cost to measure; see `rayagi profile --help`"
        )
    if mode is Mode.CALLS or not counts[ANNOTATION]:
        counts = {CALL: counts[CALL]}
    return Run(mode, cpu_ns, wall_ns, counts), profile


def count_hooks(profile: Profile) -> dict[str, int]:
    """Events of each kind of hook."""
    counts = {CALL: 0, ANNOTATION: 0}
    for process in profile.processes:
        for thread in process.threads:
            for first in range(0, thread.num_events, BLOCK_EVENTS):
                found = thread.read(first, min(first + BLOCK_EVENTS, thread.num_events))["category"]
                counts[CALL] += int(np.isin(found, CALLS).sum())
                counts[ANNOTATION] += int(np.isin(found, ANNOTATIONS).sum())
    return counts


def setup_ns(runs: Sequence[Run]) -> float:
    """CPU time of intercepting everything: what runs in which nothing is recorded take longer than plain ones."""
    ready, plain = ([run.cpu_ns for run in runs if run.mode is mode] for mode in (Mode.READY, Mode.PLAIN))
    return max(0.0, mean(ready) - mean(plain))


def _timed(program: Sequence[str], environment: Mapping[str, str], mode: Mode) -> tuple[int, int]:
    """CPU and wall-clock time in ns of a run.

    Raises:
        RunError: it cannot be run, or fails.
    """
    read, write = os.pipe()
    with tempfile.TemporaryFile() as output, os.fdopen(read, "rb") as answer:
        command = [sys.executable, "-I", supervisor.__file__, str(write), *program]
        child = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
            start_new_session=True,
        )
        os.close(write)
        try:
            child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        found = json.loads(answer.read() or b"{}")
        if reason := found.get("error", "" if found else "its supervisor was killed"):
            raise RunError(f"{program[0]} cannot be run: {reason}")
        if found["code"]:
            output.seek(0)
            last = output.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
            raise RunError(
                f"the program ended with {found['code']} in mode {mode}; its last lines: {' | '.join(last) or 'none'}"
            )
    return found["cpu_ns"], found["wall_ns"]
