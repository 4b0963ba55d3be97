"""Rollout buffer: T steps of N environments, reused in every iteration."""

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

    A rollout of a remote collector has ``log_probs`` and ``running_returns``; the learner does not use its ``obs`` and
    ``outputs``. With the simulator on a GPU, all tensors are there, and ``final_obs`` replaces ``finals``, whose size would
    need a synchronization with the host.

    Attributes:
        raw_obs: observations as the simulator returned them                (T, N, obs_dim) float32, host
        obs: normalised observations, input of the networks                 (T, N, obs_dim) float32
        outputs: distribution parameters                                    (T, N, output_dim) float32
        actions: actions taken, before a head squashes them                 (T, N, dim) float32 or int64, or (T, N) int64
        rewards: reward after each action, not scaled                       (T, N) float32, host
        terminated: the task ended on this step                             (T, N) bool, host
        truncated: the time limit cut the episode on this step              (T, N) bool, host
        last_obs: observations after the last step; the next rollout's first   (N, obs_dim) float32, host
        finals: per step with ended episodes: step, environment ids, final observations
        log_probs: log probability of each action under the behaviour policy   (T, N) float32
        running_returns: discounted return of the episode so far, at each step (T, N) float32, host
        final_obs: observation after each action, before any reset          (T, N, obs_dim) float32
        states: of a recurrent policy, before every L-th step               (T / L, N, state_dim) float32
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
    states: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        num_steps: int,
        num_envs: int,
        info: EnvInfo,
        device: torch.device,
        *,
        all_there: bool = False,
        state_shape: tuple[int, int] | None = None,
    ) -> Rollout:
        """A zeroed buffer. The simulator's tensors are on the host, the agent's on ``device``; or all on ``device``.

        ``state_shape``: sequences of an environment and ``state_dim``, for a recurrent policy.
        """
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
            states=None
            if state_shape is None
            else torch.zeros((state_shape[0], num_envs, state_shape[1]), device=device),
        )

    def steps(self) -> Iterator[StepRow]:
        """Views of each step in turn, unbound once per rollout: indexing costs as much as copying a small row."""
        fields = (getattr(self, name).unbind(0) for name in StepRow._fields)
        return map(StepRow, *fields)

    def gather_finals(self, final_obs: Tensor) -> tuple[Tensor, Tensor]:
        """Fill ``finals`` from the steps where episodes ended.

        Args:
            final_obs: final observations, valid at those steps    (T, N, obs_dim)

        Returns:
            steps and environments where episodes ended, (K,) int64 each, ordered by step, then environment.
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

    @property
    def sequence_length(self) -> int:
        """L: steps between two stored states; 1 without states, whose samples are independent."""
        return 1 if self.states is None else self.num_steps // len(self.states)
