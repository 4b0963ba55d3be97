"""Policy and value networks, and their parameters as one flat bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from actors.protocols import EnvInfo
from rayagi.config.spec import Activation, NetworkSpec
from rayagi.models.encoders import PartsEncoder
from rayagi.models.heads import CategoricalHead, GaussianHead, make_head

_ACTIVATIONS: dict[Activation, type[nn.Module]] = {
    "elu": nn.ELU,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
}


def mlp(
    input_dim: int,
    hidden: Sequence[int],
    output_dim: int,
    activation: Activation,
    *,
    output_gain: float,
    generator: torch.Generator,
) -> nn.Sequential:
    """Multilayer perceptron with orthogonal weights (gain sqrt 2; ``output_gain`` for the last layer) and zero biases."""
    sizes = [input_dim, *hidden, output_dim]
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        last = i == len(sizes) - 2
        linear = nn.utils.skip_init(
            nn.Linear, fan_in, fan_out
        )  # its default draws from torch's global generator
        nn.init.orthogonal_(linear.weight, output_gain if last else math.sqrt(2), generator)
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        if not last:
            layers.append(_ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


class ActorCritic(nn.Module):
    """Separate policy and value networks over normalised observations. Starts from ``seed`` alone."""

    def __init__(self, info: EnvInfo, spec: NetworkSpec, seed: int = 0) -> None:
        super().__init__()
        # A generator of its own: torch's global one is shared by every thread of the process.
        generator = torch.Generator().manual_seed(seed)
        self.activation = spec.activation
        self.policy = self._network(info, spec, info.action.output_dim, 0.01, generator)
        self.value = self._network(info, spec, 1, 1.0, generator)
        self.head = make_head(info.action, spec.initial_log_std)

    @staticmethod
    def _network(
        info: EnvInfo, spec: NetworkSpec, output_dim: int, output_gain: float, generator: torch.Generator
    ) -> nn.Sequential:
        """An MLP, behind an encoder where the observation has images."""
        encoder = PartsEncoder(info.obs_parts, spec.cnn, generator) if info.obs_parts else None
        layers = mlp(
            info.obs_dim if encoder is None else encoder.num_features,
            spec.hidden,
            output_dim,
            spec.activation,
            output_gain=output_gain,
            generator=generator,
        )
        return layers if encoder is None else nn.Sequential(encoder, *layers)

    @property
    def fits_kernels(self) -> bool:
        """Whether the compiled programs that act and learn know this model: MLPs, and a Gaussian or categorical head."""
        return isinstance(self.policy[0], nn.Linear) and isinstance(self.head, GaussianHead | CategoricalHead)

    def values(self, observed: Tensor) -> Tensor:
        """V(s): (..., obs_dim) -> (...)."""
        return self.value(observed).squeeze(-1)


_ROW = 512
"""Elements summed at a time for the gradient norm."""


class FlatParameters:
    """A module's parameters and gradients as views of one flat tensor each, padded with zeros to whole rows.

    One bucket to reduce, one vector to clip and step: no copies in or out. Only float32 parameters on one device.
    """

    def __init__(
        self,
        module: nn.Module,
        memory: Callable[[int, torch.dtype], Tensor] | None = None,
        home: Tensor | None = None,
    ) -> None:
        """Make the module's parameters views.

        Args:
            module: whose parameters these are
            memory: gives zeroed memory for so many gradients, as a communicator's buffer; it is used if it is on the
                parameters' device
            home: where the parameters are to be, with their values, (``padded_size``,); None: they keep those they have
        """
        parameters = list(module.parameters())
        size, dtype = padded_size(module), parameters[0].dtype
        flat = home
        if flat is None:
            padding = parameters[0].new_zeros(size - sum(p.numel() for p in parameters))
            flat = torch.cat([*(p.detach().reshape(-1) for p in parameters), padding])
        gradients = memory(size, dtype) if memory else None
        if gradients is None or gradients.device != flat.device:
            gradients = torch.zeros_like(flat)
        self.parameters, self.gradients = nn.Parameter(flat), gradients
        self.parameters.grad = gradients
        offset = 0
        for p in parameters:
            end = offset + p.numel()
            p.data, p.grad = flat[offset:end].view_as(p), gradients[offset:end].view_as(p)
            offset = end

    def norm(self) -> Tensor:
        """Of all gradients, (): row by row, each summed by one thread: replicas with other thread counts find the same."""
        return self.gradients.view(-1, _ROW).square().sum(1).sum().sqrt()

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Scale the gradients so that their norm, this one, becomes at most ``max_norm`` (0: leave them)."""
        if max_norm > 0:
            self.gradients.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


def padded_size(module: nn.Module) -> int:
    """Elements of ``FlatParameters``: all parameters in whole rows."""
    return -(-sum(p.numel() for p in module.parameters()) // _ROW) * _ROW
