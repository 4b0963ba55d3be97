"""TD3 with behaviour cloning (Fujimoto and Gu 2021): its definition and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.definition import (
    INSTEAD_OF_RLLIBS_DATA,
    OFFLINE_NAMES,
    AlgorithmDefinition,
    LearningMetric,
    RllibFace,
)
from rayagi.algorithms.off_policy_face import refuse_networks, refuse_unfit_box
from rayagi.config.errors import ConfigError
from rayagi.config.learning import at_least_one, positive
from rayagi.config.off_policy import OFF_POLICY_NETWORK
from rayagi.config.offline import OFFLINE_PRESET, OfflineSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TD3BCSpec(OfflineSpec):
    """Settings of TD3+BC. Defaults are the paper's (table 2). Actions are in [-1, 1] throughout."""

    alpha: float = 2.5
    """Weight of the critic against cloning, divided by the batch's mean of |Q|; 0: behaviour cloning."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target policy's actions."""
    target_noise_clip: float = 0.5
    """That noise is clipped to [-target_noise_clip, target_noise_clip]."""
    policy_delay: int = 2
    """Steps of the critics for each step of the policy and of the targets."""
    tau: float = 0.005
    """Polyak averaging of the target networks, with each step of the policy: target += tau (network - target)."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every offline algorithm, of the noise and of the delay."""
        yield from OfflineSpec.broken_rules(self, section)
        for name in ("alpha", "target_noise", "target_noise_clip"):
            yield from positive(f"{section}.{name}", getattr(self, name), zero=True)
        yield from at_least_one(f"{section}.policy_delay", self.policy_delay)
        if not 0 < self.tau <= 1:
            yield ConfigError(f"{section}.tau", self.tau, "must be greater than 0 and at most 1")


TD3_BC = AlgorithmDefinition(
    name="td3_bc",
    summary="offline, TD3 with behaviour cloning (Fujimoto and Gu 2021)",
    settings=TD3BCSpec,
    templates=("offline",),
    learner="rayagi.algorithms.td3_bc.learner:TD3BCLearner",
    model="rayagi.algorithms.td3_bc.learner:make_model",
    unfit_network=refuse_networks,
    unfit_env=refuse_unfit_box,
    preset=OFFLINE_PRESET,
    preset_network=OFF_POLICY_NETWORK,
    metrics=(
        LearningMetric(
            name="cloning_loss", unit="", help="mean squared error of the policy's actions in [-1, 1]"
        ),
        LearningMetric(name="q_of_policy", unit="", help="first critic's value of the policy's actions"),
    ),
    rllib=RllibFace(
        config="TD3BCConfig",
        algorithm="TD3BC",
        names=OFFLINE_NAMES,
        instead=INSTEAD_OF_RLLIBS_DATA,
    ),
)
