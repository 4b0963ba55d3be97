"""Networks as users write them."""

import torch
from torch import Tensor, nn


class Plain(nn.Module):
    """An MLP with a common trunk; its weights are torch's defaults."""

    def __init__(self, obs_dim: int, output_dim: int, width: int = 16) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs_dim, width), nn.Tanh())
        self.outputs, self.value = nn.Linear(width, output_dim), nn.Linear(width, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(obs)
        return self.outputs(hidden), self.value(hidden).squeeze(-1)


class Masking(Plain):
    """Never takes the first choice where the first observation is positive, nor the last one where it is not."""

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        outputs, values = super().forward(obs)
        masked, positive = torch.zeros_like(outputs, dtype=torch.bool), obs[:, 0] > 0
        masked[:, 0], masked[:, -1] = positive, ~positive
        return outputs.masked_fill(masked, -torch.inf), values


class Remembering(nn.Module):
    """A GRU cell."""

    state_dim = 6

    def __init__(self, obs_dim: int, output_dim: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(obs_dim, self.state_dim)
        self.outputs, self.value = nn.Linear(self.state_dim, output_dim), nn.Linear(self.state_dim, 1)

    def forward(self, obs: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = self.cell(obs, states)
        return self.outputs(states), self.value(states).squeeze(-1), states


class Remembered(nn.Module):
    """Half of the last state, and the observation: for exact arithmetic."""

    state_dim = 1

    def __init__(self, obs_dim: int, output_dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(output_dim))

    def forward(self, obs: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = states / 2 + obs[:, :1]
        return states * self.scale, 10 * states.squeeze(-1) * self.scale[0], states


class Fourier(nn.Module):
    """Random features, which are no part of its state, and layers that take their sizes from the first call."""

    def __init__(self, obs_dim: int, output_dim: int) -> None:
        super().__init__()
        self.frequencies = torch.randn(obs_dim, 8)
        self.outputs, self.value = nn.LazyLinear(output_dim), nn.LazyLinear(1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        features = (obs @ self.frequencies).sin()
        return self.outputs(features), self.value(features).squeeze(-1)


class LazilyNormalised(Fourier):
    """With a batch normalisation that takes its size from the first call."""

    def __init__(self, obs_dim: int, output_dim: int) -> None:
        super().__init__(obs_dim, output_dim)
        self.norm = nn.LazyBatchNorm1d()

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.norm(obs))
