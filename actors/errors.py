"""Errors of the roles. Each replays from its fields, so that it arrives as itself through Ray."""

from __future__ import annotations


class NonFiniteError(RuntimeError):
    """A NaN or infinity appeared where training cannot go on: in an observation, a reward, a loss or a gradient.

    ``iteration`` counts from 1, as progress and CSV do.
    """

    def __init__(self, quantity: str, iteration: int, where: str) -> None:
        super().__init__(quantity, iteration, where)
        self.quantity, self.iteration, self.where = quantity, iteration, where

    def __str__(self) -> str:
        return (
            f"{self.quantity} became NaN or infinite in iteration {self.iteration} ({self.where}); training stopped. "
            "A lower learning_rate, max_grad_norm or initial_log_std often helps; "
            "if an observation or reward did it, look at the environment"
        )
