"""Runs a program once to measure it: without the profiler, with some kinds of hook, or with others in each iteration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from collectives.errors import counted
from rayagi.profiler import process_tree
from rayagi.profiler.calibration import CalibrationError, count_hooks, kinds_of
from rayagi.profiler.injection import VARIABLE, injected
from rayagi.profiler.intervals import Ints
from rayagi.profiler.layout import ANNOTATION, BLOCKS, HOOKS, Category
from rayagi.profiler.session import create_profile
from rayagi.profiler.trace import ProcessTrace, Profile, TraceError, printable, read_profile

Variant = frozenset[str] | None
"""Kinds of hook that record; None: without the profiler; none of them: it starts, and records nothing."""


@dataclass(frozen=True)
class Run:
    """One run of a program, with all processes that it started.

    Attributes:
        cpu_ns: CPU time
        wall_ns: until the program itself had ended
        counts: how often each kind of hook ran; ``PROCESS``: processes that were recorded
        python: version of the recorded processes
        iterations: of the process that recorded most
    """

    cpu_ns: int
    wall_ns: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    python: str = ""
    iterations: int = 0


@dataclass(frozen=True)
class ProgramRunner:
    """Runs a command. Its output is shown only if it fails; it has no input."""

    program: Sequence[str]
    packages: Mapping[str, Category]
    limit_mb: int

    def __call__(self, hooks: Variant) -> Run:
        """Run it once.

        Raises:
            CalibrationError: it cannot be run, it fails, or events were dropped.
            ProfilerError: there is no space for a profile.
        """
        with tempfile.TemporaryDirectory(prefix="rayagi-profile-") as folder:
            if hooks is None:
                return Run(*self._run(Path(folder), {}))
            times = self._run(Path(folder), self._recording(Path(folder), hooks))
            found = self._profile(Path(folder))
            pythons = (each.python for each in found.processes)
            return Run(*times, count_hooks(found), next(pythons, ""), _most_iterations(found))

    def in_turns(self, variants: Sequence[frozenset[str]], num_rounds: int) -> list[dict[Variant, Run]]:
        """Run it once, each iteration with the next variant: CPU times of iterations, added up to rounds.

        Raises:
            CalibrationError, ProfilerError: as above.
        """
        with tempfile.TemporaryDirectory(prefix="rayagi-profile-") as folder:
            self._run(Path(folder), self._recording(Path(folder), HOOKS, variants))
            return rounds_of(self._profile(Path(folder)), variants, num_rounds)

    def _recording(
        self, folder: Path, hooks: frozenset[str], turns: Sequence[frozenset[str]] = ()
    ) -> dict[str, str]:
        """What to add to the program's environment."""
        path = create_profile(folder / "profile", list(self.program), self.packages)
        changed = injected(os.environ, path, self.packages, None, self.limit_mb, hooks, turns)
        return {name: changed[name] for name in (VARIABLE, "PYTHONPATH")}

    def _run(self, folder: Path, added: Mapping[str, str]) -> tuple[int, int]:
        settings = {
            "program": list(self.program),
            "environment": dict(added),
            "result": str(folder / "result.json"),
        }
        # Isolated, so that it is not recorded itself.
        command = [sys.executable, "-I", "-S", process_tree.__file__, json.dumps(settings)]
        with (folder / "output.txt").open("w+b") as output:
            helper = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            try:
                helper.wait()
            except BaseException:
                helper.terminate()  # it ends the program
                helper.wait()
                raise
        text = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
        try:
            found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CalibrationError(f"{self.program[0]} was not measured: {printable(last)[:300]}") from error
        if "error" in found:
            raise CalibrationError(f"{self.program[0]} cannot be run: {found['error']}")
        if found["code"] != 0:
            raise CalibrationError(
                f"the program ended with exit code {found['code']}, so its runs are not the same work: "
                f"{printable(last)[:300]}"
            )
        return int(found["cpu_ns"]), int(found["wall_ns"])

    def _profile(self, folder: Path) -> Profile:
        profile = read_profile(folder / "profile")
        lost = sum(each.lost + sum(thread.dropped for thread in each.threads) for each in profile.processes)
        if lost:
            raise CalibrationError(
                f"dropped {counted(lost, 'event')}, so what they cost is unknown: give more disk space with --limit-mb, "
                "or a shorter program"
            )
        return profile


def _most_iterations(profile: Profile) -> int:
    iterations = (
        sum(int((thread.events["category"] == Category.ITERATION).sum()) for thread in process.threads)
        for process in profile.processes
    )
    return max(iterations, default=0)


def rounds_of(
    profile: Profile, variants: Sequence[frozenset[str]], num_rounds: int
) -> list[dict[Variant, Run]]:
    """Iterations that took turns, of all processes, added up to rounds; the first variant is the uninstrumented one.

    A process's turns are dealt out to the rounds one by one, so that what changes slowly falls on all of them alike. Each
    round gets as many; incomplete turns, and those left over, do not count.

    Raises:
        CalibrationError: no process had a turn for each round.
        TraceError: a file of blocks is damaged.
    """
    cpu_ns = np.zeros((num_rounds, len(variants)), np.int64)
    counts = {kind: np.zeros_like(cpu_ns) for kind in HOOKS}
    for process in profile.processes:
        blocks = _blocks(process)
        num_turns = len(blocks) // len(variants) // num_rounds * num_rounds
        used = blocks[: num_turns * len(variants)]
        places = used[:, 0] % num_rounds, used[:, 1]
        np.add.at(cpu_ns, places, used[:, 4])
        for kind, number in _counts_in(process, used[:, 2], used[:, 3]).items():
            np.add.at(counts[kind], places, number)
    if not cpu_ns.all():
        raise CalibrationError(
            f"the program's iterations are too few to take turns: fewer than {num_rounds * len(variants)} in each process"
        )
    return [
        {
            variant or None: Run(
                int(cpu_ns[number, place]),
                counts={kind: int(table[number, place]) for kind, table in counts.items() if kind in variant},
            )
            for place, variant in enumerate(variants)
        }
        for number in range(num_rounds)
    ]


def _blocks(process: ProcessTrace) -> NDArray[np.int64]:
    """A process's iterations that took turns. Shape (n, 5): turn, variant, start, end, CPU time, in ns"""
    path = process.path / BLOCKS
    rows: list[list[int]] = []
    if path.is_file():
        # A last line without an end: the process died while it was written.
        *lines, _ = path.read_bytes().split(b"\n")
        try:
            rows = [
                [int(json.loads(line)[name]) for name in ("turn", "variant", "start_ns", "end_ns", "cpu_ns")]
                for line in lines
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path} is damaged: {error}") from error
    return np.array(rows, np.int64).reshape(-1, 5)


def _counts_in(process: ProcessTrace, starts: Ints, ends: Ints) -> dict[str, Ints]:
    """How often each kind of hook ran in each of some disjoint, ascending intervals of time."""
    found = {kind: np.zeros(len(starts), np.int64) for kind in HOOKS}
    for thread in process.threads:
        events = thread.events
        for kind, chosen in kinds_of(events).items():
            times = events["start" if kind == ANNOTATION else "end"][chosen]
            block = np.searchsorted(starts, times, "right") - 1
            inside = block >= 0
            inside[inside] = times[inside] <= ends[block[inside]]
            found[kind] += np.bincount(block[inside], minlength=len(starts))
    return found
