"""Runs inside GMIs: one training program per case, built once, which then take turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.gmi import GmiContext
from actors.protocols import StateDict
from experiments.ablation.mechanisms import CASES
from experiments.cores import stolen_seconds, used_seconds
from rayagi.algorithms.factory import training_factory
from rayagi.config.spec import RunSpec
from rayagi.programs import GmiProgram

TRAINED_ITERATIONS = 5
"""Before the state from which turns start."""
PHASES = ("simulate_s", "act_s", "update_s", "sync_s")


class NotOffError(RuntimeError):
    """A mechanism was on where it should have been off."""


@dataclass(frozen=True)
class TurnsFactory:
    """Builds the programs of some cases in a GMI's process; picklable."""

    spec: RunSpec
    cases: tuple[str, ...]

    def __call__(self, context: GmiContext) -> Turns:
        """Build them on this GMI's slice."""
        return Turns(context, self.spec, self.cases)


class Turns(GmiProgram):
    """Training programs that differ in one mechanism, in one process and on one slice."""

    def __init__(self, context: GmiContext, spec: RunSpec, cases: Sequence[str]) -> None:
        """Build each case's program, run an iteration, and check that its mechanism is off.

        Raises:
            NotOffError: it is not.
        """
        super().__init__(context)
        self._programs = {}
        self.first: dict[str, Mapping[str, float]] = {}
        for name in cases:
            with CASES[name].off():
                program = training_factory(spec)(context)
                self.first[name] = program.iterate().metrics
                if not CASES[name].is_off(program):
                    raise NotOffError(name)
            self._programs[name] = program
        self._start = self._trained_state(cases[0])

    def _trained_state(self, case: str) -> StateDict:
        program = self._programs[case]
        with CASES[case].off():
            for _ in range(TRAINED_ITERATIONS):
                program.iterate()
        return program.state_dict()

    def gmi_run(self, case: str, iterations: int) -> dict[str, Any]:
        """Train for so many iterations from the same state in every turn, so that all turns simulate alike.

        One iteration is not counted: before it, the caches hold another case's data.
        """
        program = self._programs[case]
        with CASES[case].off():
            program.load_state_dict(self._start)
            self.context.communicator.barrier()
            program.iterate()
            began, cpu_s = time.perf_counter(), -time.process_time()
            used_s, stolen_s = -used_seconds(), -stolen_seconds()
            results = [program.iterate().metrics for _ in range(iterations)]
            seconds = time.perf_counter() - began
            cpu_s += time.process_time()
            used_s, stolen_s = used_s + used_seconds(), stolen_s + stolen_seconds()
            if not CASES[case].is_off(program):
                raise NotOffError(case)
        return {
            "seconds": seconds,
            "cpu_s": cpu_s,
            "used_s": used_s,
            "stolen_s": stolen_s,
            "env_steps": sum(metrics["env_steps"] for metrics in results),
            **{phase: sum(metrics[phase] for metrics in results) / iterations for phase in PHASES},
            "first_policy_loss": self.first[case]["policy_loss"],
            "first_grad_norm": self.first[case]["grad_norm"],
        }

    def close(self) -> None:
        """Release the simulators."""
        for program in self._programs.values():
            program.close()
