"""A network with an optimiser of its own, reduced over trainers, for algorithms that step several; target networks."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from collectives.communicator import Communicator
from rayagi.algorithms.gradient_updater import FlatAdam
from rayagi.models.networks import FlatParameters


class ParameterGroup:
    """One network as a flat vector: its gradients are reduced, clipped and stepped by Adam."""

    def __init__(
        self,
        module: nn.Module,
        communicator: Communicator,
        *,
        learning_rate: float,
        eps: float,
        max_grad_norm: float,
    ) -> None:
        """Collective: the module has rank 0's parameters on every trainer afterwards."""
        self.flat = FlatParameters(module, communicator.buffer)
        self.adam = FlatAdam(self.flat, learning_rate=learning_rate, eps=eps)
        self._communicator, self._max_grad_norm = communicator, max_grad_norm
        self._learning_rate = learning_rate
        self.sync_s = 0.0
        """Seconds in collectives since this was last set to 0."""
        communicator.broadcast(self.flat.parameters.data)

    def set_learning_rate(self, factor: float) -> None:
        """Set the learning rate to this part of the first one."""
        self.adam.set_learning_rate(factor * self._learning_rate)

    def reduce(self) -> None:
        """The mean of the gradients over all trainers, in place."""
        if self._communicator.world_size > 1:
            started = time.perf_counter()
            self._communicator.all_reduce(self.flat.gradients, "mean")
            self.sync_s += time.perf_counter() - started

    def step(self) -> Tensor:
        """One step on the mean of all trainers' gradients. Returns its norm before clipping, ()."""
        self.reduce()
        norm = self.flat.norm()
        self.flat.clip(norm, self._max_grad_norm)
        self.adam.step()
        return norm


class TargetNetwork:
    """A network that follows another one by Polyak averaging."""

    def __init__(self, module: nn.Module, source: FlatParameters) -> None:
        """``module``: of the same parameters as that of ``source``; it starts equal to it."""
        self.module, self._source = module.requires_grad_(False), source
        self.flat = FlatParameters(module)
        self.flat.parameters.requires_grad_(False)
        self.flat.parameters.copy_(source.parameters.detach())

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """target += tau (network - target)."""
        self.flat.parameters.lerp_(self._source.parameters, tau)
