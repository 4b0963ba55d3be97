"""A policy, and critics of states and actions, for continuous off-policy algorithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm as normalise

from actors.protocols import EnvInfo
from rayagi.config.spec import Activation, NetworkSpec
from rayagi.models.exploring_heads import BoxHead
from rayagi.models.networks import ACTIVATIONS, Model, make_network
from rayagi.models.recurrent import Sequences


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


class NormalisedCritics(Critics):
    """Critics whose hidden layers are normalised: h' = activation(g (z - mean z) / std z + b) with z = h W + b'.

    Gradients are autograd's: a trace is the input, the outputs with their graph, and the outputs.
    """

    def __init__(
        self,
        count: int,
        input_dim: int,
        hidden: Sequence[int],
        output_dim: int,
        generator: torch.Generator,
        activation: Activation,
    ) -> None:
        super().__init__(count, input_dim, hidden, output_dim, generator)
        self.gains = nn.ParameterList(nn.Parameter(torch.ones((count, 1, size))) for size in hidden)
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros((count, 1, size))) for size in hidden)
        self.activation = ACTIVATIONS[activation]()

    def traced(self, obs: Tensor, actions: Tensor) -> list[Tensor]:
        """As of ``Critics``."""
        with torch.no_grad():
            inputs = torch.cat((obs, actions), -1).expand(len(self.weights[0]), -1, -1)
        inputs.requires_grad_()
        with torch.enable_grad():
            outputs = self._outputs(inputs)
        return [inputs, outputs, outputs.detach()]

    def _outputs(self, hidden: Tensor) -> Tensor:
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            if layer < len(self.gains):
                normal = normalise(hidden, hidden.shape[-1:])
                hidden = self.activation(torch.addcmul(self.shifts[layer], self.gains[layer], normal))
        return hidden

    @torch.no_grad()
    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """As of ``Critics``."""
        return self._outputs(torch.cat((obs, actions), -1).expand(len(self.weights[0]), -1, -1))

    def backward(self, trace: list[Tensor], grads: Tensor) -> None:
        """As of ``Critics``."""
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        torch.autograd.backward(trace[1], grads, inputs=list(self.parameters()))

    def action_gradients(self, trace: list[Tensor], grads: Tensor, dim: int) -> Tensor:
        """As of ``Critics``."""
        (of_inputs,) = torch.autograd.grad(trace[1], trace[0], grads)
        return of_inputs[..., -dim:].sum(0)


def _normalised(network: nn.Sequential) -> nn.Sequential:
    """A perceptron with a layer normalisation behind each linear layer but the last."""
    layers: list[nn.Module] = []
    for layer in network:
        layers.append(layer)
        if isinstance(layer, nn.Linear) and layer is not network[-1]:
            layers.append(nn.LayerNorm(layer.out_features))
    return nn.Sequential(*layers)


_NUM_CRITICS = 2
"""Of the paper's clipped double Q-learning (Fujimoto et al. 2018)."""


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
        critic_hidden: Sequence[int] | None = None,
        critic_outputs: int = 1,
        layer_norm: bool = False,
    ) -> None:
        """``critic_hidden``: hidden layers of the critics; None: those of the policy. ``layer_norm``: of both."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.policy = make_network(info, network, head.num_outputs, 0.01, generator)
        sizes = _NUM_CRITICS, info.obs_dim + info.action.dim, critic_hidden or network.hidden, critic_outputs
        if layer_norm:
            assert isinstance(self.policy, nn.Sequential)  # other networks are refused
            self.policy = _normalised(self.policy)
            self.critics: Critics = NormalisedCritics(*sizes, generator, network.activation)
        else:
            self.critics = Critics(*sizes, generator)
        self.head = head

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
