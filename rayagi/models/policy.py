"""The policy of an agent: networks and their observation normaliser."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from actors.policy_tensors import PolicyTensors
from actors.protocols import Acting, EnvInfo
from actors.rollout import Rollout, exploration_noise
from rayagi.algorithms.normalisers import ObservationNormaliser
from rayagi.config.spec import RunSpec
from rayagi.models.heads import GaussianHead
from rayagi.models.networks import ActorCritic, Model, algorithm_model
from rayagi.native.acting import compiled_acting
from rayagi.native.denormals import flushed_denormals


class NetworkPolicy:
    """Implements actors.protocols.Policy."""

    def __init__(
        self,
        model: Model,
        info: EnvInfo,
        normaliser: ObservationNormaliser | None,
        device: torch.device,
    ) -> None:
        self.model, self.normaliser, self.device = model, normaliser, device
        num_outputs = model.head.num_outputs
        changed = num_outputs != info.action.output_dim
        self.action = replace(info.action, num_outputs=num_outputs) if changed else info.action
        self.info = replace(info, action=self.action)
        self.state_dim = model.state_dim
        self.noise_dim = model.layer_noise_dim or self.action.output_dim
        """Numbers of noise of one environment's step."""
        self._has_noisy_layers = model.layer_noise_dim > 0
        self._fits_kernels = device.type == "cpu" and model.fits_kernels

    def observe(self, obs: Tensor) -> Tensor:
        """Normalise (or only move) raw observations (..., obs_dim)."""
        if self.normaliser is None:
            return obs.to(self.device)
        return self.normaliser(obs)

    def outputs(self, observed: Tensor) -> Tensor:
        """Means or logits. Denormals are flushed to zero meanwhile."""
        with flushed_denormals(self.device):
            return self.model.outputs(observed)

    def step(self, observed: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """A recurrent policy's outputs (N, output_dim), and its next states (N, state_dim)."""
        with flushed_denormals(self.device):
            return self.model.step(observed, states)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Actions for the given noise."""
        return self.model.head.sample(outputs, noise)

    def noise(self, num_steps: int, num_envs: int, *, seed: int, first_env_index: int, number: int) -> Tensor:
        """Noise for ``sample`` or for noisy layers, (T, N, noise_dim) float32, on the policy's device.

        ``number``: of the rollout, or of the block of steps: each has its own noise. Of noisy layers it is one sample of the
        weights for each environment and rollout: the paper draws them anew after each replay step, and keeps them between
        two (Fortunato et al. 2018, §3.1).
        """
        if self._has_noisy_layers:
            drawn = exploration_noise(
                seed=seed, first_env_index=first_env_index, num_envs=num_envs, iteration=number,
                num_steps=1, dim=self.noise_dim, gumbel=False,
            ).expand(num_steps, -1, -1)  # fmt: skip
        else:
            drawn = self.model.head.noise(
                num_steps, num_envs, seed=seed, first_env_index=first_env_index, number=number
            )
        return drawn.to(self.device)

    def mode(self, outputs: Tensor) -> Tensor:
        """Most likely actions."""
        return self.model.head.mode(outputs)

    def environment_actions(self, actions: Tensor) -> Tensor:
        """What the environment receives for these actions."""
        return self.model.head.environment_actions(actions)

    def acting(self, rollout: Rollout, noise: Tensor) -> Acting | None:
        """A compiled acting kernel, or noisy layers; None on a GPU, for another model, or without a compiler."""
        if self._has_noisy_layers:
            return ActingByNoisyLayers(self, rollout, noise)
        return compiled_acting(self.tensors(), rollout, noise) if self._fits_kernels else None

    def tensors(self) -> PolicyTensors:
        """Views of the tensors of a policy whose model fits compiled kernels."""
        model, normaliser = self.model, self.normaliser
        assert isinstance(model, ActorCritic)
        layers = [layer for layer in model.policy.children() if isinstance(layer, nn.Linear)]
        return PolicyTensors(
            weights=tuple(layer.weight.detach() for layer in layers),
            biases=tuple(layer.bias.detach() for layer in layers),
            activation=model.activation,
            shift=None if normaliser is None else normaliser.shift,
            scale=None if normaliser is None else normaliser.scale,
            clip=math.inf if normaliser is None else normaliser.clip,
            std=model.head.log_std.detach().exp() if isinstance(model.head, GaussianHead) else None,
        )


class ActingByNoisyLayers:
    """Implements Acting with a model whose layers take noise: greedily, each environment with a sample of the weights."""

    def __init__(self, policy: NetworkPolicy, rollout: Rollout, noise: Tensor) -> None:
        self._policy = policy
        self._steps = list(zip(rollout.steps(), noise.unbind(0), strict=True))

    @torch.inference_mode()
    def __call__(self, t: int, obs: Tensor) -> Tensor:
        """Fill step ``t``; returns the environment's actions on the host."""
        row, noise = self._steps[t]
        row.raw_obs.copy_(obs)
        observed = self._policy.observe(obs)
        with flushed_denormals(self._policy.device):
            outputs = self._policy.model.noisy_outputs(observed, noise)
        row.obs.copy_(observed)
        row.outputs.copy_(outputs)
        row.actions.copy_(self._policy.mode(outputs))
        return self._policy.environment_actions(row.actions).cpu()


def new_policy(spec: RunSpec, info: EnvInfo, device: torch.device) -> NetworkPolicy:
    """The initial policy of a run: the same weights in every process."""
    learning = spec.learning
    model = algorithm_model(spec.algorithm, info, spec.network, learning, spec.seed).to(device)
    columns = vector_columns(info)
    normaliser = (
        ObservationNormaliser(info.obs_dim, learning.obs_clip, device, columns=columns)
        if learning.normalize_obs and columns != ()
        else None
    )
    return NetworkPolicy(model, info, normaliser, device)


def num_parameters(policy: NetworkPolicy) -> int:
    """Number of trainable parameters of policy and value function."""
    return sum(value.numel() for value in policy.model.parameters() if value.requires_grad)


def vector_columns(info: EnvInfo) -> tuple[int, ...] | None:
    """Columns of the flat observation that are normalised: those that are not pixels; None: all."""
    if not info.obs_parts:
        return None
    first, columns = 0, []
    for part in info.obs_parts:
        columns += [] if part.is_image else list(range(first, first + part.size))
        first += part.size
    return tuple(columns)


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
