"""Categorical distributions of the return, C51 (Bellemare et al. 2017): pure functions of a fixed support."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Support:
    """Atoms z_i = v_min + i dz, i = 0 .. num_atoms - 1, with dz = (v_max - v_min) / (num_atoms - 1)."""

    v_min: float
    v_max: float
    num_atoms: int

    @property
    def spacing(self) -> float:
        """dz."""
        return (self.v_max - self.v_min) / (self.num_atoms - 1)

    def atoms(self, device: torch.device | None = None) -> Tensor:
        """z, (num_atoms,)."""
        return torch.linspace(self.v_min, self.v_max, self.num_atoms, device=device)

    def expectation(self, probabilities: Tensor) -> Tensor:
        """E[Z] = sum_i z_i p_i: (..., num_atoms) -> (...)."""
        return probabilities @ self.atoms(probabilities.device)

    def project(self, probabilities: Tensor, returns: Tensor, discounts: Tensor) -> Tensor:
        """Distribution of returns + discounts Z, projected onto the atoms (Bellemare et al. 2017, algorithm 1).

        Args:
            probabilities: of Z          (B, num_atoms)
            returns: R                   (B,)
            discounts: gamma^n, or 0     (B,)

        Returns:
            probabilities, (B, num_atoms), with the sums of the given ones.
        """
        atoms = self.atoms(probabilities.device)
        # T z_j = clip(R + gamma z_j, v_min, v_max);  b_j = (T z_j - v_min) / dz, in [0, num_atoms - 1].
        moved = torch.addcmul(returns.unsqueeze(1), discounts.unsqueeze(1), atoms)
        # The quotient may be rounded beyond the last atom, which would leave less than nothing for the one before it.
        places = ((moved.clamp(self.v_min, self.v_max) - self.v_min) / self.spacing).clamp(
            max=self.num_atoms - 1
        )
        # l = floor(b), u = l + 1. On an atom itself b - l is 0, so no mass is lost where the paper's l = u loses it; the
        # last atom is the u of the one before it.
        lower = places.floor().long().clamp(0, self.num_atoms - 2)
        above = probabilities * (places - lower)
        # m_l += p_j (u - b_j);  m_u += p_j (b_j - l).
        projected = torch.zeros_like(probabilities).scatter_add_(1, lower, probabilities - above)
        return projected.scatter_add_(1, lower + 1, above)


def cross_entropy(targets: Tensor, log_probabilities: Tensor) -> Tensor:
    """-sum_i m_i log p_i of each row: (B, num_atoms) each -> (B,)."""
    return -(targets * log_probabilities).sum(-1)


def divergence(targets: Tensor, log_probabilities: Tensor) -> Tensor:
    """Kullback-Leibler divergence sum_i m_i log(m_i / p_i) of each row: (B, num_atoms) each -> (B,)."""
    return cross_entropy(targets, log_probabilities) + torch.xlogy(targets, targets).sum(-1)
