"""VecEnv of a task with steps that a CUDA graph can capture: masks instead of indices, tensors updated in place.

No step synchronises with the device. On a CPU tests compare the same code with ``TaskVecEnv``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rayagi.envs.lifetime import while_open
from rayagi.envs.tasks.task import Memory
from rayagi.envs.tasks.vec_env import BatchedSim, TaskVecEnv, stacked_terms


@runtime_checkable
class MaskedBatchedSim(BatchedSim, Protocol):
    """Batched simulation that resets worlds by a mask."""

    def restart_where(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Reset the worlds with ``mask`` (N,) set to their rows of ``qpos`` (N, nq) and ``qvel`` (N, nv)."""

    def captured(self) -> AbstractContextManager[None]:
        """Context in which torch captures the current stream into a CUDA graph, the engine's kernels included."""


@dataclass(slots=True)
class MaskedStepResult:
    """Result of a step of N environments, on their device.

    Attributes:
        rewards: of this step                                                     (N,)
        terminated: the task ended                                                (N,) bool
        truncated: the time limit cut the episode                                 (N,) bool
        final_obs: observation after the step, before any reset                   (N, obs_dim)
        reward_terms: of this step; None if the task has none                     (N, terms)
    """

    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor
    reward_terms: Tensor | None


class MaskedTaskVecEnv(TaskVecEnv):
    """TaskVecEnv with ``advance``, a capturable ``step``: bit-identical trajectories on a CPU.

    ``advance``, ``reset`` and ``load_state_dict`` update the same tensors in place, so that their addresses stay valid in a
    captured graph. Do not mix ``advance`` with ``step``.
    """

    _worlds: MaskedBatchedSim

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self._worlds.device

    @property
    def current_obs(self) -> Tensor:
        """Observations to act on next, (N, obs_dim), in the worlds' real type."""
        return self._obs

    @property
    def world_indices(self) -> Tensor:
        """Global indices of the environments, (N,) int64."""
        return self._indices

    def captured(self) -> AbstractContextManager[None]:
        """See MaskedBatchedSim."""
        return self._worlds.captured()

    @while_open
    def advance(self, actions: Tensor) -> MaskedStepResult:
        """Advance every environment; ``actions`` (N, action_dim) on the device.

        A non-finite action makes its world unstable, which is counted; the learner receives the action unchanged.
        """
        rules, worlds = self._rules, self._worlds
        self._elapsed += 1
        self._actions.copy_(actions.clamp(-1.0, 1.0))
        # 1. Actions to controls; 2. physics; 3. rewards, as in TaskVecEnv.step.
        controls, changed = rules.control(self._state())
        self._remember(changed)
        broken = worlds.step(controls, self._task.frame_skip)
        assert broken is not None
        state = self._state()
        outcome = rules.reward_and_done(state)
        self._remember(outcome.memory)
        # 4. Broken worlds: terminated, reward 0, the last valid observation.
        obs = rules.observe(state)
        broken = self._with_unfit(broken, outcome.rewards, obs)
        final_obs = torch.where(broken.unsqueeze(-1), self._obs, obs)
        rewards = outcome.rewards.masked_fill(broken, 0.0)
        terminated, truncated = outcome.terminated | broken, self._elapsed >= self._limit
        # 5. Reset by mask. A start is computed for every world and selected where done: no synchronisation.
        done = terminated | truncated
        self._begin_where(done)
        self._obs.copy_(torch.where(done.unsqueeze(-1), rules.observe(self._state()), final_obs))
        return MaskedStepResult(
            rewards, terminated, truncated, final_obs, stacked_terms(self._task, outcome, broken)
        )

    def _begin_where(self, done: Tensor) -> None:
        """Start new episodes in the worlds with ``done`` set."""
        self._elapsed.masked_fill_(done, 0)
        self._episode += done
        begun = self._rules.start(self._draws(None, self._task.num_start_draws, start=True))
        self._worlds.restart_where(done, begun.qpos, begun.qvel)
        self._actions.masked_fill_(done.unsqueeze(-1), 0.0)
        self._remember(
            {
                name: torch.where(_rows(done, new), new, self._memory[name])
                for name, new in begun.memory.items()
            }
        )

    def _remember(self, changed: Memory) -> None:
        for name, values in changed.items():
            self._memory[name].copy_(values)

    @while_open
    def reset(self) -> Tensor:
        """As TaskVecEnv's, but in the existing tensors."""
        return self._in_place(super().reset)

    @while_open
    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """As TaskVecEnv's, but in the existing tensors."""
        return self._in_place(partial(super().load_state_dict, state))

    def _in_place(self, change: Callable[[], Tensor]) -> Tensor:
        """Make a change that replaces tensors, then copy the new ones' values into those from before it."""
        existing = self._actions, self._obs, self._elapsed, self._episode
        memory = dict(self._memory)
        obs = change()
        changed = self._actions, self._obs, self._elapsed, self._episode
        self._actions, self._obs, self._elapsed, self._episode = existing
        for tensor, values in zip(existing, changed, strict=True):
            tensor.copy_(values)
        for name, values in self._memory.items():
            memory.setdefault(name, values).copy_(values)
        self._memory = memory
        return obs


def _rows(mask: Tensor, like: Tensor) -> Tensor:
    """``mask`` (N,) reshaped to (N, 1, ..., 1), with as many dimensions as ``like``."""
    return mask.view(-1, *(1,) * (like.ndim - 1))
