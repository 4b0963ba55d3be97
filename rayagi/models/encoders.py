"""Encoders: CNNs that turn a flat observation with images into features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from actors.protocols import ObsPart
from rayagi.config.spec import Cnn

LayerT = TypeVar("LayerT", nn.Conv2d, nn.Linear)


class PartsEncoder(nn.Module):
    """Splits a flat observation, encodes each image with its own CNN, and concatenates all features.

    Vectors pass through unchanged.
    """

    def __init__(self, parts: Sequence[ObsPart], cnn: Cnn, generator: torch.Generator) -> None:
        """``parts``: layout of the flat observation, in order."""
        super().__init__()
        self.parts = tuple(parts)
        make = {"nature": nature_cnn, "impala": impala_cnn}[cnn]
        self.cnns = nn.ModuleList(
            make(*part.channels_height_width, generator) for part in self.parts if part.is_image
        )
        with torch.no_grad():
            self.num_features = self(torch.zeros(1, sum(part.size for part in self.parts))).shape[-1]

    def forward(self, obs: Tensor) -> Tensor:
        """(..., obs_dim) -> (..., num_features)."""
        cnns = iter(self.cnns)
        features = []
        for part, values in zip(self.parts, obs.split([part.size for part in self.parts], -1), strict=True):
            features.append(_encoded(next(cnns), part, values) if part.is_image else values)
        return torch.cat(features, -1)


def _encoded(cnn: nn.Module, part: ObsPart, values: Tensor) -> Tensor:
    images = values.reshape(-1, *part.shape)  # (B, H, W, C), or channels first
    if part.channels_last:
        images = images.permute(0, 3, 1, 2)
    # In memory channels come last: convolutions and their gradients then take 0.7 to 0.8 of the time on a CPU.
    images = images.to(torch.float32, memory_format=torch.channels_last, copy=True).mul_(part.scale)
    return cnn(images).view(*values.shape[:-1], -1)


def nature_cnn(channels: int, height: int, width: int, generator: torch.Generator) -> nn.Sequential:
    """Three convolutions and a layer of 512 units (Mnih et al. 2015, "Human-level control", Methods).

    Images have at least ``rayagi.config.rules.NATURE_LEAST_PIXELS`` in height and width.
    """
    convolutions = nn.Sequential(
        _conv(channels, 32, 8, 4, generator),
        nn.ReLU(),
        _conv(32, 64, 4, 2, generator),
        nn.ReLU(),
        _conv(64, 64, 3, 1, generator),
        nn.ReLU(),
        nn.Flatten(),
    )
    return _with_linear(convolutions, 512, channels, height, width, generator)


def impala_cnn(channels: int, height: int, width: int, generator: torch.Generator) -> nn.Sequential:
    """Three stages of a convolution, a pooling and two residual blocks, then 256 units (Espeholt et al. 2018, Figure 3)."""
    stages: list[nn.Module] = []
    for depth_in, depth in ((channels, 16), (16, 32), (32, 32)):
        stages += [
            _conv(depth_in, depth, 3, 1, generator, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
            ResidualBlock(depth, generator),
            ResidualBlock(depth, generator),
        ]
    return _with_linear(
        nn.Sequential(*stages, nn.ReLU(), nn.Flatten()), 256, channels, height, width, generator
    )


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(relu(x)))) (Espeholt et al. 2018, Figure 3). Initially the identity: the last weights are zero."""

    def __init__(self, depth: int, generator: torch.Generator) -> None:
        super().__init__()
        self.first = _conv(depth, depth, 3, 1, generator, padding=1)
        self.second = _conv(depth, depth, 3, 1, generator, padding=1)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(B, depth, H, W) -> the same shape."""
        return x + self.second(relu(self.first(relu(x))))


def _with_linear(
    convolutions: nn.Sequential,
    units: int,
    channels: int,
    height: int,
    width: int,
    generator: torch.Generator,
) -> nn.Sequential:
    with torch.no_grad():
        features = convolutions(torch.zeros(1, channels, height, width)).shape[-1]
    linear = nn.utils.skip_init(nn.Linear, features, units)
    return nn.Sequential(*convolutions, _initialised(linear, generator), nn.ReLU())


def _conv(
    channels_in: int,
    channels_out: int,
    kernel: int,
    stride: int,
    generator: torch.Generator,
    *,
    padding: int = 0,
) -> nn.Conv2d:
    made = nn.utils.skip_init(nn.Conv2d, channels_in, channels_out, kernel, stride, padding)
    return _initialised(made, generator)


def _initialised(layer: LayerT, generator: torch.Generator) -> LayerT:
    """Orthogonal weights of gain sqrt 2 and zero biases, from this generator alone."""
    nn.init.orthogonal_(layer.weight, math.sqrt(2), generator)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
