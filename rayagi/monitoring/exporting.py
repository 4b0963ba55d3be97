"""Exports the metrics of any GMI program as Ray metrics, with what its thread waited for on the host."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from typing import Any, Self, cast

import torch

from actors.gmi import GmiContext, ProgramFactory
from actors.host_memory import memory_metrics
from actors.protocols import IterationResult, Program
from rayagi.monitoring.catalogue import CATALOGUE
from rayagi.monitoring.ray_metrics import Exporter


def exporting(inner: ProgramFactory, run: str, context: GmiContext) -> Program:
    """Build a program in its GMI, with its metrics exported; ``run``: value of the tag of that name."""
    identity = context.identity
    tags = {"run": run, "task": identity.task, "gmi": str(identity.index), "slice": identity.slice.label()}
    return cast("Program", ExportingProgram(inner(context), Exporter(CATALOGUE, tags), context.device))


class ExportingProgram:
    """A program whose metrics are exported after each iteration; all else is the inner program's."""

    def __init__(self, program: Program, exporter: Exporter, device: torch.device) -> None:
        self._program, self._exporter, self._device = program, exporter, device

    def iterate(self) -> IterationResult:
        """One iteration of the program, with what its thread waited for on the host, and memory that its process holds."""
        with ThreadClock() as clock:
            result = self._program.iterate()
            result.metrics.update(clock.lap())
        result.metrics.update(memory_metrics(self._device))
        self._exporter.export(result.metrics)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


class ThreadClock:
    """What the thread that opens it waits for beside its own work: a core that others use, pages from disk.

    By intervals. Reads two counters of the kernel: 2 us each time.
    """

    def __enter__(self) -> Self:
        """Begin the first interval."""
        self._file: int | None = None
        with suppress(OSError):  # a kernel without CONFIG_SCHED_INFO, or no /proc
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._last = self._read()
        return self

    def __exit__(self, *error: object) -> None:
        """Close the counters."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def lap(self) -> dict[str, float]:
        """Metrics ``queue_s`` and ``major_faults`` since the last call; no ``queue_s`` where the kernel does not count."""
        before, self._last = self._last, self._read()
        return {name: value - before[name] for name, value in self._last.items()}

    def _read(self) -> dict[str, float]:
        counts = {"major_faults": float(resource.getrusage(resource.RUSAGE_THREAD).ru_majflt)}
        if self._file is not None:
            # nanoseconds on a core, nanoseconds runnable without one, number of time slices
            counts["queue_s"] = int(os.pread(self._file, 100, 0).split()[1]) * 1e-9
        return counts
