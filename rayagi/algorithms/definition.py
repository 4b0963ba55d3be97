"""What an algorithm declares of itself; everything else that names algorithms is derived from it (registry.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayagi.config.errors import ConfigError
from rayagi.config.learning import LearningSpec, Template

RLLIB_NAMES = {
    "rollout_length": "rollout_length",
    "num_minibatches": "num_minibatches",
    "num_epochs": "num_epochs",
    "gamma": "gamma",
    "lambda_": "gae_lambda",
    "vf_loss_coeff": "value_coef",
    "entropy_coeff": "entropy_coef",
    "lr": "learning_rate",
    "lr_schedule": "lr_schedule",
    "kl_target": "target_kl",
    "grad_clip": "max_grad_norm",
    "adam_eps": "adam_eps",
    "normalize_advantages": "normalize_advantages",
    "normalize_obs": "normalize_obs",
    "normalize_rewards": "normalize_rewards",
    "obs_clip": "obs_clip",
}
"""Settings of every algorithm: the name in RLlib's ``training()`` -> the field of LearningSpec."""

ASYNCHRONOUS_NAMES = {
    "max_lag": "max_lag",
    "on_stale": "on_stale",
    "rollouts_per_update": "rollouts_per_update",
}
"""The same for the fields of AsynchronousSpec."""

RLLIB_ACTIONS: dict[str, Any] = {"normalize_actions": False, "clip_actions": False}
"""Settings of RLlib's that say what rayagi does with actions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RllibFace:
    """An algorithm in RLlib's words."""

    config: str
    """Name of its config class, such as PPOConfig."""
    algorithm: str
    """Name of its Algorithm class, such as PPO."""
    base: str = "ray.rllib.algorithms.algorithm_config:AlgorithmConfig"
    """RLlib's own config class, where it has the algorithm."""
    names: Mapping[str, str] = field(default_factory=lambda: RLLIB_NAMES)
    """Setting of ``training()`` -> field of the algorithm's settings."""
    fixed: Mapping[str, Any] = field(default_factory=lambda: RLLIB_ACTIONS)
    """Settings whose RLlib default does not say what rayagi does: unset, or exactly this value."""
    takes_batch_sizes: bool = False
    """Whether RLlib's batch sizes become a rollout length and minibatches."""
    instead: tuple[tuple[str, str], ...] = ()
    """Pattern of an RLlib setting that is not honoured: what to use for it. Comes before the common ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningMetric:
    """What an algorithm measures beside what all do; the mean over GMIs is the run's value."""

    name: str
    unit: str
    help: str


def _no_rules(_settings: Any, _section: str) -> Iterator[ConfigError]:
    yield from ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmDefinition:
    """One learning algorithm. Importing it imports neither torch nor Ray."""

    name: str
    """In a RunSpec, on the command line."""
    summary: str
    """One line: what it is, and the source."""
    settings: type[LearningSpec]
    section: str
    """What its settings are called in config files and ``--set``."""
    templates: tuple[Template, ...]
    """Which templates it trains on; its usual one first."""
    learner: str
    """``module:Class`` of the RolloutLearner that learns from its rollouts, imported where a trainer is."""
    captured_learner: str | None = None
    """The same for rollouts that never leave a GPU, where one launch makes the whole update."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the training class that tell algorithms apart which share one."""
    rules: Callable[[Any, str], Iterator[ConfigError]] = _no_rules
    """Rules on its settings beside those that the settings have themselves: (settings, section) -> what is broken."""
    preset: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its settings that it has on every task, whatever the task's preset says."""
    metrics: tuple[LearningMetric, ...] = ()
    """What it measures beside what all algorithms do (rayagi.monitoring.catalogue)."""
    rllib: RllibFace
