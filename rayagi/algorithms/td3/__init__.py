"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018): its definition and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.off_policy_face import BATCH_CONVERSION, BoxDefinition, BoxFace
from rayagi.config.errors import ConfigError
from rayagi.config.learning import at_least_one, positive
from rayagi.config.off_policy import ROBOT_PRESET, OffPolicySpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TD3Spec(OffPolicySpec):
    """Settings of TD3 (Fujimoto et al. 2018). learning_rate is the policy's. Actions are in [-1, 1] throughout."""

    critic_learning_rate: float | None = None
    """Step size of the critics. None: learning_rate."""
    exploration_noise: float = 0.1
    """Standard deviation of the noise on actions that are taken."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target policy's actions (section 5.3)."""
    target_noise_clip: float = 0.5
    """That noise is clipped to [-target_noise_clip, target_noise_clip]."""
    policy_delay: int = 2
    """Steps of the critics for each step of the policy and of the targets (section 5.2)."""
    cloning: float = 0.0
    """Weight of a cloning term in the policy's loss, as of TD3+BC, when the run begins (Beeson and Montana 2022); 0: none.
    0.4 is TD3+BC's alpha of 2.5."""
    cloning_end: float = 0.2
    """Weight of the cloning term after cloning_steps; it decays exponentially."""
    cloning_steps: int = 50_000
    """Environment steps from cloning to cloning_end."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every off-policy algorithm, of the noises, of the delay and of cloning."""
        yield from OffPolicySpec.broken_rules(self, section)
        yield from positive(f"{section}.critic_learning_rate", self.critic_learning_rate)
        yield from positive(f"{section}.exploration_noise", self.exploration_noise)
        yield from positive(f"{section}.target_noise", self.target_noise, zero=True)
        yield from positive(f"{section}.target_noise_clip", self.target_noise_clip, zero=True)
        yield from at_least_one(f"{section}.policy_delay", self.policy_delay)
        yield from positive(f"{section}.cloning", self.cloning, zero=True)
        yield from positive(f"{section}.cloning_end", self.cloning_end)
        yield from at_least_one(f"{section}.cloning_steps", self.cloning_steps)
        if 0 < self.cloning < self.cloning_end:
            reason = f"is more than {section}.cloning = {self.cloning:g}, from which it decays"
            yield ConfigError(
                f"{section}.cloning_end", self.cloning_end, reason, f"use at most {self.cloning:g}"
            )


TD3 = BoxDefinition(
    name="td3",
    summary="off-policy, deterministic policy, delayed and smoothed against twin critics (Fujimoto et al. 2018)",
    settings=TD3Spec,
    learner="rayagi.algorithms.td3.learner:TD3Learner",
    model="rayagi.algorithms.td3.learner:make_model",
    preset=ROBOT_PRESET,
    preset_num_envs=8,
    rllib=BoxFace(config="TD3Config", algorithm="TD3", converted=BATCH_CONVERSION),
)
