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
from rayagi.models.recurrent import RecurrentNetwork, Sequences, Unrolled

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
    """Separate policy and value networks over normalised observations. Initial weights depend on ``seed`` alone.

    A recurrent model has one flat state per environment: the policy network's, then the value network's.
    """

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
    ) -> nn.Sequential | RecurrentNetwork:
        """An MLP, after an encoder if the observation has images; its last layer follows the recurrent core, if any."""
        encoder = PartsEncoder(info.obs_parts, spec.cnn, generator) if info.obs_parts else None
        layers = mlp(
            info.obs_dim if encoder is None else encoder.num_features,
            spec.hidden,
            output_dim,
            spec.activation,
            output_gain=output_gain,
            generator=generator,
        )
        whole = layers if encoder is None else nn.Sequential(encoder, *layers)
        if spec.core == "none":
            return whole
        return RecurrentNetwork(
            nn.Sequential(*list(whole)[:-1]),
            spec.core,
            (spec.hidden[-1], spec.core_size, output_dim),
            output_gain=output_gain,
            generator=generator,
        )

    @property
    def state_dim(self) -> int:
        """Numbers of one environment's recurrent state; 0: not recurrent."""
        return sum(
            network.state_dim
            for network in (self.policy, self.value)
            if isinstance(network, RecurrentNetwork)
        )

    @property
    def fits_kernels(self) -> bool:
        """Whether the compiled kernels support this model: MLPs, and a Gaussian or categorical head."""
        return (
            isinstance(self.policy, nn.Sequential)
            and isinstance(self.policy[0], nn.Linear)
            and isinstance(self.head, GaussianHead | CategoricalHead)
        )

    def forward(self, observed: Tensor, sequences: Sequences | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (B, output_dim) and V(s) (B,) of observations (B, obs_dim); a recurrent model's are of ``sequences``."""
        return self.outputs(observed, sequences), self.values(observed, sequences)

    def outputs(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Distribution parameters: (..., obs_dim) -> (..., output_dim); a recurrent model takes (B, obs_dim)."""
        if not isinstance(self.policy, RecurrentNetwork):
            return self.policy(observed)
        assert sequences is not None
        return self.policy(observed, sequences.columns(*self._policy_columns))

    def values(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """V(s): (..., obs_dim) -> (...); a recurrent model takes (B, obs_dim)."""
        if not isinstance(self.value, RecurrentNetwork):
            return self.value(observed).squeeze(-1)
        assert sequences is not None
        return self.value(observed, sequences.columns(*self._value_columns)).squeeze(-1)

    def step(self, observed: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One step of a recurrent model: (n, obs_dim) and states (n, state_dim) -> (n, output_dim) and the next states."""
        policy, value = self._recurrent
        of_policy, of_value = states.split((policy.state_dim, value.state_dim), -1)
        outputs, of_policy = policy.step(observed, of_policy)
        _, of_value = value.step(observed, of_value)
        return outputs, torch.cat((of_policy, of_value), -1)

    def unroll_values(self, observed: Tensor, sequences: Sequences) -> Unrolled:
        """A recurrent value network's pass over observations (L, n, obs_dim); ``outputs`` are V(s), (L, n, 1)."""
        return self._recurrent[1].unroll(observed, sequences.columns(*self._value_columns))

    def step_values(self, observed: Tensor, value_states: Tensor) -> Tensor:
        """V(s) of a recurrent value network in the states of ``unroll_values``: (n, obs_dim) -> (n,)."""
        return self._recurrent[1].step(observed, value_states)[0].squeeze(-1)

    @property
    def _recurrent(self) -> tuple[RecurrentNetwork, RecurrentNetwork]:
        assert isinstance(self.policy, RecurrentNetwork)
        assert isinstance(self.value, RecurrentNetwork)
        return self.policy, self.value

    @property
    def _policy_columns(self) -> tuple[int, int]:
        return 0, self._recurrent[0].state_dim

    @property
    def _value_columns(self) -> tuple[int, int]:
        return self._recurrent[0].state_dim, self.state_dim


_ROW = 512
"""Elements per partial sum of the gradient norm."""


class FlatParameters:
    """A module's parameters and gradients as views of one flat tensor each, zero-padded to whole rows.

    The flat tensors are reduced, clipped and stepped without copies. Only float32 parameters on one device.
    """

    def __init__(
        self,
        module: nn.Module,
        memory: Callable[[int, torch.dtype], Tensor] | None = None,
        home: Tensor | None = None,
    ) -> None:
        """Turn the module's parameters and gradients into views.

        Args:
            module: its parameters become views
            memory: allocates zeroed gradient memory, such as a communicator's buffer; ignored on another device than
                the parameters'
            home: flat parameters that replace the module's, (``padded_size``,); None: a copy of the module's own
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
        """L2 norm of all gradients, (): bitwise equal on replicas with different thread counts."""
        # Partial sums of rows, each computed by one thread, fix the order of summation.
        return self.gradients.view(-1, _ROW).square().sum(1).sum().sqrt()

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Clip the gradients, whose norm is ``norm``, to ``max_norm``; 0: no clipping."""
        # g *= min(1, max_norm / (|g| + eps)).
        if max_norm > 0:
            self.gradients.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


def padded_size(module: nn.Module) -> int:
    """Elements of ``FlatParameters``: the number of parameters, rounded up to whole rows."""
    return -(-sum(p.numel() for p in module.parameters()) // _ROW) * _ROW
