"""A policy's numbers, for programs other than torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

ActivationName = Literal["elu", "relu", "tanh", "silu"]


@dataclass(frozen=True, slots=True)
class PolicyTensors:
    """A multilayer perceptron, what it sees, and how it samples; views of a policy's own tensors where these are.

    Attributes:
        weights: of each linear map                                     (out, in) float32
        biases: of each                                                 (out,) float32
        activation: between maps
        shift, scale: observed = (obs - shift) * scale; None: as it is   (obs_dim,) float32
        clip: observed values are within +-clip, where there is a scale
        std: standard deviation of each real; None: choices              (dim,) float32
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    activation: ActivationName
    shift: Tensor | None
    scale: Tensor | None
    clip: float
    std: Tensor | None
