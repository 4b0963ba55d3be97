"""Mergeable moments (count, mean, squared deviations) for observation and return statistics.

Merging follows Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"
(1979): the moments of a union from the moments of its parts, without the cancellation of sums of squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from collectives.communicator import Communicator


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of vectors; float64, on the CPU or where the batch was.

    Attributes:
        count: how many vectors            ()
        mean: their mean                   (*shape)
        m2: sum of squared deviations      (*shape)
    """

    count: Tensor
    mean: Tensor
    m2: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...] = (), device: torch.device | str = "cpu") -> Self:
        """Moments of the empty set: the neutral element of ``merged``."""
        zeros = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(count=torch.zeros((), dtype=torch.float64, device=device), mean=zeros, m2=zeros.clone())

    @classmethod
    def from_batch(cls, batch: Tensor) -> Self:
        """Moments over the first dimension of ``batch`` (B, *shape); an empty batch gives ``empty``."""
        if batch.shape[0] == 0:
            return cls.empty(tuple(batch.shape[1:]), batch.device)
        values = batch.to(torch.float64)
        count = torch.full((), float(batch.shape[0]), dtype=torch.float64, device=batch.device)
        mean = values.mean(dim=0)
        return cls(count=count, mean=mean, m2=(values - mean).square().sum(dim=0))

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        return type(self)(count=self.count.to(device), mean=self.mean.to(device), m2=self.m2.to(device))

    def clone(self) -> Self:
        """A copy."""
        return type(self)(count=self.count.clone(), mean=self.mean.clone(), m2=self.m2.clone())

    def packed(self) -> Tensor:
        """Count, mean and m2 as one vector, (1 + 2 * size,)."""
        return torch.cat([self.count.reshape(1), self.mean.reshape(-1), self.m2.reshape(-1)])

    @classmethod
    def unpacked(cls, packed: Tensor, shape: Sequence[int]) -> Self:
        """Inverse of ``packed``, for moments of vectors of this shape; views of ``packed``."""
        mean, m2 = packed[1:].view(2, *shape)
        return cls(count=packed[0], mean=mean, m2=m2)

    def variance(self) -> Tensor:
        """Population variance (*shape): m2 / count; zeros where nothing was counted."""
        return self.m2 / self.count.clamp(min=1.0)


def merged(a: Moments, b: Moments) -> Moments:
    """Moments of the union of two sets, of the same shape and device."""
    count = a.count + b.count
    share = b.count / count.clamp(min=1.0)
    delta = b.mean - a.mean
    # mean = mean_a + delta n_b / n;  m2 = m2_a + m2_b + delta^2 n_a n_b / n
    return Moments(
        count=count, mean=a.mean + delta * share, m2=a.m2 + b.m2 + delta.square() * (a.count * share)
    )


def all_merge(moments: Moments, communicator: Communicator) -> Moments:
    """Moments of the union over all members, merged in rank order, so bitwise equal on all of them.

    Every member passes moments of the same shape. One all_gather of ``1 + 2 * size`` float64.

    Raises:
        CommunicatorError: another member is missing or too late.
    """
    gathered = communicator.all_gather(moments.packed())
    union = Moments.unpacked(gathered[0], moments.mean.shape)
    for row in gathered[1:]:
        union = merged(union, Moments.unpacked(row, moments.mean.shape))
    return union
