"""Storage of one rollout, reused from iteration to iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from actors.protocols import EnvInfo


class StepRow(NamedTuple):
    """Views of one step of a rollout; names and shapes as in Rollout without the first dimension."""

    raw_obs: Tensor
    obs: Tensor
    outputs: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor


class Episodes(NamedTuple):
    """Undiscounted returns and lengths of episodes that ended, in order."""

    returns: list[float]
    lengths: list[int]


@dataclass(slots=True)
class Rollout:
    """T steps of N environments, time first. ``outputs`` are the policy's distribution parameters.

    Where simulator and agent are elsewhere, ``log_probs`` and ``running_returns`` are given, and a learner looks at neither
    ``obs`` nor ``outputs``. Where the simulator is on a device too, everything is there, and ``final_obs`` is given in place
    of ``finals``, for whose size the host would have to wait.

    Attributes:
        raw_obs: observations as the simulator gave them                    (T, N, obs_dim) float32, host
        obs: what the networks saw                                          (T, N, obs_dim) float32
        outputs: distribution parameters                                    (T, N, output_dim) float32
        actions: what was done                                              (T, N, dim) float32 or int64, or (T, N) int64
        rewards: reward after each action, as the simulator gave it         (T, N) float32, host
        terminated: the task ended on this step                             (T, N) bool, host
        truncated: the time limit cut the episode on this step              (T, N) bool, host
        last_obs: what the next rollout will act on first                   (N, obs_dim) float32, host
        finals: per ended episode batch: step, environment ids, true last observations
        log_probs: log probability of each action under the policy that took it   (T, N) float32
        running_returns: discounted return of the episode so far, at each step    (T, N) float32, host
        final_obs: what followed each action, before any reset              (T, N, obs_dim) float32
    """

    raw_obs: Tensor
    obs: Tensor
    outputs: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    last_obs: Tensor
    finals: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    log_probs: Tensor | None = None
    running_returns: Tensor | None = None
    final_obs: Tensor | None = None

    @classmethod
    def allocate(
        cls, num_steps: int, num_envs: int, info: EnvInfo, device: torch.device, *, all_there: bool = False
    ) -> Rollout:
        """Empty storage; device tensors on ``device``, the simulator's side on the host, or everything there."""
        host = device if all_there else torch.device("cpu")
        shape = (num_steps, num_envs)
        action = info.action
        dtype = torch.int64 if action.is_discrete else torch.float32
        return cls(
            raw_obs=torch.zeros((*shape, info.obs_dim), device=host),
            obs=torch.zeros((*shape, info.obs_dim), device=device),
            outputs=torch.zeros((*shape, action.output_dim), device=device),
            actions=torch.zeros((*shape, *action.shape), dtype=dtype, device=device),
            rewards=torch.zeros(shape, device=host),
            terminated=torch.zeros(shape, dtype=torch.bool, device=host),
            truncated=torch.zeros(shape, dtype=torch.bool, device=host),
            last_obs=torch.zeros((num_envs, info.obs_dim), device=host),
            final_obs=torch.zeros((*shape, info.obs_dim), device=device) if all_there else None,
        )

    def steps(self) -> Iterator[StepRow]:
        """Views of each step in turn: cut once per rollout, since indexing costs as much as copying a small row."""
        fields = (getattr(self, name).unbind(0) for name in StepRow._fields)
        return map(StepRow, *fields)

    def gather_finals(self, final_obs: Tensor) -> tuple[Tensor, Tensor]:
        """Fill ``finals`` from where episodes ended.

        Args:
            final_obs: true last observations, there    (T, N, obs_dim)

        Returns:
            steps and environments where episodes ended, (K,) int64 each, in the order of steps and then environments.
        """
        steps, ids = (self.terminated | self.truncated).nonzero(as_tuple=True)
        at, counts = torch.unique_consecutive(steps, return_counts=True)
        sizes = counts.tolist()
        parts = ids.split(sizes), final_obs[steps, ids].split(sizes)
        self.finals = list(zip(at.tolist(), *parts, strict=True))
        return steps, ids

    @property
    def num_steps(self) -> int:
        """T."""
        return self.rewards.shape[0]

    @property
    def num_envs(self) -> int:
        """N."""
        return self.rewards.shape[1]
