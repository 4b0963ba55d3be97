"""A policy's tensors, for compiled kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

ActivationName = Literal["elu", "relu", "tanh", "silu"]


@dataclass(frozen=True, slots=True)
class PolicyTensors:
    """An MLP policy with its observation normalisation and its noise scale: views of the policy's own tensors.

    Attributes:
        weights: of each linear layer                                             (out, in) float32
        biases: of each linear layer                                              (out,) float32
        activation: between layers
        shift, scale: normalised = (obs - shift) * scale; None: not normalised    (obs_dim,) float32
        clip: normalised observations are clipped to +-clip
        std: standard deviation of a Gaussian policy; None: categorical           (dim,) float32
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    activation: ActivationName
    shift: Tensor | None
    scale: Tensor | None
    clip: float
    std: Tensor | None
