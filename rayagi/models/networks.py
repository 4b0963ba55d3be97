"""Policy and value networks, and their parameters as one flat bucket."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from actors.protocols import EnvInfo
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.learning import LearningSpec
from rayagi.config.spec import Activation, NetworkSpec
from rayagi.models.columns import policy_view
from rayagi.models.encoders import PartsEncoder
from rayagi.models.heads import CategoricalHead, GaussianHead, Head, StateGaussianHead, make_head
from rayagi.models.recurrent import RecurrentNetwork, SequenceNetwork, Sequences, Unrolled
from rayagi.models.user_module import user_model

ACTIVATIONS: dict[Activation, type[nn.Module]] = {
    "elu": nn.ELU,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
}


def orthogonal_linear(fan_in: int, fan_out: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """A linear layer with orthogonal weights of this gain and zero biases, from this generator alone."""
    linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out)  # its default draws from torch's global generator
    nn.init.orthogonal_(linear.weight, gain, generator)
    nn.init.zeros_(linear.bias)
    return linear


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
        layers.append(orthogonal_linear(fan_in, fan_out, output_gain if last else math.sqrt(2), generator))
        if not last:
            layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


class Model(nn.Module, ABC):
    """What acts and is trained: the action distribution and the value of normalised observations.

    A recurrent model has one flat state per environment. B = L * n samples, time first, are ``sequences``.
    """

    head: Head

    @property
    def state_dim(self) -> int:
        """Numbers of one environment's recurrent state; 0: not recurrent."""
        return 0

    @property
    def fits_kernels(self) -> bool:
        """Whether the compiled kernels support this model."""
        return False

    @property
    def layer_noise_dim(self) -> int:
        """Numbers of noise that one environment's layers take while it explores; 0: its layers have no noise."""
        return 0

    def policy_parameters(self) -> list[nn.Parameter]:
        """The parameters that the actions depend on."""
        return list(self.parameters())

    def noisy_outputs(self, observed: Tensor, noise: Tensor) -> Tensor:
        """Outputs (N, output_dim) of layers with noise, (N, layer_noise_dim), for N environments' observations."""
        raise NotImplementedError("the layers of this model have no noise")

    def forward(self, observed: Tensor, sequences: Sequences | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (B, output_dim) and V(s) (B,) of observations (B, obs_dim); a recurrent model's are of ``sequences``."""
        return self.outputs(observed, sequences), self.values(observed, sequences)

    @abstractmethod
    def outputs(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Distribution parameters: (..., obs_dim) -> (..., output_dim); a recurrent model takes (B, obs_dim)."""

    @abstractmethod
    def values(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """V(s): (..., obs_dim) -> (...); a recurrent model takes (B, obs_dim)."""

    def step(self, observed: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One step of a recurrent model: (n, obs_dim) and states (n, state_dim) -> (n, output_dim) and the next states."""
        raise NotImplementedError("this model is not recurrent")

    def unroll_values(self, observed: Tensor, sequences: Sequences) -> Unrolled:
        """A recurrent model's values of observations (L, n, obs_dim); ``outputs`` are V(s), (L, n, 1)."""
        raise NotImplementedError("this model is not recurrent")

    def step_values(self, observed: Tensor, value_states: Tensor) -> Tensor:
        """V(s) of a recurrent model in the states of ``unroll_values``: (n, obs_dim) -> (n,)."""
        raise NotImplementedError("this model is not recurrent")


class ActorCritic(Model):
    """Separate policy and value networks. Initial weights depend on ``seed`` alone.

    The state of a recurrent model is the policy network's, then the value network's.
    """

    def __init__(self, info: EnvInfo, spec: NetworkSpec, seed: int = 0) -> None:
        super().__init__()
        # A generator of its own: torch's global one is shared by every thread of the process.
        generator = torch.Generator().manual_seed(seed)
        self.activation = spec.activation
        head = make_head(info.action, spec.initial_log_std, spec.head, free_log_std=spec.free_log_std)
        seen, columns = policy_view(info, spec.critic_only)
        self.policy = make_network(
            seen, spec, head.num_outputs, 0.01, generator, columns if spec.critic_only else None
        )
        self.value = make_network(info, spec, 1, 1.0, generator)
        _set_initial_log_std(self.policy, head, spec)
        self.head = head

    @property
    def state_dim(self) -> int:
        """Of both networks."""
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
            and type(self.head) in (GaussianHead, CategoricalHead)
        )

    def policy_parameters(self) -> list[nn.Parameter]:
        """Those of the policy network and of the head."""
        return [*self.policy.parameters(), *self.head.parameters()]

    def outputs(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Of the policy network."""
        if not isinstance(self.policy, RecurrentNetwork):
            return self.policy(observed)
        assert sequences is not None
        return self.policy(observed, sequences.columns(*self._policy_columns))

    def values(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Of the value network."""
        if not isinstance(self.value, RecurrentNetwork):
            return self.value(observed).squeeze(-1)
        assert sequences is not None
        return self.value(observed, sequences.columns(*self._value_columns)).squeeze(-1)

    def step(self, observed: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One step of both networks."""
        policy, value = self._recurrent
        of_policy, of_value = states.split((policy.state_dim, value.state_dim), -1)
        outputs, of_policy = policy.step(observed, of_policy)
        _, of_value = value.step(observed, of_value)
        return outputs, torch.cat((of_policy, of_value), -1)

    def unroll_values(self, observed: Tensor, sequences: Sequences) -> Unrolled:
        """Of the value network, with its states alone."""
        return self._recurrent[1].unroll(observed, sequences.columns(*self._value_columns))

    def step_values(self, observed: Tensor, value_states: Tensor) -> Tensor:
        """Of the value network, with its states alone."""
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


class JointActorCritic(Model):
    """One network for policy and value: its outputs are the distribution parameters, then V(s)."""

    def __init__(self, network: nn.Module, head: Head) -> None:
        """``network``: (..., obs_dim) -> (..., output_dim + 1), or a SequenceNetwork of output_dim + 1."""
        super().__init__()
        self.network, self.head = network, head

    @property
    def state_dim(self) -> int:
        """Of the network."""
        return self.network.state_dim if isinstance(self.network, SequenceNetwork) else 0

    def forward(self, observed: Tensor, sequences: Sequences | None = None) -> tuple[Tensor, Tensor]:
        """Both, in one pass."""
        joint = self._joint(observed, sequences)
        return joint[..., :-1], joint[..., -1]

    def outputs(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """All columns but the last."""
        return self._joint(observed, sequences)[..., :-1]

    def values(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """The last column."""
        return self._joint(observed, sequences)[..., -1]

    def step(self, observed: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the network."""
        joint, states = self._recurrent.step(observed, states)
        return joint[..., :-1], states

    def unroll_values(self, observed: Tensor, sequences: Sequences) -> Unrolled:
        """The last column of a pass."""
        return replace(found := self._recurrent.unroll(observed, sequences), outputs=found.outputs[..., -1:])

    def step_values(self, observed: Tensor, value_states: Tensor) -> Tensor:
        """The last column of a step."""
        return self._recurrent.step(observed, value_states)[0][..., -1]

    def _joint(self, observed: Tensor, sequences: Sequences | None) -> Tensor:
        return self.network(observed) if sequences is None else self.network(observed, sequences)

    @property
    def _recurrent(self) -> SequenceNetwork:
        assert isinstance(self.network, SequenceNetwork)
        return self.network


def algorithm_model(
    algorithm: str, info: EnvInfo, network: NetworkSpec, settings: LearningSpec, seed: int
) -> Model:
    """The initial model of an algorithm: the same weights in every process.

    Raises:
        ConfigError: the user's module cannot be used.
    """
    own = DEFINITIONS[algorithm].model
    if own is None:
        return make_model(info, network, seed)
    made: Model = resolve_name(own)(info, network, settings, seed)
    return made


def make_model(info: EnvInfo, spec: NetworkSpec, seed: int = 0) -> Model:
    """A policy and a value network for an environment, with initial weights: the same in every process.

    Raises:
        ConfigError: the user's module cannot be used.
    """
    if spec.module is None and not spec.shared:
        return ActorCritic(info, spec, seed)
    if spec.module is not None:
        return JointActorCritic(*user_model(info, spec, seed))
    head = make_head(info.action, spec.initial_log_std, spec.head, free_log_std=spec.free_log_std)
    generator = torch.Generator().manual_seed(seed)
    network = make_network(info, spec, head.num_outputs + 1, 0.01, generator)
    nn.init.orthogonal_(_last_layer(network).weight.data[-1:], 1.0, generator)  # V(s)
    _set_initial_log_std(network, head, spec)
    return JointActorCritic(network, head)


def _last_layer(network: nn.Module) -> nn.Linear:
    last = network.output if isinstance(network, RecurrentNetwork) else network[-1]  # type: ignore[index]
    assert isinstance(last, nn.Linear)
    return last


def _set_initial_log_std(network: nn.Module, head: Head, spec: NetworkSpec) -> None:
    """Where the network gives log standard deviations, behind the means, its biases are their start."""
    if isinstance(head, StateGaussianHead):
        _last_layer(network).bias.data[head.num_outputs // 2 : head.num_outputs] = spec.initial_log_std


class Columns(nn.Module):
    """Some columns of an observation."""

    index: Tensor

    def __init__(self, columns: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("index", torch.tensor(columns), persistent=False)

    def forward(self, observed: Tensor) -> Tensor:
        """(..., obs_dim) -> (..., number of columns)."""
        return observed.index_select(-1, self.index)


def make_network(
    info: EnvInfo,
    spec: NetworkSpec,
    output_dim: int,
    output_gain: float,
    generator: torch.Generator,
    columns: Sequence[int] | None = None,
) -> nn.Sequential | RecurrentNetwork:
    """An MLP, after an encoder if the observation has images; its last layer follows the recurrent core, if any.

    ``info`` describes what the network sees: the whole observation, or these ``columns`` of it.
    """
    encoder = PartsEncoder(info.obs_parts, spec.cnn, generator) if info.obs_parts else None
    layers = mlp(
        info.obs_dim if encoder is None else encoder.num_features,
        spec.hidden,
        output_dim,
        spec.activation,
        output_gain=output_gain,
        generator=generator,
    )
    before = [*([] if columns is None else [Columns(columns)]), *([] if encoder is None else [encoder])]
    whole = nn.Sequential(*before, *layers) if before else layers
    if spec.core == "none":
        return whole
    return RecurrentNetwork(
        nn.Sequential(*list(whole)[:-1]),
        spec.core,
        (spec.hidden[-1], spec.core_size, output_dim),
        output_gain=output_gain,
        generator=generator,
    )


_ROW = 512
"""Elements per partial sum of the gradient norm."""


class FlatParameters:
    """A module's parameters and gradients as views of one flat tensor each, zero-padded to whole rows.

    The flat tensors are reduced, clipped and stepped without copies. Only float32 parameters on one device.
    """

    def __init__(self, module: nn.Module, memory: Callable[[int, torch.dtype], Tensor] | None = None) -> None:
        """Turn the module's parameters and gradients into views.

        Args:
            module: its parameters become views
            memory: allocates zeroed gradient memory, such as a communicator's buffer; ignored on another device than
                the parameters'
        """
        parameters = list(module.parameters())
        padding = parameters[0].new_zeros(-sum(p.numel() for p in parameters) % _ROW)
        flat = torch.cat([*(p.detach().reshape(-1) for p in parameters), padding])
        gradients = memory(len(flat), flat.dtype) if memory else None
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
