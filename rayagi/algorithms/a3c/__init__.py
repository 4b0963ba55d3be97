"""A3C (Mnih et al. 2016): its definition and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.definition import (
    ONE_PASS_NAMES,
    AlgorithmDefinition,
    RllibFace,
)
from rayagi.config.errors import ConfigError
from rayagi.config.learning import ONE_PASS_PRESET, LearningSpec, OnePassSpec


@dataclass(frozen=True, kw_only=True)
class A3CSpec(OnePassSpec):
    """Settings of A3C: each GMI steps the shared parameters on its own rollout (Mnih et al. 2016, algorithm S3)."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every algorithm, and of one step per rollout."""
        yield from LearningSpec.broken_rules(self, section)
        yield from self.one_pass_rules(section)


A3C = AlgorithmDefinition(
    name="a3c",
    summary="asynchronous gradients on shared parameters (Mnih et al. 2016)",
    settings=A3CSpec,
    templates=("dp_only",),
    learner="rayagi.algorithms.a3c.learner:A3CLearner",
    preset={**ONE_PASS_PRESET, "learning_rate": 3e-4},
    rllib=RllibFace(
        config="A3CConfig",
        algorithm="A3C",
        names=ONE_PASS_NAMES,
    ),
)
