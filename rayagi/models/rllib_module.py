"""A user's RLlib RLModule as a network: built from the environment's spaces, with RLlib's distributions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import gymnasium
import numpy as np
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchMultiCategorical,
)
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn

from actors.protocols import EnvInfo
from rayagi.config.spec import NetworkSpec
from rayagi.models.module_checks import module_error

Space = TypeVar("Space")

_DISTRIBUTIONS = {
    "continuous": TorchDiagGaussian,
    "discrete": TorchCategorical,
    "multi_discrete": TorchMultiCategorical,
}


class RllibModule(nn.Module):
    """Calls an RLModule as a torch module of one's own: (B, obs_dim) -> action_dist_inputs and values (B,).

    It acts by ``forward_train``, so that acting and training agree.
    """

    def __init__(self, module: TorchRLModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """One pass, and ``compute_values`` with its embeddings."""
        batch = {Columns.OBS: obs}
        found = self.module.forward_train(batch)
        if Columns.ACTION_DIST_INPUTS not in found:
            raise KeyError(
                f"its forward gives {', '.join(found) or 'nothing'}, and no {Columns.ACTION_DIST_INPUTS}"
            )
        values = self.module.compute_values(batch, embeddings=found.get(Columns.EMBEDDINGS))
        return found[Columns.ACTION_DIST_INPUTS], values


def spaces(info: EnvInfo) -> tuple[gymnasium.Space[Space], gymnasium.Space[Space]]:
    """Observation and action space of an environment, as Gymnasium spaces."""
    observations = gymnasium.spaces.Box(-np.inf, np.inf, (info.obs_dim,), np.float32)
    if info.action.kind == "discrete":
        return observations, gymnasium.spaces.Discrete(info.action.num_choices)
    if info.action.kind == "multi_discrete":
        return observations, gymnasium.spaces.MultiDiscrete(list(info.action.choices))
    low, high = np.asarray(info.action.low, np.float32), np.asarray(info.action.high, np.float32)
    return observations, gymnasium.spaces.Box(low, high, dtype=np.float32)


def constructor_arguments(info: EnvInfo, spec: NetworkSpec) -> Mapping[str, Any]:
    """Keyword arguments of an RLModule; ``module_kwargs`` are its model_config."""
    observations, actions = spaces(info)
    return {
        "observation_space": observations,
        "action_space": actions,
        "inference_only": False,
        "model_config": dict(spec.module_kwargs),
    }


def refuse_unfit_class(spec: NetworkSpec, cls: type[Any]) -> None:
    """Refuse a class without torch, without values, or with a head of rayagi's. Raises ConfigError: what it lacks."""
    if not issubclass(cls, TorchRLModule):
        raise module_error(spec, "is an RLModule without torch", "derive it from TorchRLModule")
    if not issubclass(cls, ValueFunctionAPI):
        raise module_error(
            spec,
            "has no method compute_values, which gives the values",
            "derive it from ray.rllib.core.rl_module.apis.ValueFunctionAPI too",
        )
    if spec.head != "auto":
        raise module_error(
            spec,
            f"has RLlib's distributions, and network.head = {spec.head!r} another",
            "leave network.head out",
        )


def wrapped(spec: NetworkSpec, module: TorchRLModule, info: EnvInfo) -> RllibModule:
    """The module as a network. Raises ConfigError: it has a state, or a distribution of its own."""
    if module.is_stateful():
        raise module_error(
            spec, "has a state, which is trained in torch modules only", "write a torch module with state_dim"
        )
    expected = _DISTRIBUTIONS[info.action.kind]
    try:
        found = module.get_train_action_dist_cls()
    except (ValueError, NotImplementedError):  # RLlib has no default for several choices
        found = expected
    if not (isinstance(found, type) and issubclass(found, expected)):
        raise module_error(
            spec,
            f"has the action distribution {getattr(found, '__name__', found)}",
            f"use RLlib's {expected.__name__}, the usual one of {info.env_id}'s actions",
        )
    return RllibModule(module)
