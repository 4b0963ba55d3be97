"""Soft actor-critic (Haarnoja et al. 2018): its definition and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.definition import LearningMetric
from rayagi.algorithms.off_policy_face import (
    BOX_NAMES,
    OFF_POLICY_FIXED,
    OFF_POLICY_METRICS,
    BoxDefinition,
    BoxFace,
)
from rayagi.config.errors import ConfigError
from rayagi.config.learning import positive
from rayagi.config.off_policy import ROBOT_PRESET, OffPolicySpec, temperature_rules


@dataclass(frozen=True, kw_only=True, slots=True)
class SACSpec(OffPolicySpec):
    """Settings of SAC (Haarnoja et al. 2018). learning_rate is that of the policy, and the default of the others."""

    critic_learning_rate: float | None = None
    """Step size of the critics. None: learning_rate."""
    alpha_learning_rate: float | None = None
    """Step size of the logarithm of the temperature. None: learning_rate. 0: the temperature stays at initial_alpha, as in
    the first paper."""
    initial_alpha: float = 1.0
    """First temperature: weight of the entropy beside rewards."""
    target_entropy: float | None = None
    """Entropy that the temperature aims at, in nats, of actions in [-1, 1]. None: minus the number of actions."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every off-policy algorithm, and of the temperature."""
        yield from OffPolicySpec.broken_rules(self, section)
        yield from positive(f"{section}.critic_learning_rate", self.critic_learning_rate)
        yield from temperature_rules(
            section, self.alpha_learning_rate, self.initial_alpha, self.target_entropy
        )


SAC = BoxDefinition(
    name="sac",
    summary="off-policy, maximum entropy, twin critics and a learned temperature (Haarnoja et al. 2018)",
    settings=SACSpec,
    learner="rayagi.algorithms.sac.learner:SACLearner",
    model="rayagi.algorithms.sac.learner:make_model",
    preset={**ROBOT_PRESET, "initial_alpha": 0.1},
    preset_num_envs=8,
    metrics=(
        *OFF_POLICY_METRICS,
        LearningMetric(name="alpha", unit="", help="temperature: weight of the entropy beside rewards"),
    ),
    rllib=BoxFace(
        config="SACConfig",
        algorithm="SAC",
        base="ray.rllib.algorithms.sac.sac:SACConfig",
        names={**BOX_NAMES, "alpha_lr": "alpha_learning_rate"},
        fixed={**OFF_POLICY_FIXED, "twin_q": True},
    ),
)
