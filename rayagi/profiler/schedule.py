"""Which iterations are recorded, and with which hooks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rayagi.profiler.layout import BLOCKS
from rayagi.profiler.native import OFF, RECORD, WARM_UP


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Cycles of iterations: skipped, then warming up, then recorded.

    An iteration that warms up does all work of recording, but nothing is kept. With a schedule nothing is recorded before
    the first iteration, nor in processes without iterations.

    Raises:
        ValueError: a count out of range.
    """

    skip: int = 0
    warm_up: int = 1
    record: int = 10
    repeat: int = 1
    """Number of cycles. Nothing is recorded after the last."""

    def __post_init__(self) -> None:
        for name, least in (("skip", 0), ("warm_up", 0), ("record", 1), ("repeat", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} of a profile's schedule is an integer >= {least}, not {value!r}")

    def mode(self, iteration: int) -> int:
        """OFF, WARM_UP or RECORD for an iteration, counted from 0."""
        cycle, position = divmod(iteration, self.skip + self.warm_up + self.record)
        if cycle >= self.repeat or position < self.skip:
            return OFF
        return WARM_UP if position < self.skip + self.warm_up else RECORD


SKIPPED_TURNS = 2
"""Iterations before the first turn: torch and kernels start up."""


class Turns:
    """Records each iteration with the next of several sets of hooks, and measures its CPU time.

    Every other turn is in reverse order, so that what changes slowly falls on all of them alike. One line for each
    iteration is written at its end: Ray kills its workers.
    """

    def __init__(self, variants: Sequence[frozenset[str]]) -> None:
        self.variants = tuple(variants)
        self._start = 0, 0

    def hooks(self, iteration: int) -> frozenset[str]:
        """Those of an iteration, counted from 0."""
        return self.variants[self._position(iteration)]

    def begin(self) -> None:
        """After the hooks have been changed."""
        self._start = time.monotonic_ns(), time.process_time_ns()

    def end(self, iteration: int, folder: Path) -> None:
        """Before they are changed again. A full disk ends the measurement, not the program."""
        cpu_ns, end_ns = time.process_time_ns() - self._start[1], time.monotonic_ns()
        if iteration < SKIPPED_TURNS:
            return
        block = {
            "turn": (iteration - SKIPPED_TURNS) // len(self.variants),
            "variant": self._position(iteration),
            "start_ns": self._start[0],
            "end_ns": end_ns,
            "cpu_ns": cpu_ns,
        }
        with suppress(OSError), (folder / BLOCKS).open("ab") as file:
            file.write(json.dumps(block).encode() + b"\n")

    def _position(self, iteration: int) -> int:
        turn, position = divmod(iteration - SKIPPED_TURNS, len(self.variants))
        return position if turn % 2 == 0 else len(self.variants) - 1 - position
