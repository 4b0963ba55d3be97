"""Interface of fused backends: K steps of N environments per call.

All reals have one type, ``EnvConfig.real``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rayagi.envs.fused.draws import MAX_STEPS
from rayagi.envs.fused.simulator import Discrete, Simulator, action_dim

NO_LIMIT = MAX_STEPS - 1
"""Time limit of simulators without one: the longest possible episode."""


@dataclass(slots=True)
class BatchedEnvState:
    """Complete state of N environments.

    Attributes:
        state: reals, in the order of ``Simulator.state``            (S, N)
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
        """Storage before the first episode."""
        return cls(
            torch.zeros((len(simulator.state), num_envs), dtype=real, device=device),
            torch.zeros(num_envs, dtype=torch.int32, device=device),
            torch.full((num_envs,), -1, dtype=torch.int32, device=device),
        )

    def copy_(self, other: BatchedEnvState) -> None:
        """Copy another's values."""
        for name in ("state", "elapsed", "episode"):
            getattr(self, name).copy_(getattr(other, name))


@dataclass(slots=True)
class StepBatch:
    """Results of K steps of N environments. D is the size of an observation; the environment is the last dimension.

    Attributes:
        obs: after the step; if an episode ended, the new episode's first                    (K, D, N)
        rewards: of the step                                                                 (K, N)
        terminated: the task ended                                                           (K, N) bool
        truncated: the time limit ended an episode that did not terminate                    (K, N) bool
        final_obs: after the step, before the reset; written only where an episode ended     (K, D, N)
    """

    obs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor

    @classmethod
    def allocate(
        cls, num_steps: int, num_envs: int, obs_dim: int, real: torch.dtype = torch.float32
    ) -> StepBatch:
        """Zeroed storage."""
        shape = (num_steps, num_envs)
        return cls(
            torch.zeros((num_steps, obs_dim, num_envs), dtype=real),
            torch.zeros(shape, dtype=real),
            torch.zeros(shape, dtype=torch.bool),
            torch.zeros(shape, dtype=torch.bool),
            torch.zeros((num_steps, obs_dim, num_envs), dtype=real),
        )


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """Configuration of a backend.

    Attributes:
        simulator: the simulator
        num_envs: N
        first_env_index: global index of the first environment, over all GMIs
        seed: seed of all random numbers
        max_episode_steps: time limit; None: none
        real: dtype of all reals. Parity checks use float64, where rounding hides no mistake in a program
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
        return NO_LIMIT if self.max_episode_steps is None else min(self.max_episode_steps, NO_LIMIT)


class FusedBackend(Protocol):
    """Runs N environments. The first call must be ``start``."""

    env_state: BatchedEnvState
    """State of the environments. May be written between calls."""

    def start(self) -> None:
        """Start a new episode in every environment."""

    def observe(self) -> Tensor:
        """Observations of the current states, (D, N)."""

    def run(self, actions: Tensor, out: StepBatch) -> None:
        """K steps with auto-reset; equal to K calls of one step.

        Args:
            actions: (K, N, dim) reals, clipped to the box here; or choices, (K, N) int64
            out: results, filled in place
        """


def check_actions(env_config: EnvConfig, actions: Tensor, num_steps: int) -> None:
    """Raise ValueError if actions have the wrong shape or dtype."""
    discrete = isinstance(env_config.simulator.actions, Discrete)
    shape: tuple[int, ...] = (num_steps, env_config.num_envs)
    shape = shape if discrete else (*shape, action_dim(env_config.simulator))
    dtype = torch.int64 if discrete else env_config.real
    if actions.shape != shape or actions.dtype != dtype:
        raise ValueError(
            f"actions are {tuple(actions.shape)} {actions.dtype}; {env_config.simulator.name} takes {shape} {dtype}"
        )
