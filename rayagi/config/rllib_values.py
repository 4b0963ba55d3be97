"""Converts RLlib values that a RunSpec represents differently. Only the driver imports this module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gymnasium
from ray.rllib.core.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import ENV_CREATOR, _global_registry

from rayagi.config.errors import ConfigError
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
