"""What the definitions of off-policy algorithms share: metrics, RLlib's names, refused networks. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.protocols import EnvInfo
from rayagi.algorithms.definition import (
    ASYNCHRONOUS_NAMES,
    RLLIB_NAMES,
    AlgorithmDefinition,
    Conversion,
    LearningMetric,
    RllibFace,
)
from rayagi.config.errors import ConfigError
from rayagi.config.learning import Template
from rayagi.config.off_policy import OFF_POLICY_NETWORK, ON_POLICY

OFF_POLICY_METRICS = (
    LearningMetric(name="q_mean", unit="", help="mean value of sampled states and actions"),
    LearningMetric(name="gradient_steps", unit="steps", help="gradient steps of this iteration"),
)

OFF_POLICY_NAMES = {
    **{name: leaf for name, leaf in RLLIB_NAMES.items() if leaf not in (*ON_POLICY, "learning_rate")},
    **ASYNCHRONOUS_NAMES,
    "tau": "tau",
    "n_step": "n_step",
    "capacity": "capacity",
    "batch_size": "batch_size",
    "updates_per_step": "updates_per_step",
    "num_steps_sampled_before_learning_starts": "learning_starts",
}
"""Settings of every off-policy algorithm: the name in RLlib's ``training()`` -> the field of OffPolicySpec."""

BOX_NAMES = {
    **OFF_POLICY_NAMES,
    "actor_lr": "learning_rate",
    "critic_lr": "critic_learning_rate",
}
"""The same where the policy and the critics have step sizes of their own."""

_UNIFORM = ("EpisodeReplayBuffer", "ReplayBuffer", "MultiAgentReplayBuffer", "MultiAgentEpisodeReplayBuffer")


def _capacity(config: Any, _trainers: int | None) -> Mapping[str, Any]:
    where = "training(replay_buffer_config=)"
    example = "use {'type': 'EpisodeReplayBuffer', 'capacity': 1000000}, or training(capacity=)"
    if not isinstance(config, Mapping) or not isinstance(config.get("capacity", 0), int):
        raise ConfigError(where, config, "must be a dictionary with a whole number as its capacity", example)
    if config.get("type", _UNIFORM[0]) not in _UNIFORM:
        raise ConfigError(where, config, "is for another replay than a uniform one", example)
    return {"capacity": config["capacity"]} if "capacity" in config else {}


def _batch_size(size: Any, trainers: int | None) -> Mapping[str, Any]:
    where = "training(train_batch_size_per_learner=)"
    if isinstance(size, bool) or not isinstance(size, int):
        raise ConfigError(where, size, "must be a whole number")
    if trainers is None:
        reason = "is the share of one learner, whose number is not given"
        raise ConfigError(
            where, size, reason, "use gmi(num_gmis=) too, or training(batch_size=) of all together"
        )
    return {"batch_size": size * trainers}


BATCH_CONVERSION = {
    "_train_batch_size_per_learner": Conversion(
        to_fields=_batch_size,
        from_settings=lambda settings, trainers: trainers and settings.batch_size // trainers,
    ),
}
"""RLlib's setting of the batch."""

REPLAY_CONVERSIONS = {
    **BATCH_CONVERSION,
    "replay_buffer_config": Conversion(
        to_fields=_capacity,
        from_settings=lambda settings, _: {"type": _UNIFORM[0], "capacity": settings.capacity},
    ),
}
"""RLlib's settings of the replay and the batch, of algorithms that draw uniformly."""

OFF_POLICY_FIXED = {"normalize_actions": True, "clip_actions": False}
"""RLlib's action settings: policies act in [-1, 1], which stands for the environment's box."""

INSTEAD_OF_RLLIBS_REPLAY = (
    (r"lr", "use training(actor_lr=, critic_lr=)"),
    (r"train_batch_size", "use training(batch_size=), of all GMIs together, or train_batch_size_per_learner"),
    (r"training_intensity", "use training(updates_per_step=), the intensity divided by the batch size"),
    (r"target_network_update_freq", "targets follow after every gradient step: training(tau=)"),
    (r"store_buffer_in_checkpoints", "the checkpoints of `rayagi train` have the replay, RLlib's do not"),
    (r"clip_actions|normalize_actions", "actions are within the environment's box"),
    (r"(q|policy)_model_config", "use rl_module(model_config={'fcnet_hiddens': ...})"),
    (r"optimization", "use training(actor_lr=, critic_lr=, alpha_lr=)"),
    (r"twin_q", "there are always two critics"),
    (r"_deterministic_loss|_use_beta_distribution", "the policy is a squashed Gaussian"),
)
"""Settings of RLlib's off-policy algorithms, and what to use instead, as ``RllibFace.instead``."""


def refuse_unfit_box(algorithm: str, info: EnvInfo) -> Iterator[ConfigError]:
    """Refuse environments that an algorithm for continuous actions, with perceptrons, cannot learn."""
    action = info.action
    if action.is_discrete:
        reason = f"needs a box of reals as actions, and {info.env_id}'s are choices"
        fit = "'dqn' or 'ppo'" if action.kind == "discrete" else "'ppo'"
        yield ConfigError("algorithm", algorithm, reason, f"use algorithm {fit}")
        return
    for i, (low, high) in enumerate(zip(action.low, action.high, strict=True)):
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            reason = f"needs a box with finite bounds, and action {i} of {info.env_id} is between {low:g} and {high:g}"
            instead = "wrap the environment (gymnasium.wrappers.RescaleAction), or use algorithm 'ppo'"
            yield ConfigError("algorithm", algorithm, reason, instead)
            return
    yield from refuse_images(algorithm, info)


def refuse_images(algorithm: str, info: EnvInfo) -> Iterator[ConfigError]:
    """Refuse environments that show images, for algorithms whose critics are perceptrons on the whole observation."""
    if any(part.is_image for part in info.obs_parts):
        reason = f"learns from vectors, and {info.env_id} shows images"
        yield ConfigError("algorithm", algorithm, reason, "use algorithm 'ppo', or 'bc' with a dataset")


def refuse_networks(algorithm: str, network: Any) -> Iterator[ConfigError]:
    """Refuse settings of a NetworkSpec that separate perceptrons do not have."""
    for name, usual in (
        ("core", "none"),
        ("shared", False),
        ("critic_only", ()),
        ("module", None),
        ("head", "auto"),
    ):
        value = getattr(network, name)
        if value != usual:
            reason = f"does not go with algorithm = {algorithm!r}, whose networks are separate perceptrons"
            yield ConfigError(f"network.{name}", value, reason, "leave it out, or use algorithm 'ppo'")


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxFace(RllibFace):
    """The mapping of an off-policy algorithm for continuous actions."""

    names: Mapping[str, str] = field(default_factory=lambda: BOX_NAMES)
    converted: Mapping[str, Conversion] = field(default_factory=lambda: REPLAY_CONVERSIONS)
    fixed: Mapping[str, Any] = field(default_factory=lambda: OFF_POLICY_FIXED)
    instead: tuple[tuple[str, str], ...] = INSTEAD_OF_RLLIBS_REPLAY


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxDefinition(AlgorithmDefinition):
    """An off-policy algorithm for continuous actions."""

    templates: tuple[Template, ...] = ("dp_only", "decoupled")
    unfit_network: Callable[[str, Any], Iterator[ConfigError]] = refuse_networks
    unfit_env: Callable[[str, EnvInfo], Iterator[ConfigError]] = refuse_unfit_box
    preset_network: Mapping[str, Any] = field(default_factory=lambda: OFF_POLICY_NETWORK)
    metrics: tuple[LearningMetric, ...] = OFF_POLICY_METRICS
