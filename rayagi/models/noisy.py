"""Linear layers with learned noise, factorised Gaussian (Fortunato et al. 2018, §3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class NoisyLinear(nn.Module):
    """y = (mu_w + sigma_w * eps_w) x + mu_b + sigma_b * eps_b, eps_w = f(eps_out) f(eps_in)^T, eps_b = f(eps_out).

    With f(x) = sgn(x) sqrt|x| (eq. 10 and 11). The noise is an argument: standard normal, one row for a whole batch or one
    for each sample, of ``noise_dim`` numbers, those of the inputs first.
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
