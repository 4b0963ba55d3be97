"""Networks of the values of all actions (Mnih et al. 2015), with the parts of Rainbow (Hessel et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from actors.protocols import EnvInfo
from rayagi.config.spec import NetworkSpec
from rayagi.models.encoders import PartsEncoder
from rayagi.models.networks import ACTIVATIONS, orthogonal_linear

_HIDDEN_GAIN = 2**0.5


class NoisyLinear(nn.Module):
    """y = (mu_w + sigma_w * eps_w) x + mu_b + sigma_b * eps_b, eps_w = f(eps_out) f(eps_in)^T, eps_b = f(eps_out).

    With f(x) = sgn(x) sqrt|x| (Fortunato et al. 2018, §3, eq. 10 and 11). The noise is an argument: standard normal, one row
    for a whole batch or one for each sample, of ``noise_dim`` numbers, those of the inputs first.
    """

    def __init__(
        self, in_features: int, out_features: int, generator: torch.Generator, *, sigma: float = 0.5
    ) -> None:
        """Initial weights as in §3.2: mu uniform within +-1 / sqrt(in), sigma_w and sigma_b all ``sigma`` / sqrt(in)."""
        super().__init__()
        bound, shape = 1 / math.sqrt(in_features), (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound, generator=generator))
        self.weight_sigma = nn.Parameter(torch.full(shape, sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((out_features,), sigma * bound))
        self.in_features, self.noise_dim = in_features, in_features + out_features

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """(B, in) -> (B, out).

        ``noise``: (1, noise_dim), one sample of the weights for all rows; (B, noise_dim), one for each; None: the means.
        """
        if noise is None:
            return linear(x, self.weight, self.bias)
        scaled = noise.sign() * noise.abs().sqrt()  # f(eps)
        f_in, f_out = scaled[:, : self.in_features], scaled[:, self.in_features :]
        if len(noise) == 1:
            weight = torch.addcmul(self.weight, self.weight_sigma, f_out.T * f_in)
            return linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, f_out[0]))
        # (sigma_w * f_out f_in^T) x = f_out * (sigma_w (f_in * x)): no weight matrix for each row.
        return linear(x, self.weight, self.bias) + f_out * linear(
            f_in * x, self.weight_sigma, self.bias_sigma
        )


class QNetwork(nn.Module):
    """Q(s, a) of all actions, or for each the logits of a distribution of the return.

    Layers: an encoder of images, if there are any; the hidden layers but the last; then a stream of the last hidden layer
    and the outputs. A dueling network has two such streams (Wang et al. 2016, §3), of V and of the advantages.
    """

    def __init__(
        self,
        info: EnvInfo,
        spec: NetworkSpec,
        generator: torch.Generator,
        *,
        num_atoms: int = 1,
        dueling: bool = False,
        noisy_sigma: float | None = None,
    ) -> None:
        """Initial weights depend on ``generator`` alone.

        Args:
            info: of the environment
            spec: hidden layers, activation, encoder
            generator: of the initial weights
            num_atoms: of the distributions; 1: values
            dueling: whether there are two streams
            noisy_sigma: initial noise of the layers behind the encoder (sigma_0); None: layers without noise
        """
        super().__init__()

        def layers(sizes: Sequence[int], output_gain: float = _HIDDEN_GAIN) -> nn.ModuleList:
            gains = [*[_HIDDEN_GAIN] * (len(sizes) - 2), output_gain]
            return nn.ModuleList(
                orthogonal_linear(*pair, gain, generator)
                if noisy_sigma is None
                else NoisyLinear(*pair, generator, sigma=noisy_sigma)
                for pair, gain in zip(pairwise(sizes), gains, strict=False)
            )

        self.num_actions, self.num_atoms = info.action.num_choices, num_atoms
        self.encoder = PartsEncoder(info.obs_parts, spec.cnn, generator) if info.obs_parts else None
        features = info.obs_dim if self.encoder is None else self.encoder.num_features
        sizes = (features, *spec.hidden)
        self.activation = ACTIVATIONS[spec.activation]()
        self.trunk = layers(sizes[:-1])
        self.advantage = layers((*sizes[-2:], self.num_actions * num_atoms), 1.0)
        self.value = layers((*sizes[-2:], num_atoms), 1.0) if dueling else None
        self.noise_dims = [layer.noise_dim for layer in self.modules() if isinstance(layer, NoisyLinear)]
        """Numbers of noise that each layer takes, in the order of evaluation."""

    def forward(self, observed: Tensor, noise: Tensor | None = None) -> Tensor:
        """(B, obs_dim) -> (B, num_actions, num_atoms).

        ``noise``: of noisy layers, (1, sum of noise_dims) for all rows or (B, ...) for each; None: the mean weights.
        """
        parts = iter([] if noise is None else noise.split(self.noise_dims, -1))
        hidden = observed if self.encoder is None else self.encoder(observed)
        for layer in self.trunk:
            hidden = self.activation(_applied(layer, hidden, parts))
        # Not len(observed): to torch.export that is a constant.
        shape = (observed.shape[0], self.num_actions, self.num_atoms)
        advantages = self._stream(self.advantage, hidden, parts).view(shape)
        if self.value is None:
            return advantages
        # Eq. 9: Q = V + (A - mean_a A); of distributions, the logits of each atom so.
        value = self._stream(self.value, hidden, parts).unsqueeze(1)
        return value + advantages - advantages.mean(1, keepdim=True)

    def _stream(self, layers: nn.ModuleList, hidden: Tensor, parts: Iterator[Tensor]) -> Tensor:
        first, last = layers
        return _applied(last, self.activation(_applied(first, hidden, parts)), parts)


def _applied(layer: nn.Module, x: Tensor, parts: Iterator[Tensor]) -> Tensor:
    """A layer's output; a noisy one takes the next part of the noise."""
    if isinstance(layer, NoisyLinear):
        return layer(x, next(parts, None))
    return layer(x)
