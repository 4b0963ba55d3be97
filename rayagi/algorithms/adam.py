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
    """Steps a flat vector by torch's fused Adam, or holds what a compiled program steps it by (``native/descent.py``).

    Its tensors stay where they are: a CUDA graph may hold them.

    ``torch.optim.Adam`` makes the same steps, but imports torch's compiler first: in every process 1.8 s of a slow core, and
    30 MB.
    """

    def __init__(
        self,
        flat: FlatParameters,
        *,
        learning_rate: float,
        eps: float,
        sharded_optimizer: ShardedOptimizer | None = None,
    ) -> None:
        """Begin with moments of zero: one copy's, or its own."""
        self.flat, self.eps = flat, eps
        self.learning_rate: float | Tensor = learning_rate
        self.steps = torch.zeros((), dtype=torch.float32, device=flat.parameters.device)
        """So many were made; as torch wants it, for the correction of both moments' bias."""
        self.exp_avg = (
            torch.zeros_like(flat.gradients) if sharded_optimizer is None else sharded_optimizer.exp_avg
        )
        self.exp_avg_sq = (
            torch.zeros_like(flat.gradients) if sharded_optimizer is None else sharded_optimizer.exp_avg_sq
        )

    def set_learning_rate(self, learning_rate: float) -> None:
        """For the steps from now on, captured ones too."""
        if isinstance(self.learning_rate, Tensor):
            self.learning_rate.fill_(learning_rate)
        else:
            self.learning_rate = learning_rate

    def make_capturable(self) -> None:
        """Keep the step size on the device, where a captured step reads it."""
        self.learning_rate = torch.full((), float(self.learning_rate), device=self.steps.device)

    @torch.no_grad()
    def step(self) -> None:
        """One step along the flat gradients."""
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
        """What steps change beside the parameters, by the names that torch.optim.Adam gives them."""
        return {"step": self.steps, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def state_dict(self) -> StateDict:
        """As torch.optim.Adam's for its one parameter, without settings."""
        return {"state": {0: self.tensors()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, in place; torch.optim.Adam's from before its first step is empty."""
        saved = state["state"].get(0, {})
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name]) if saved else tensor.zero_()
