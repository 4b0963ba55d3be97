"""Settings of algorithms that learn from a recorded dataset, without environment steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from rayagi.config.errors import ConfigError
from rayagi.config.learning import LearningSpec, at_default, at_least_one

_OF_ROLLOUTS = (
    "rollout_length",
    "num_epochs",
    "num_minibatches",
    "sequence_length",
    "gae_lambda",
    "value_coef",
    "entropy_coef",
    "lr_schedule",
    "target_kl",
    "normalize_advantages",
)
"""Fields of LearningSpec that mean nothing where nothing is simulated."""

OFFLINE_PRESET = {
    **{name: getattr(LearningSpec(), name) for name in (*_OF_ROLLOUTS, "gamma")},
    "learning_rate": 3e-4,
    "normalize_rewards": False,
}
"""Settings of these algorithms on every task, in place of the task's own, which are for PPO."""


@dataclass(frozen=True, kw_only=True)
class OfflineSpec(LearningSpec):
    """Settings of every offline algorithm.

    Without __slots__, so that a class may have another base with settings too.
    """

    imitates: ClassVar[bool] = False
    """Whether it learns from observations and actions alone."""
    batch_size: int = 256
    """Timesteps of one gradient step, over all GMIs."""
    num_updates: int = 500
    """Gradient steps of an iteration."""
    max_grad_norm: float = 0.0
    """Clip the global gradient norm; 0: no clipping."""
    adam_eps: float = 1e-8
    """Epsilon of Adam's denominator."""
    normalize_obs: bool = True
    """Subtract the dataset's mean of each observation and divide by its standard deviation."""
    normalize_rewards: bool = False
    """Multiply rewards by 1000 / (best return - worst return) of the dataset's episodes (Kostrikov et al. 2021, B)."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every algorithm, and of learning without rollouts."""
        yield from LearningSpec.broken_rules(self, section)
        for name in ("batch_size", "num_updates"):
            yield from at_least_one(f"{section}.{name}", getattr(self, name))
        reason = "means nothing for an offline algorithm, which has no rollouts"
        yield from at_default(section, self, dict.fromkeys(_OF_ROLLOUTS, "leave it out"), reason)
