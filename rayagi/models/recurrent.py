"""Recurrent cores: networks with an LSTM or GRU between the hidden layers and the output.

The state of an environment is one flat vector, so it passes through rollouts, channels and checkpoints like an observation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rayagi.config.spec import Core


class _InPlace(nn.RNNBase):
    """Keeps its parameters where they are: on a GPU they are views of the trainer's flat vector. [unverified on GPU]"""

    def flatten_parameters(self) -> None:
        """Nothing: torch would move them to memory of its own after every ``functional_call``."""


class _Lstm(_InPlace, nn.LSTM):
    pass


class _Gru(_InPlace, nn.GRU):
    pass


_CORES: dict[Core, type[_Lstm] | type[_Gru]] = {"lstm": _Lstm, "gru": _Gru}


@dataclass(frozen=True, slots=True)
class Sequences:
    """How B = L * n samples, time first, form n sequences of L steps.

    Attributes:
        states: before the first step              (n, state_dim)
        done: the episode ended after this step    (L, n) bool
    """

    states: Tensor
    done: Tensor

    def columns(self, begin: int, end: int) -> Sequences:
        """The same sequences with these columns of the states: those of one network."""
        return Sequences(self.states[:, begin:end], self.done)


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A network's pass over sequences.

    Attributes:
        outputs: of every step                                                     (L, n, output_dim)
        ends: step -> states after it, before the reset; steps where any episode ended   (n, state_dim) each
        last: states after the last step, zero where its episode ended             (n, state_dim)
    """

    outputs: Tensor
    ends: dict[int, Tensor]
    last: Tensor


class SequenceNetwork(nn.Module, ABC):
    """A network with a state per environment. An episode starts with a state of zeros."""

    @property
    @abstractmethod
    def state_dim(self) -> int:
        """Numbers of one environment's state."""

    def forward(self, observed: Tensor, sequences: Sequences) -> Tensor:
        """(L * n, obs_dim), time first -> (L * n, output_dim)."""
        length, count = sequences.done.shape
        return self.unroll(observed.view(length, count, -1), sequences).outputs.flatten(0, 1)

    @abstractmethod
    def step(self, observed: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One step: (n, obs_dim) and states (n, state_dim) -> (n, output_dim) and the next states."""

    @abstractmethod
    def unroll(self, observed: Tensor, sequences: Sequences) -> Unrolled:
        """All steps, (L, n, obs_dim). The state is set to zero after a step that ended the episode."""


class RecurrentNetwork(SequenceNetwork):
    """Hidden layers, an LSTM or GRU, and a linear output."""

    def __init__(
        self,
        hidden: nn.Sequential,
        core: Core,
        sizes: tuple[int, int, int],
        *,
        output_gain: float,
        generator: torch.Generator,
    ) -> None:
        """``sizes``: of the features that ``hidden`` returns, of the core, and of the output."""
        super().__init__()
        num_features, self.core_size, output_dim = sizes
        self.hidden = hidden
        self.core = _initialised_core(_CORES[core](num_features, self.core_size), generator)
        self.output = nn.utils.skip_init(nn.Linear, self.core_size, output_dim)
        nn.init.orthogonal_(self.output.weight, output_gain, generator)
        nn.init.zeros_(self.output.bias)

    @property
    def state_dim(self) -> int:
        """h of a GRU; h, then c of an LSTM."""
        return self.core_size * (2 if isinstance(self.core, nn.LSTM) else 1)

    def step(self, observed: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One step of hidden layers, core and output."""
        hidden, states = self._core(self.hidden(observed).unsqueeze(0), states)
        return self.output(hidden.squeeze(0)), states

    def unroll(self, observed: Tensor, sequences: Sequences) -> Unrolled:
        """The core's pass over each segment without an end."""
        length = len(observed)
        features = self.hidden(observed.flatten(0, 1)).view(length, observed.shape[1], -1)
        ending = sequences.done.any(1).nonzero().flatten().tolist()
        states, begin = sequences.states, 0
        parts, ends = [], {}
        for step in ending if ending and ending[-1] == length - 1 else [*ending, length - 1]:
            hidden, states = self._core(features[begin : step + 1], states)
            parts.append(hidden)
            if step in ending:
                ends[step] = states
                states = states * ~sequences.done[step].unsqueeze(-1)
            begin = step + 1
        return Unrolled(self.output(torch.cat(parts)), ends, states)

    def _core(self, features: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """(L, n, features) and states (n, state_dim) -> (L, n, core_size) and the states after the last step."""
        if isinstance(self.core, nn.LSTM):
            h, c = (part.contiguous().unsqueeze(0) for part in states.split(self.core_size, -1))
            hidden, (h, c) = self.core(features, (h, c))
            return hidden, torch.cat((h, c), -1).squeeze(0)
        hidden, h = self.core(features, states.contiguous().unsqueeze(0))
        return hidden, h.squeeze(0)


def _initialised_core(core: nn.LSTM | nn.GRU, generator: torch.Generator) -> nn.LSTM | nn.GRU:
    """Orthogonal weights for each gate and zero biases, from this generator alone; an LSTM's forget gate starts open.

    A forget bias of 1 keeps the state from fading at first (Jozefowicz et al. 2015, §2.2).
    """
    for name, parameter in core.named_parameters():
        if name.startswith("weight"):
            for gate in torch.split(parameter.data, core.hidden_size):
                nn.init.orthogonal_(gate, 1.0 if "hh" in name else math.sqrt(2), generator)
        else:
            nn.init.zeros_(parameter)
    if isinstance(core, nn.LSTM):
        # Gates are in the order input, forget, cell, output.
        core.get_parameter("bias_ih_l0").data[core.hidden_size : 2 * core.hidden_size].fill_(1.0)
    return core


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """The recurrent states of a rollout of T steps and N environments, in sequences of L steps.

    Attributes:
        states: before every L-th step             (T / L, N, state_dim)
        done: the episode ended after this step    (T, N) bool
    """

    states: Tensor
    done: Tensor

    def whole(self) -> Sequences:
        """N sequences of T steps."""
        return Sequences(self.states[0], self.done)

    def order(self) -> Tensor:
        """Flat sample indices of all sequences of L steps, time first, (T * N,): an order for ``of``."""
        samples = torch.arange(self.done.numel(), device=self.done.device)
        return samples.view(len(self.states), -1, self.done.shape[1]).transpose(0, 1).flatten()

    def of(self, order: Tensor) -> Sequences:
        """The sequences of a minibatch: flat sample indices of n sequences of L steps, time first, (L * n,)."""
        length = len(self.done) // len(self.states)
        order = order.view(length, -1)
        steps, envs = order[0] // self.done.shape[1], order[0] % self.done.shape[1]
        return Sequences(self.states[steps // length, envs], self.done.flatten()[order])
