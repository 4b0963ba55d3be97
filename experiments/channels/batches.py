"""Batches as the paper's two tasks make them, and what their reader does with each."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 32


@dataclass(frozen=True)
class Task:
    """Sizes of one task's experience."""

    num_envs: int
    obs_dim: int
    action_dim: int


TASKS = {"Ant": Task(64, 105, 8), "ShadowHand": Task(256, 211, 20)}
"""As in the issue: 0.95 MB and 7.7 MB a batch of 32 steps."""
STAMP = "stamp"


def make(task: Task) -> dict[str, Tensor]:
    """One batch, rows (environments) first: six fields of (num_envs, 32, ...)."""
    generator = torch.Generator().manual_seed(0)
    shape = (task.num_envs, STEPS)
    return {
        "obs": torch.randn(*shape, task.obs_dim, generator=generator),
        "actions": torch.randn(*shape, task.action_dim, generator=generator),
        "rewards": torch.randn(*shape, generator=generator),
        "terminated": torch.zeros(shape, dtype=torch.bool),
        "log_probs": torch.randn(*shape, generator=generator),
        "values": torch.randn(*shape, generator=generator),
    }


def small() -> dict[str, Tensor]:
    """A batch of 20 bytes of experience and the time at which it was sent."""
    return {"obs": torch.zeros(1, 5), STAMP: torch.zeros(1, dtype=torch.int64)}


def nbytes(rows: dict[str, Tensor]) -> int:
    """Bytes of all fields."""
    return sum(tensor.nbytes for tensor in rows.values())


def read(rows: dict[str, Tensor], expected: float | None) -> None:
    """What a reader does: sums all observations, nine tenths of the bytes, and compares.

    Raises:
        RuntimeError: they are not what was sent.
    """
    found = float(rows["obs"].sum())
    if expected is not None and found != expected:
        raise RuntimeError(f"the observations sum to {found} where {expected} was sent")


def stamp(rows: dict[str, Tensor]) -> None:
    """Write down when this is sent, on the clock that all processes of a host share."""
    rows[STAMP][0] = time.monotonic_ns()


def age_s(rows: dict[str, Tensor]) -> float:
    """How long ago it was sent."""
    return (time.monotonic_ns() - int(rows[STAMP][0])) / 1e9
