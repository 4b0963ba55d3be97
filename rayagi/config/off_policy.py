"""Settings common to algorithms that learn from experience replay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rayagi.config.errors import ConfigError
from rayagi.config.learning import AsynchronousSpec, at_default, at_least_one, positive

ON_POLICY = (
    "num_epochs",
    "num_minibatches",
    "sequence_length",
    "gae_lambda",
    "value_coef",
    "entropy_coef",
    "target_kl",
    "normalize_advantages",
    "normalize_rewards",
)
"""Fields of LearningSpec that mean nothing with a replay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicySpec(AsynchronousSpec):
    """Settings of algorithms that learn from a replay of transitions, whoever collected them."""

    rollout_length: int = 8
    """T: steps of every environment between two insertions into the replay."""
    num_epochs: int = 1
    """Always 1: batches are drawn from the replay."""
    num_minibatches: int = 1
    """Always 1: batches are drawn from the replay."""
    normalize_advantages: bool = False
    """Always false: there are no advantages."""
    normalize_rewards: bool = False
    """Always false: the replay holds rewards as they are."""
    normalize_obs: bool = False
    """Normalise observations by running statistics, when they are sampled. The replay holds them raw."""
    max_grad_norm: float = 0.0
    """Clip the global gradient norm of each network; 0: no clipping."""
    adam_eps: float = 1e-8
    """Epsilon of Adam's denominator."""
    on_stale: Literal["wait", "drop", "correct"] = "correct"
    """correct, the default: learners insert all rollouts, however old: off-policy learning needs no correction. drop: not
    those older than max_lag. wait: learners insert one rollout of every collector at a time."""
    capacity: int = 1_000_000
    """Most transitions in the replay, of all trainers together, up to whole rows; the oldest are overwritten."""
    learning_starts: int = 5_000
    """Steps of all environments in the replay before the first update. Actions are uniformly random until then."""
    batch_size: int = 256
    """Transitions of one gradient step, of all trainers together."""
    updates_per_step: float = 1.0
    """Gradient steps per environment step, the steps of all environments counted (the update-to-data ratio)."""
    n_step: int = 1
    """n: rewards in a return, before the value of the state n steps later. At an episode's end there are fewer."""
    tau: float = 0.005
    """Polyak averaging of target networks after each gradient step: target += tau (network - target)."""

    def row_form(self, max_episode_steps: int | None) -> tuple[int, int]:
        """Transitions in a row of the replay, and observations from the state of one to its later state.

        As many as a rollout has steps, of one episode, whose observations are there once. Where returns reach over as many
        or more, this would save nothing: a row is one transition with both of its observations.
        """
        steps = min(self.rollout_length, max_episode_steps or self.rollout_length)
        return (steps, self.n_step) if self.n_step < steps else (1, 1)

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Violated rules of asynchronous algorithms, and of the replay."""
        yield from AsynchronousSpec.broken_rules(self, section)
        for name in ("capacity", "batch_size", "n_step"):
            yield from at_least_one(f"{section}.{name}", getattr(self, name))
        if self.learning_starts < 0:
            yield ConfigError(f"{section}.learning_starts", self.learning_starts, "must be at least 0")
        yield from positive(f"{section}.updates_per_step", self.updates_per_step)
        if not 0 < self.tau <= 1:
            yield ConfigError(f"{section}.tau", self.tau, "must be greater than 0 and at most 1")
        if self.learning_starts > self.capacity >= 1:
            yield ConfigError(
                f"{section}.learning_starts",
                self.learning_starts,
                f"is more than the replay holds, {section}.capacity = {self.capacity}",
                f"use at most {self.capacity}",
            )
        suggestions = dict.fromkeys(ON_POLICY, "leave it out, or use algorithm 'ppo'")
        yield from at_default(
            section, self, suggestions, "means nothing for an algorithm that learns from a replay"
        )
        if self.lr_schedule == "kl_adaptive":
            reason = "is for algorithms that bound the policy's divergence in an update"
            yield ConfigError(
                f"{section}.lr_schedule", self.lr_schedule, reason, "use 'constant' or 'linear'"
            )


def temperature_rules(
    section: str, alpha_learning_rate: float | None, initial_alpha: float, target_entropy: float | None
) -> Iterator[ConfigError]:
    """Rules of the temperature of maximum entropy algorithms."""
    yield from positive(f"{section}.alpha_learning_rate", alpha_learning_rate, zero=True)
    yield from positive(f"{section}.initial_alpha", initial_alpha)
    if target_entropy is not None and not math.isfinite(target_entropy):
        yield ConfigError(f"{section}.target_entropy", target_entropy, "must be finite")


OFF_POLICY_PRESET: dict[str, Any] = {
    name: OffPolicySpec.__dataclass_fields__[name].default
    for name in (*ON_POLICY, "rollout_length", "normalize_obs", "lr_schedule", "learning_rate", "gamma")
}
"""Settings of these algorithms on every task, where a task's preset is for on-policy ones."""

ROBOT_PRESET: dict[str, Any] = {
    **OFF_POLICY_PRESET,
    "normalize_obs": True,
    "learning_rate": 1e-3,
    "updates_per_step": 0.25,
    "learning_starts": 2_000,
}
"""Settings of SAC and TD3: the most return in the first minutes of HalfCheetah-v5 on two cores. The papers' are one gradient
step per environment step, and 3e-4 or 1e-3. How they were chosen: experiments/off_policy/README.md."""


OFF_POLICY_NETWORK: dict[str, Any] = {"hidden": (256, 256), "activation": "relu"}
"""Networks of these algorithms on every task, as in the papers."""
