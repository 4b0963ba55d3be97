"""Exports the metrics of any GMI program as Ray metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from actors.gmi import GmiContext, ProgramFactory
from actors.host_memory import memory_metrics
from actors.host_time import ThreadClock
from actors.protocols import IterationResult, Program
from rayagi.monitoring.catalogue import CATALOGUE
from rayagi.monitoring.ray_metrics import Exporter


@dataclass(frozen=True, slots=True)
class ExportingFactory:
    """Builds a program in its GMI and exports its metrics; picklable if ``inner`` is."""

    inner: ProgramFactory
    run: str
    """Value of the tag ``run``."""

    def __call__(self, context: GmiContext) -> Program:
        """Build the program in the GMI's process."""
        identity = context.identity
        tags = {
            "run": self.run,
            "task": identity.task,
            "gmi": str(identity.index),
            "slice": identity.slice.label(),
        }
        exporter = Exporter(CATALOGUE, tags)
        return cast("Program", ExportingProgram(self.inner(context), exporter, context.device))


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
