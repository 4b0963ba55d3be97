"""Converts RLlib values that a RunSpec represents differently. Only the driver imports this module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import gymnasium
from ray.rllib.core.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import ENV_CREATOR, _global_registry

from placement.errors import counted
from rayagi.config.errors import NO_VALUE, ConfigError
from rayagi.envs.creators import register_creator


def to_spec_value(name: str, value: Any) -> Any:
    """Convert a setting's value to that in a RunSpec."""
    if name == "grad_clip" and value is None:
        return 0.0
    if name == "target_entropy" and value == "auto":
        return None
    if name == "evaluation_interval" and value is None:
        return 0
    return value


def is_schedule(value: Any) -> bool:
    """Whether it is a schedule as RLlib writes one, [[timestep, value], ...]."""
    points = value if isinstance(value, list | tuple) else ()
    return bool(points) and all(isinstance(point, list | tuple) and len(point) == 2 for point in points)


def normalises(observation_filter: Any, normalize_obs: bool | None) -> bool:
    """``normalize_obs`` of an ``observation_filter``.

    Raises:
        ConfigError: another filter, or one that contradicts a given ``normalize_obs``.
    """
    where, filters = "env_runners(observation_filter=)", {"NoFilter": False, "MeanStdFilter": True}
    if observation_filter not in filters:
        reason = f"must be one of {', '.join(map(repr, filters))}"
        raise ConfigError(where, observation_filter, reason, "use training(normalize_obs=)")
    if normalize_obs not in (None, filters[observation_filter]):
        reason = f"contradicts training(normalize_obs={normalize_obs})"
        raise ConfigError(where, observation_filter, reason, "give one of them")
    return filters[observation_filter]


def registered_env(env: Any) -> str:
    """Id of an environment. A class, a function, or a name of ``tune.register_env`` is registered with Gymnasium first.

    Raises:
        ConfigError: none of these.
    """
    if isinstance(env, str):
        if not _global_registry.contains(ENV_CREATOR, env):
            return env
        return register_creator(env, _global_registry.get(ENV_CREATOR, env))
    if not (issubclass(env, gymnasium.Env) if isinstance(env, type) else callable(env)):
        reason = "must be an environment's id, a gymnasium.Env class, or a function that makes one"
        raise ConfigError("environment(env=)", env, reason, "or give it to gymnasium.register and use its id")
    return register_creator(getattr(env, "__name__", type(env).__name__), env)


def given_model_config(model_config: Mapping[str, Any] | DefaultModelConfig) -> dict[str, Any]:
    """Keys that the user set. A DefaultModelConfig does not tell: what it says of the network, and changed values."""
    if isinstance(model_config, Mapping):
        return dict(model_config)
    defaults = dataclasses.asdict(DefaultModelConfig())
    always = ("fcnet_hiddens", "fcnet_activation", "vf_share_layers", "free_log_std")
    given = dataclasses.asdict(model_config)
    return {key: value for key, value in given.items() if key in always or value != defaults[key]}


def module_changes(given: Any) -> dict[str, Any]:
    """Changes of a RunSpec by ``rl_module(rl_module_spec=)``, as a nested dictionary.

    Raises:
        ConfigError: not an RLModuleSpec of a class that other processes can import, or one with settings that the
            environment decides.
    """
    if given is None:
        return {}
    where, example = "rl_module(rl_module_spec=)", "give RLModuleSpec(module_class=, model_config=)"
    if not isinstance(given, RLModuleSpec):
        raise ConfigError(where, given, "rayagi trains one RLModule", example)
    if given.module_class is None:
        instead = "give a class of yours, or rl_module(model_config=) alone for rayagi's own networks"
        raise ConfigError(f"{where}.module_class", None, "names no network", instead)
    empty = RLModuleSpec(module_class=given.module_class, model_config=given.model_config)
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if value != getattr(empty, field.name):
            raise ConfigError(f"{where}.{field.name}", value, "rayagi decides this itself", example)
    cls, config = given.module_class, given.model_config or {}
    if cls.__module__ == "__main__" or "." in cls.__qualname__:
        reason = "is not defined at the top of a module that other processes can import"
        raise ConfigError(where, cls, reason, "move it to a file of its own, and import it from there")
    kwargs = dict(config) if isinstance(config, Mapping) else dataclasses.asdict(config)
    return {"network": {"module": f"{cls.__module__}:{cls.__name__}", "module_kwargs": kwargs}}


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenSizes:
    """Sizes set by the user; None: not set."""

    rollout_length: int | None = None
    num_minibatches: int | None = None
    train_batch_size: int | None = None
    """Steps per iteration of all GMIs."""
    train_batch_size_per_learner: int | None = None
    """Steps per iteration of one GMI."""
    minibatch_size: int | None = None
    """Steps per minibatch of one GMI."""


def rollout_and_minibatches(
    given: GivenSizes, *, num_envs: int, num_gmis: int | None, preset_length: int, preset_minibatches: int
) -> tuple[int, int]:
    """Rollout length T and number of minibatches that satisfy all given sizes.

    If only the length is given, the preset's number of minibatches is lowered until it divides the length.

    Raises:
        ConfigError: the sizes contradict each other, or do not fit N environments.
    """
    length = _rollout_length(given, num_envs, num_gmis)
    minibatches = _minibatches(given, num_envs, preset_length if length is None else length)
    if minibatches is None:
        minibatches = preset_minibatches if length is None else gcd(length, preset_minibatches)
    return preset_length if length is None else length, minibatches


def _rollout_length(given: GivenSizes, num_envs: int, num_gmis: int | None) -> int | None:
    lengths: list[tuple[str, int]] = []
    if given.rollout_length is not None:
        lengths.append((f"rollout_length={given.rollout_length}", given.rollout_length))
    if given.train_batch_size_per_learner is not None:
        name = "training(train_batch_size_per_learner=)"
        lengths.append(
            (name, _per_environment(name, given.train_batch_size_per_learner, num_envs, "gmi(num_envs=)"))
        )
    if given.train_batch_size is not None:
        name = "training(train_batch_size=)"
        if num_gmis is None:
            raise ConfigError(
                name,
                given.train_batch_size,
                "is shared by all GMIs, whose number is not given",
                "use gmi(num_gmis=) too, or train_batch_size_per_learner, the steps of one GMI",
            )
        total = num_gmis * num_envs
        lengths.append((name, _per_environment(name, given.train_batch_size, total, "num_gmis * num_envs")))
    if len({length for _, length in lengths}) > 1:
        texts = [f"{name} means {counted(length, 'step')} of each environment" for name, length in lengths]
        raise ConfigError(
            "training()", NO_VALUE, "gives sizes that disagree: " + ", ".join(texts), "give one of them"
        )
    return lengths[0][1] if lengths else None


def _per_environment(name: str, size: int, environments: int, what: str) -> int:
    if size < 1 or size % environments:
        below = size // environments * environments
        offers = [multiple for multiple in (below, below + environments) if multiple > 0]
        raise ConfigError(
            name,
            size,
            f"must be a multiple of {what} = {environments}",
            f"use {' or '.join(map(str, offers))}",
        )
    return size // environments


def _minibatches(given: GivenSizes, num_envs: int, length: int) -> int | None:
    size = given.minibatch_size
    if size is None:
        return given.num_minibatches
    # Each minibatch takes an equal share of every environment's steps.
    sizes = [num_envs * steps for steps in range(1, length + 1) if length % steps == 0]
    if size not in sizes:
        offers = [str(s) for s in sorted(sorted(sizes, key=lambda s: abs(s - size))[:2])]
        raise ConfigError(
            "training(minibatch_size=)",
            size,
            f"must be num_envs = {num_envs} times a divisor of the rollout length {length}",
            f"use {' or '.join(offers)}",
        )
    minibatches = length * num_envs // size
    if given.num_minibatches not in (None, minibatches):
        raise ConfigError(
            "training(minibatch_size=)",
            size,
            f"means {counted(minibatches, 'minibatch', 'minibatches')}, but num_minibatches is {given.num_minibatches}",
            "give one of them",
        )
    return minibatches
