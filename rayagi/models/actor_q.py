"""A policy, and critics of states and actions, for continuous off-policy algorithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from actors.protocols import EnvInfo
from rayagi.config.spec import NetworkSpec
from rayagi.models.exploring_heads import BoxHead
from rayagi.models.networks import Model, make_network
from rayagi.models.recurrent import Sequences, Unrolled


class Critics(nn.Module):
    """K perceptrons of the same sizes with rectified linear units, evaluated together as batched matrix products.

    Initial weights are orthogonal, as of ``networks.mlp``.
    """

    def __init__(
        self, count: int, input_dim: int, hidden: Sequence[int], output_dim: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        sizes = [input_dim, *hidden, output_dim]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            gain = 1.0 if layer == len(sizes) - 2 else math.sqrt(2)
            weight = torch.empty((count, fan_in, fan_out))
            for each in weight:
                nn.init.orthogonal_(each, gain, generator)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros((count, 1, fan_out))))

    @torch.no_grad()
    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Outputs of each critic, (K, B, output_dim), without autograd.

        Args:
            obs: normalised         (B, obs_dim)
            actions: in [-1, 1]     (B, dim)
        """
        return self.traced(obs, actions)[-1]

    @torch.no_grad()
    def traced(self, obs: Tensor, actions: Tensor) -> list[Tensor]:
        """The input of each layer, (K, B, fan_in), and the outputs. For ``backward`` and ``action_gradients``."""
        trace = [torch.cat((obs, actions), -1).expand(len(self.weights[0]), -1, -1)]
        for weight, bias in zip(self.weights, self.biases, strict=True):
            # h' = max(0, h W + b); the last layer is linear.
            hidden = torch.baddbmm(bias, trace[-1], weight)
            trace.append(hidden.relu_() if len(trace) < len(self.weights) else hidden)
        return trace

    @torch.no_grad()
    def backward(self, trace: list[Tensor], grads: Tensor) -> None:
        """Overwrite the parameters' gradients, given those of the outputs, (K, B, output_dim).

        By hand: autograd would take a third of the time of a step of networks this small.
        """
        for layer in reversed(range(len(self.weights))):
            weight, bias = self.weights[layer], self.biases[layer]
            assert weight.grad is not None
            assert bias.grad is not None
            # dW = h^T dz, db = sum over the batch of dz.
            torch.bmm(trace[layer].mT, grads, out=weight.grad)
            torch.sum(grads, 1, keepdim=True, out=bias.grad)
            if layer:
                grads = self._grads_below(trace, grads, layer)

    @torch.no_grad()
    def action_gradients(self, trace: list[Tensor], grads: Tensor, dim: int) -> Tensor:
        """Gradients of the actions, (B, dim), given those of the outputs, (K, B, output_dim)."""
        for layer in reversed(range(1, len(self.weights))):
            grads = self._grads_below(trace, grads, layer)
        # Of the inputs, (obs, actions), only the actions' columns: da = sum over critics of dz W_a^T.
        return torch.bmm(grads, self.weights[0][:, -dim:].mT).sum(0)

    def _grads_below(self, trace: list[Tensor], grads: Tensor, layer: int) -> Tensor:
        """dz of the layer below: (dz W^T) where its unit is active."""
        below = torch.bmm(grads, self.weights[layer].mT)
        return torch.ops.aten.threshold_backward(below, trace[layer], 0.0)


class ActorQ(Model):
    """A policy pi(s) and critics Q_i(s, a). Initial weights depend on ``seed`` alone."""

    head: BoxHead

    def __init__(
        self,
        info: EnvInfo,
        network: NetworkSpec,
        head: BoxHead,
        *,
        seed: int,
        critics: int = 2,
        critic_hidden: Sequence[int] | None = None,
        critic_outputs: int = 1,
    ) -> None:
        """``critic_hidden``: hidden layers of the critics; None: those of the policy."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.policy = make_network(info, network, head.num_outputs, 0.01, generator)
        self.critics = Critics(
            critics,
            info.obs_dim + info.action.dim,
            critic_hidden or network.hidden,
            critic_outputs,
            generator,
        )
        self.head = head

    @property
    def state_dim(self) -> int:
        """Not recurrent."""
        return 0

    def policy_parameters(self) -> list[nn.Parameter]:
        """Those of the policy network."""
        return list(self.policy.parameters())

    def outputs(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Of the policy network."""
        return self.policy(observed)

    def values(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """min_i Q_i(s, a) of the policy's mode a."""
        flat = observed.reshape(-1, observed.shape[-1])
        actions = self.head.normalised(self.head.mode(self.outputs(flat)))
        return self.critics(flat, actions).amin(0).mean(-1).view(observed.shape[:-1])

    def step(self, observed: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Not recurrent: the states pass through."""
        return self.outputs(observed), states

    def unroll_values(self, observed: Tensor, sequences: Sequences) -> Unrolled:
        """Not recurrent."""
        raise NotImplementedError("off-policy networks have no states")

    def step_values(self, observed: Tensor, value_states: Tensor) -> Tensor:
        """Not recurrent."""
        return self.values(observed)
