"""Networks with an optimiser each, reduced over trainers, for algorithms that step several; target networks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from actors.protocols import StateDict
from collectives.communicator import Communicator
from rayagi.algorithms.gradient_updater import BETAS, FlatAdam, on_host, timed_collective
from rayagi.config.learning import LearningSpec
from rayagi.models.networks import FlatParameters, Model


class ParameterGroup:
    """One network as a flat vector: its gradients are reduced, clipped and stepped by Adam."""

    def __init__(
        self,
        module: nn.Module,
        communicator: Communicator,
        spec: LearningSpec,
        learning_rate: float,
        betas: tuple[float, float],
    ) -> None:
        """Collective: the module has rank 0's parameters on every trainer afterwards."""
        self.flat = FlatParameters(module, communicator.buffer)
        self.adam = FlatAdam(self.flat, learning_rate=learning_rate, eps=spec.adam_eps, betas=betas)
        self._communicator, self._max_grad_norm = communicator, spec.max_grad_norm
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
            with timed_collective(self, "all_reduce"):
                self._communicator.all_reduce(self.flat.gradients, "mean")

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


class ParameterGroups:
    """A model whose networks are stepped one by one, and the target networks that follow some of them.

    All replicas make the same steps: they start with rank 0's parameters, and reduced gradients are bitwise equal.
    """

    betas: ClassVar[tuple[float, float]] = BETAS
    """Of Adam, of all networks."""

    def __init__(self, model: Model, spec: LearningSpec, communicator: Communicator) -> None:
        """``spec``: epsilon of Adam, and the bound of each network's gradient norm."""
        self.model, self.spec, self.communicator = model, spec, communicator
        self.steps = 0
        """Gradient steps so far."""
        self.groups: dict[str, ParameterGroup] = {}
        """Networks that are stepped, by name."""
        self.targets: dict[str, TargetNetwork] = {}
        """Networks that follow others, by name."""

    @property
    def sync_s(self) -> float:
        """Seconds in gradient reduction since ``begin_update``."""
        return sum(group.sync_s for group in self.groups.values())

    def begin_update(self) -> None:
        """Count the seconds of gradient reduction from 0."""
        for group in self.groups.values():
            group.sync_s = 0.0

    def _group(self, name: str, module: nn.Module, learning_rate: float) -> ParameterGroup:
        """Give a network its optimiser. Collective."""
        self.groups[name] = ParameterGroup(module, self.communicator, self.spec, learning_rate, self.betas)
        return self.groups[name]

    def _target(self, name: str, module: nn.Module, source: ParameterGroup) -> TargetNetwork:
        """A copy of a network that follows it."""
        self.targets[name] = TargetNetwork(copy.deepcopy(module), source.flat)
        return self.targets[name]

    def follow(self, tau: float) -> None:
        """Polyak averaging of all target networks."""
        for target in self.targets.values():
            target.follow(tau)

    def state_dict(self) -> StateDict:
        """Model, targets, optimisers and the number of steps; equal on every replica."""
        return {
            "model": on_host(self.model.state_dict()),
            "steps": self.steps,
            "optimisers": on_host({name: group.adam.state_dict() for name, group in self.groups.items()}),
            "targets": on_host({name: target.module.state_dict() for name, target in self.targets.items()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore in place: parameters stay views of their flat vectors.

        Optimisers that the state lacks begin anew, and targets that it lacks begin equal to their networks.
        """
        self.model.load_state_dict(state["model"])
        self.steps = int(state["steps"])
        for name, group in self.groups.items():
            group.adam.load_state_dict(state.get("optimisers", {}).get(name, {"state": {}}))
            group.flat.gradients.zero_()  # padding included: a gradient that was not finite would stay there
        for name, target in self.targets.items():
            if name in state.get("targets", {}):
                target.module.load_state_dict(state["targets"][name])
            else:
                target.follow(1.0)
