"""What every form of a simulator (torch, C, Warp, JAX, CUDA) takes and gives: N environments, K steps.

Reals are of one type throughout: ``EnvConfig.real``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rayagi.envs.fused.draws import MAX_STEPS
from rayagi.envs.fused.simulator import Discrete, Simulator, action_dim

NO_LIMIT = MAX_STEPS - 1
"""In place of a time limit: the longest episode that there is."""


@dataclass(slots=True)
class BatchedEnvState:
    """Everything that N environments are.

    Attributes:
        state: reals, in the order of the simulator's names          (S, N)
        elapsed: steps of the running episode                        (N,) int32
        episode: number of the running episode, from 0               (N,) int32
    """

    state: Tensor
    elapsed: Tensor
    episode: Tensor

    @classmethod
    def allocate(
        cls,
        simulator: Simulator,
        num_envs: int,
        device: torch.device | str = "cpu",
        real: torch.dtype = torch.float32,
    ) -> BatchedEnvState:
        """Before the first episode."""
        return cls(
            torch.zeros((len(simulator.state), num_envs), dtype=real, device=device),
            torch.zeros(num_envs, dtype=torch.int32, device=device),
            torch.full((num_envs,), -1, dtype=torch.int32, device=device),
        )

    def copy_(self, other: BatchedEnvState) -> None:
        """Take over another's numbers."""
        for name in ("state", "elapsed", "episode"):
            getattr(self, name).copy_(getattr(other, name))


@dataclass(slots=True)
class StepBatch:
    """What K steps of N environments gave. D is the size of an observation; environments are innermost.

    Attributes:
        obs: after the step; of the new episode where one ended                              (K, D, N)
        rewards: of the step                                                                 (K, N)
        terminated: the task ended                                                           (K, N) bool
        truncated: the time limit cut the episode, which had not ended                       (K, N) bool
        final_obs: after the step, before the reset; told only where an episode ended        (K, D, N)
    """

    obs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor

    @classmethod
    def allocate(
        cls,
        num_steps: int,
        num_envs: int,
        obs_dim: int,
        device: torch.device | str = "cpu",
        real: torch.dtype = torch.float32,
    ) -> StepBatch:
        """Empty storage."""
        shape = (num_steps, num_envs)
        return cls(
            torch.zeros((num_steps, obs_dim, num_envs), dtype=real, device=device),
            torch.zeros(shape, dtype=real, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
            torch.zeros((num_steps, obs_dim, num_envs), dtype=real, device=device),
        )


@dataclass(slots=True)
class Totals:
    """What is left of K steps where only the environments' state goes on (the kernels of the MLBench'22 paper, §3.2).

    Attributes:
        rewards: sum over the steps     (N,)
        ended: episodes that ended      (N,) int32
    """

    rewards: Tensor
    ended: Tensor

    @classmethod
    def allocate(
        cls, num_envs: int, device: torch.device | str = "cpu", real: torch.dtype = torch.float32
    ) -> Totals:
        """Empty storage."""
        return cls(
            torch.zeros(num_envs, dtype=real, device=device),
            torch.zeros(num_envs, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """What a form is made for.

    Attributes:
        simulator: whose functions run
        num_envs: N
        first_env_index: the first one's number among all GMIs' environments
        seed: with the index, what all random numbers come from
        max_episode_steps: time limit; None: none
        real: what reals are kept and computed in. In float64 rounding hides no difference between programs (parity.py)
    """

    simulator: Simulator
    num_envs: int
    first_env_index: int = 0
    seed: int = 0
    max_episode_steps: int | None = None
    real: torch.dtype = torch.float32

    @property
    def limit(self) -> int:
        """The time limit as a number."""
        return NO_LIMIT if self.max_episode_steps is None else self.max_episode_steps


class FusedBackend(Protocol):
    """One way to run N environments. The first call is ``start``."""

    env_state: BatchedEnvState
    """Where the environments are; on the form's device. May be written between calls."""

    def start(self) -> None:
        """A new episode everywhere."""
        ...

    def observe(self) -> Tensor:
        """Observations of the states as they are, (D, N)."""
        ...

    def run(self, actions: Tensor, out: StepBatch) -> None:
        """K steps with auto-reset: what K calls with one step each do.

        Args:
            actions: (K, N, dim) reals, clipped to the box here; or choices, (K, N) int64
            out: what is filled; of K steps
        """
        ...

    def run_random_actions(self, iteration: int, num_steps: int, out: Totals) -> None:
        """K steps with uniformly random actions, drawn in the kernel for EXPLORE at ``iteration`` (draws.random_actions)."""
        ...


def check_actions(env_config: EnvConfig, actions: Tensor, num_steps: int) -> None:
    """Raise ValueError where actions have another shape or type than they should."""
    discrete = isinstance(env_config.simulator.actions, Discrete)
    shape: tuple[int, ...] = (num_steps, env_config.num_envs)
    shape = shape if discrete else (*shape, action_dim(env_config.simulator))
    dtype = torch.int64 if discrete else env_config.real
    if actions.shape != shape or actions.dtype != dtype:
        raise ValueError(
            f"actions are {tuple(actions.shape)} {actions.dtype}; {env_config.simulator.name} takes {shape} {dtype}"
        )
