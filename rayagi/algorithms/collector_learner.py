"""Program factory of the templates with separate collectors and learners, ``ea_t`` and ``decoupled``."""

from __future__ import annotations

from dataclasses import dataclass

from actors.gmi import GmiContext
from actors.protocols import EnvFactory
from rayagi.algorithms.collector import CollectorProgram
from rayagi.algorithms.learning import LearnerProgram
from rayagi.config.spec import RunSpec
from rayagi.envs import make_env_factory


@dataclass(frozen=True, slots=True)
class CollectorLearnerFactory:
    """Picklable: carries the RunSpec to the GMI's process and builds the program of its roles there."""

    spec: RunSpec
    make_env: EnvFactory

    def __call__(self, context: GmiContext) -> CollectorProgram | LearnerProgram:
        """Build a collector, or a learner, on this GMI's slice."""
        if "simulator" in context.identity.roles:
            return CollectorProgram(self.spec, self.make_env, context)
        return LearnerProgram(self.spec, self.make_env, context)


def collector_learner_factory(spec: RunSpec) -> CollectorLearnerFactory:
    """The programs of a run on the spec's own environment."""
    env = spec.env
    return CollectorLearnerFactory(spec, make_env_factory(env.id, engine=env.engine, kwargs=dict(env.kwargs)))
