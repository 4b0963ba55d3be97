"""Exports the metrics of any GMI program as Ray metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.gmi import GmiContext, ProgramFactory
from actors.protocols import EvaluationResult, IterationResult, Program, StateDict
from rayagi.monitoring.catalogue import CATALOGUE
from rayagi.monitoring.ray_metrics import Exporter


@dataclass(frozen=True, slots=True)
class ExportingFactory:
    """Builds a program in its GMI and exports its metrics; picklable if ``inner`` is."""

    inner: ProgramFactory
    run: str
    """Value of the tag ``run``."""

    def __call__(self, context: GmiContext) -> ExportingProgram:
        """Build the program in the GMI's process."""
        identity = context.identity
        tags = {
            "run": self.run,
            "task": identity.task,
            "gmi": str(identity.index),
            "slice": identity.slice.label(),
        }
        return ExportingProgram(self.inner(context), Exporter(CATALOGUE, tags))


class ExportingProgram:
    """A program whose metrics are exported after each iteration."""

    def __init__(self, program: Program, exporter: Exporter) -> None:
        self._program, self._exporter = program, exporter

    def iterate(self) -> IterationResult:
        """One iteration of the program."""
        result = self._program.iterate()
        self._exporter.export(result.metrics)
        return result

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """Delegate to the inner program."""
        return self._program.evaluate(num_episodes, seed)

    def state_dict(self) -> StateDict:
        """Delegate to the inner program."""
        return self._program.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Delegate to the inner program."""
        self._program.load_state_dict(state)

    def close(self) -> None:
        """Delegate to the inner program."""
        self._program.close()
