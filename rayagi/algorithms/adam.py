"""Adam on one flat vector of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from actors.protocols import StateDict
from rayagi.algorithms.sharded_optimizer import ShardedOptimizer
from rayagi.models.networks import FlatParameters

BETAS = (0.9, 0.999)


class FlatAdam:
    """Steps a flat vector with torch's fused Adam, or holds the state of the compiled step (``native/optimizer_step.py``).

    Tensors are updated in place, so a CUDA graph may hold them.

    ``torch.optim.Adam`` makes the same steps, but importing it loads torch's compiler: 1.8 s of a slow core and 30 MB in
    every process.
    """

    def __init__(
        self,
        flat: FlatParameters,
        *,
        learning_rate: float,
        eps: float,
        sharded_optimizer: ShardedOptimizer | None = None,
    ) -> None:
        """Start with zero moments: those of ``sharded_optimizer``, or its own."""
        self.flat, self.eps = flat, eps
        self.learning_rate: float | Tensor = learning_rate
        self.steps = torch.zeros((), dtype=torch.float32, device=flat.parameters.device)
        """Number of steps so far, for the bias correction of both moments; a tensor, as torch requires."""
        self.exp_avg = (
            torch.zeros_like(flat.gradients) if sharded_optimizer is None else sharded_optimizer.exp_avg
        )
        self.exp_avg_sq = (
            torch.zeros_like(flat.gradients) if sharded_optimizer is None else sharded_optimizer.exp_avg_sq
        )

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of later steps, including captured ones."""
        if isinstance(self.learning_rate, Tensor):
            self.learning_rate.fill_(learning_rate)
        else:
            self.learning_rate = learning_rate

    def make_capturable(self) -> None:
        """Keep the learning rate on the device, where a captured step reads it."""
        self.learning_rate = torch.full((), float(self.learning_rate), device=self.steps.device)

    @torch.no_grad()
    def step(self) -> None:
        """One step of Adam on the flat gradients."""
        adam(
            [self.flat.parameters],
            [self.flat.gradients],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [self.steps],
            fused=True,
            capturable=isinstance(self.learning_rate, Tensor),
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=self.learning_rate,
            weight_decay=0.0,
            eps=self.eps,
            maximize=False,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Optimiser state by the names of torch.optim.Adam."""
        return {"step": self.steps, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def state_dict(self) -> StateDict:
        """State in the layout of torch.optim.Adam with one parameter, without settings."""
        return {"state": {0: self.tensors()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state in place; a state of torch.optim.Adam before its first step is empty."""
        saved = state["state"].get(0, {})
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name]) if saved else tensor.zero_()
