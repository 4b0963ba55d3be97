"""Program factory of training: which program a GMI runs follows from its roles, whatever the template."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name

from actors.gmi import GmiContext
from actors.protocols import EnvFactory, Program
from rayagi.config.spec import RunSpec
from rayagi.profiler import name_process

_PROGRAMS: dict[tuple[str, ...], str] = {
    ("simulator", "agent", "trainer"): "program:DpOnlyProgram",
    ("simulator", "agent"): "collector:CollectorProgram",
    ("trainer",): "learning:LearnerProgram",
    ("simulator",): "stepwise:SimulatorProgram",
    ("agent", "trainer"): "stepwise:AgentTrainerProgram",
    ("agent",): "stepwise:AgentProgram",
    ("replay", "agent", "trainer"): "offline_program:OfflineProgram",
}
"""Program by the roles of a GMI; imported where it is built, since each needs other packages."""


@dataclass(frozen=True, slots=True)
class TrainingFactory:
    """Implements actors.gmi.ProgramFactory. Picklable: carries the RunSpec to the GMI's process and builds there."""

    spec: RunSpec
    make_env: EnvFactory

    def __call__(self, context: GmiContext) -> Program:
        """Build the program of this GMI's roles on its slice."""
        identity = context.identity
        build = resolve_name(f"rayagi.algorithms.{_PROGRAMS[identity.roles]}")
        name_process(f"GMI {identity.index}: {', '.join(identity.roles)}")
        program: Program = build(self.spec, self.make_env, context)
        return program


def training_factory(spec: RunSpec) -> TrainingFactory:
    """The programs of a run on the spec's own environment."""
    return TrainingFactory(spec, spec.env.factory())
