"""Puts the metrics of every GMI's program into Ray's export, whatever the program is."""

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
    """Builds a program in its GMI and exports what its iterations measure; picklable if ``inner`` is."""

    inner: ProgramFactory
    run: str
    """Name of the run, for the tag of that name."""

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
    """A program whose iterations are exported."""

    def __init__(self, program: Program, exporter: Exporter) -> None:
        self._program, self._exporter = program, exporter

    def iterate(self) -> IterationResult:
        """One iteration of the program."""
        result = self._program.iterate()
        self._exporter.export(result.metrics)
        return result

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """As the program does."""
        return self._program.evaluate(num_episodes, seed)

    def state_dict(self) -> StateDict:
        """As the program does."""
        return self._program.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the program does."""
        self._program.load_state_dict(state)

    def close(self) -> None:
        """As the program does."""
        self._program.close()
