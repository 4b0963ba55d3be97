"""Declaration of an algorithm. Config sections, CLI choices and the RLlib interface are derived from it (registry.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.protocols import EnvInfo
from rayagi.config.errors import ConfigError
from rayagi.config.learning import LearningSpec, Template

RLLIB_NAMES = {
    "rollout_length": "rollout_length",
    "num_minibatches": "num_minibatches",
    "sequence_length": "sequence_length",
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

OFFLINE_NAMES = {
    **{
        name: RLLIB_NAMES[name]
        for name in ("gamma", "lr", "grad_clip", "adam_eps", "normalize_obs", "normalize_rewards", "obs_clip")
    },
    "train_batch_size": "batch_size",
    "num_updates": "num_updates",
}
"""The same for the fields of OfflineSpec."""

INSTEAD_OF_RLLIBS_DATA = (
    (r"dataset_num_iters_per_learner", "use training(num_updates=)"),
    (r"num_learners", "use gmi(num_gmis=): every GMI learns from its shard of the dataset"),
)
"""Settings of RLlib's offline algorithms, and what to use instead, as ``RllibFace.instead``."""

ASYNCHRONOUS_NAMES = {
    "max_lag": "max_lag",
    "on_stale": "on_stale",
    "rollouts_per_update": "rollouts_per_update",
}
"""The same for the fields of AsynchronousSpec."""

ONE_PASS_NAMES = {
    **{
        name: leaf
        for name, leaf in RLLIB_NAMES.items()
        if leaf not in ("num_epochs", "num_minibatches", "target_kl", "adam_eps")
    },
    "decay": "rms_decay",
    "epsilon": "rms_eps",
}
"""The same for the fields of OnePassSpec."""

OF_RLLIBS_PIPELINE = ("train_batch_size", "learner_queue_size")
"""As ``RllibFace.elsewhere``."""

INSTEAD_OF_RLLIBS_PIPELINE = (
    (
        r"train_batch_size|_train_batch_size_per_learner",
        "use training(rollout_length=, rollouts_per_update=)",
    ),
    (r"num_learners", "use gmi(num_learners=)"),
    (r"broadcast_interval", "every update is published; use training(max_lag=)"),
    (r"vtrace_clip_pg_rho_threshold", "one bound serves both: training(vtrace_clip_rho_threshold=)"),
    (
        r"learner_queue_.*|simple_queue_.*|.*_manager|max_requests_in_flight.*",
        "use training(max_lag=, on_stale=)",
    ),
    (r"_separate_vf_optimizer|_lr_vf", "one optimiser steps both networks: training(lr=)"),
    (r".*use_env_runner_state_server", "parameters travel through shared memory"),
)
"""Settings of RLlib's asynchronous algorithms, and what to use instead, as ``RllibFace.instead``."""

RLLIB_ACTIONS: dict[str, Any] = {"normalize_actions": False, "clip_actions": True}
"""RLlib's action settings, at the only values that rayagi supports: every engine clips actions to the action space."""


ONE_PASS_FIXED: dict[str, Any] = {**RLLIB_ACTIONS, "opt_type": "rmsprop"}
"""The same for algorithms with one step per rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """An RLlib setting that stands for a setting of another form."""

    to_fields: Callable[[Any, int | None], Mapping[str, Any]]
    """(its value, number of trainers or None if unknown) -> fields of the algorithm's settings. Raises ConfigError."""
    from_settings: Callable[[Any, int | None], Any]
    """(the algorithm's settings, number of trainers or None) -> its value; None if that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RllibFace:
    """Mapping of an algorithm to RLlib's names and settings."""

    config: str
    """Name of its config class, such as PPOConfig."""
    algorithm: str
    """Name of its Algorithm class, such as PPO."""
    base: str = "ray.rllib.algorithms.algorithm_config:AlgorithmConfig"
    """RLlib's own config class, where it has the algorithm."""
    names: Mapping[str, str] = field(default_factory=lambda: RLLIB_NAMES)
    """Setting of ``training()`` -> field of the algorithm's settings; fields of its own class may keep their names."""
    converted: Mapping[str, Conversion] = field(default_factory=dict)
    """Settings of RLlib in another form."""
    fixed: Mapping[str, Any] = field(default_factory=lambda: RLLIB_ACTIONS)
    """Settings whose RLlib default differs from rayagi's behaviour: they must be unset, or have this value."""
    elsewhere: tuple[str, ...] = ("train_batch_size",)
    """Settings whose RLlib default differs from rayagi's behaviour, and that it has in another form or not at all: they must
    be unset, and read as None if rayagi has no such value."""
    takes_batch_sizes: bool = False
    """Whether RLlib's batch sizes are converted to a rollout length and minibatches."""
    instead: tuple[tuple[str, str], ...] = ()
    """(pattern of an unsupported RLlib setting, what to use instead). Matched before the common patterns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningMetric:
    """A metric of one algorithm. The run's value is the mean over GMIs."""

    name: str
    unit: str
    help: str


def _fits(_name: str, _environment: Any) -> Iterator[ConfigError]:
    yield from ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmDefinition:
    """One learning algorithm. Importing it imports neither torch nor Ray."""

    name: str
    """Its name in a RunSpec and on the command line, and of its settings' section in config files and ``--set``."""
    summary: str
    """One line: the algorithm and its source."""
    settings: type[LearningSpec]
    templates: tuple[Template, ...]
    """Supported templates; the default first."""
    learner: str
    """``module:Class`` of its RolloutLearner or OfflineLearner, imported only in a trainer's process."""
    needs_separate_networks: bool = False
    """Whether it steps the policy and the value network on their own, so that they can share no parameters."""
    captured_learner: str | None = None
    """The learner for rollouts on the GPU, whose whole update is one CUDA graph."""
    captured_steps: str | None = None
    """The learner for rollouts from the host, whose minibatch steps on a GPU are one CUDA graph."""
    model: str | None = None
    """``module:function`` of its networks, (info, network, settings, seed) -> Model; None: a policy and a value network."""
    unfit_network: Callable[[str, Any], Iterator[ConfigError]] = _fits
    """Settings of a NetworkSpec that it does not have: (its name, the NetworkSpec) -> violations."""
    unfit_env: Callable[[str, EnvInfo], Iterator[ConfigError]] = _fits
    """Environments that it cannot learn: (its name, the environment) -> violations."""
    preset: Mapping[str, Any] = field(default_factory=dict)
    """Settings that hold on every task; they override the task's preset."""
    preset_network: Mapping[str, Any] = field(default_factory=dict)
    """The same for the fields of NetworkSpec."""
    preset_num_envs: int | None = None
    """The same for the environments of one GMI."""
    metrics: tuple[LearningMetric, ...] = ()
    """Metrics beside those of all algorithms (rayagi.monitoring.catalogue)."""
    rllib: RllibFace

    @property
    def training_names(self) -> Mapping[str, str]:
        """Setting of ``training()`` -> field: ``rllib.names``, and the other fields of its own class by their names."""
        known = self.rllib.names
        own = [name for name in vars(self.settings).get("__annotations__", ()) if name not in known.values()]
        return {**known, **{name: name for name in own}}
