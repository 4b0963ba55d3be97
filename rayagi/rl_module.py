"""Exports a policy as an RLModule, for loading checkpoints with RLlib.

MLPs with RLlib's usual distributions become its DefaultPPOTorchRLModule, which needs RLlib alone. Every other policy becomes
a ``rayagi.policy_module.PolicyModule``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module import MultiRLModule, RLModule, RLModuleSpec
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from torch import Tensor, nn

from actors.protocols import EnvInfo
from rayagi.algorithms.normalisers import ObservationNormaliser
from rayagi.config.spec import NetworkSpec, RunSpec
from rayagi.models.heads import CategoricalHead, GaussianHead, MultiCategoricalHead
from rayagi.models.networks import ActorCritic
from rayagi.models.policy import NetworkPolicy
from rayagi.models.rllib_module import spaces
from rayagi.policy_module import module_of

_CONSTANTS = ("log_std_clip_param_const",)
"""Buffers of RLlib's modules that are settings, not weights."""


class ModuleWeightsError(RuntimeError):
    """RLlib's module has other weights than rayagi's networks, since RLlib changed."""

    def __init__(self, missing: tuple[str, ...], unexpected: tuple[str, ...]) -> None:
        super().__init__(missing, unexpected)
        self.missing, self.unexpected = missing, unexpected

    def __str__(self) -> str:
        return (
            "RLlib's DefaultPPOTorchRLModule does not match rayagi's networks: "
            f"missing weights: {', '.join(self.missing) or 'none'}; "
            f"unexpected weights: {', '.join(self.unexpected) or 'none'}; "
            "use the Ray version that constraints.txt names"
        )


def empty_module(info: EnvInfo, network: NetworkSpec) -> DefaultPPOTorchRLModule:
    """RLlib's module of the same architecture, with its own initial weights."""
    config = DefaultModelConfig(
        fcnet_hiddens=list(network.hidden),
        fcnet_activation=network.activation,
        vf_share_layers=False,
        free_log_std=info.action.kind == "continuous",
    )
    observations, actions = spaces(info)
    with _without_deprecations():
        return DefaultPPOTorchRLModule(
            observation_space=observations,
            action_space=actions,
            inference_only=False,
            model_config=dataclasses.asdict(config),
        )


def export_module(policy: NetworkPolicy, info: EnvInfo, spec: RunSpec) -> RLModule:
    """The policy and its value network as an RLModule that takes raw observations.

    In RLlib's default module, observation mean and standard deviation are folded into the first layers, so that outputs
    agree to float32 rounding wherever no normalised observation exceeds ``obs_clip``: RLlib's networks cannot clip.
    Observations that never varied have no influence on it. A PolicyModule has the statistics, and clips.

    Raises:
        ExportError: RLlib's module has other weights than expected.
    """
    if not fits_default(policy):
        with _without_deprecations():
            return module_of(policy, spec)
    module = empty_module(info, spec.network)
    load_exported(module, exported_weights(policy, info))
    return module


def fits_default(policy: NetworkPolicy) -> bool:
    """Whether RLlib's default module can be the policy: two MLPs on whole observations, with RLlib's usual distribution."""
    model = policy.model
    return (
        isinstance(model, ActorCritic)
        and isinstance(model.policy, nn.Sequential)
        and isinstance(model.policy[0], nn.Linear)
        and type(model.head) in (GaussianHead, CategoricalHead, MultiCategoricalHead)
    )


def exported_weights(policy: NetworkPolicy, info: EnvInfo) -> dict[str, Tensor]:
    """Weights under RLlib's names."""
    assert isinstance(policy.model, ActorCritic)
    scale, offset = _affine(policy.normaliser, info.obs_dim)
    weights: dict[str, Tensor] = {}
    for tower, encoder, head in (
        (policy.model.policy, "actor_encoder", "pi"),
        (policy.model.value, "critic_encoder", "vf"),
    ):
        linears = [(i, layer) for i, layer in enumerate(tower.children()) if isinstance(layer, nn.Linear)]
        for position, (i, layer) in enumerate(linears):
            weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
            # Fold normalisation into the first layer: W (s x + o) + b = (W s) x + (W o + b).
            if position == 0:
                weight, bias = weight * scale, bias + weight @ offset
            # Hidden layers keep their index among the activations; the last linear layer is RLlib's head.
            name = f"{head}.net.mlp.0" if position == len(linears) - 1 else f"encoder.{encoder}.net.mlp.{i}"
            weights[f"{name}.weight"], weights[f"{name}.bias"] = weight.float(), bias.float()
    log_std = policy.model.head.state_dict().get("log_std")
    if log_std is not None:
        weights["pi.log_std"] = log_std.detach().clone()
    return weights


def load_exported(module: DefaultPPOTorchRLModule, weights: dict[str, Tensor]) -> None:
    """Load weights into RLlib's module. Its own ``set_state`` would silently skip unknown names.

    Raises:
        ExportError: names differ.
    """
    own = module.state_dict()
    missing = tuple(name for name in own if name not in weights and not name.endswith(_CONSTANTS))
    unexpected = tuple(name for name in weights if name not in own)
    if missing or unexpected:
        raise ModuleWeightsError(missing, unexpected)
    module.load_state_dict({**own, **weights})


def save_modules(module: RLModule, folder: Path) -> None:
    """Write the module as ``default_policy`` of a MultiRLModule, as in RLlib's checkpoints."""
    with _without_deprecations():
        modules = MultiRLModule(rl_module_specs={DEFAULT_MODULE_ID: RLModuleSpec.from_module(module)})
    modules[DEFAULT_MODULE_ID].set_state(module.get_state())
    modules.save_to_path(folder)


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Suppress deprecation warnings that RLlib's module constructors raise about themselves."""
    logger = logging.getLogger("ray._common.deprecation")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _affine(normaliser: ObservationNormaliser | None, obs_dim: int) -> tuple[Tensor, Tensor]:
    """Scale and offset (obs_dim) of normalisation without its clip, from its outputs for 0 and 1."""
    zeros = torch.zeros(obs_dim, dtype=torch.float64)
    if normaliser is None:
        return zeros + 1, zeros
    unclipped = ObservationNormaliser(obs_dim, math.inf, torch.device("cpu"))
    unclipped.load_state_dict(normaliser.state_dict())
    offset = unclipped(zeros)
    scale = unclipped(zeros + 1) - offset
    constant = (unclipped.moments.variance() == 0) & (unclipped.moments.count > 0)
    return scale.masked_fill(constant, 0.0), offset.masked_fill(constant, 0.0)
