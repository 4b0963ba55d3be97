"""A policy to act with: networks and the observation normaliser that belongs to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from actors.policy_tensors import PolicyTensors
from actors.protocols import EnvInfo
from rayagi.algorithms.distributions import GaussianHead
from rayagi.algorithms.networks import ActorCritic
from rayagi.algorithms.normalisers import ObservationNormaliser
from rayagi.config.spec import RunSpec


class NetworkPolicy:
    """Implements actors.protocols.Policy."""

    def __init__(
        self,
        model: ActorCritic,
        info: EnvInfo,
        normaliser: ObservationNormaliser | None,
        device: torch.device,
    ) -> None:
        self.model, self.normaliser, self.device = model, normaliser, device
        self.action = info.action

    def observe(self, obs: Tensor) -> Tensor:
        """Normalise (or only move) raw observations (..., obs_dim)."""
        if self.normaliser is None:
            return obs.to(self.device)
        return self.normaliser(obs)

    def outputs(self, observed: Tensor) -> Tensor:
        """Means or logits."""
        return self.model.policy(observed)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Actions for the given noise."""
        return self.model.head.sample(outputs, noise)

    def mode(self, outputs: Tensor) -> Tensor:
        """Most likely actions."""
        return self.model.head.mode(outputs)

    def tensors(self) -> PolicyTensors:
        """Its numbers, for programs other than torch's."""
        layers = [layer for layer in self.model.policy if isinstance(layer, nn.Linear)]
        head, seen = self.model.head, self.normaliser
        return PolicyTensors(
            weights=tuple(layer.weight.detach() for layer in layers),
            biases=tuple(layer.bias.detach() for layer in layers),
            activation=self.model.activation,
            shift=None if seen is None else seen.shift,
            scale=None if seen is None else seen.scale,
            clip=math.inf if seen is None else seen.clip,
            std=head.log_std.detach().exp() if isinstance(head, GaussianHead) else None,
        )


def new_policy(spec: RunSpec, info: EnvInfo, device: torch.device) -> NetworkPolicy:
    """The policy that a run begins with: the same weights wherever it is made. [unverified on GPU]"""
    learning = spec.learning
    model = ActorCritic(info, spec.network, spec.seed).to(device)
    normaliser = (
        ObservationNormaliser(info.obs_dim, learning.obs_clip, device) if learning.normalize_obs else None
    )
    return NetworkPolicy(model, info, normaliser, device)


def load_policy(
    shared: Mapping[str, Any], spec: RunSpec, info: EnvInfo, device: torch.device | None = None
) -> NetworkPolicy:
    """The policy of a checkpoint's shared state, on ``device``; None: the CPU.

    Raises:
        RuntimeError: the checkpoint's networks have other shapes than ``spec`` and ``info`` say.
    """
    policy = new_policy(spec, info, device or torch.device("cpu"))
    policy.model.load_state_dict(shared["learner"]["model"])
    if policy.normaliser is not None:
        policy.normaliser.load_state_dict(shared["obs_normaliser"])
    return policy
