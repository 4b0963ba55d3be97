"""N environments of a task whose steps never wait for the device: masks in place of indices, every tensor where it is.

What a CUDA graph captures is such a step. On a CPU the same code is the reference that tests compare with ``TaskVecEnv``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from actors.protocols import EnvInfo
from rayagi.envs.tasks.batched_sim import BatchedSim
from rayagi.envs.tasks.task import Memory, TaskFunctions
from rayagi.envs.tasks.vec_env import TaskVecEnv, stacked_terms


@runtime_checkable
class MaskedBatchedSim(BatchedSim, Protocol):
    """Worlds that restart by a mask."""

    def restart_where(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Reset worlds where ``mask`` (N,) is set to a state of all worlds, (N, nq) and (N, nv)."""
        ...

    def captured(self) -> AbstractContextManager[None]:
        """Within it, torch captures the current stream into a graph, and the engine's work with it."""
        ...


@dataclass(slots=True)
class MaskedStepResult:
    """What a step of N environments led to, on their device.

    Attributes:
        rewards: of this step                                                     (N,)
        terminated: the task ended                                                (N,) bool
        truncated: the time limit cut the episode                                 (N,) bool
        final_obs: what followed, before the reset where an episode ended         (N, obs_dim)
        reward_terms: of this step; None where the task has none                  (N, terms)
    """

    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor
    reward_terms: Tensor | None


class MaskedTaskVecEnv(TaskVecEnv):
    """A TaskVecEnv with ``advance`` beside ``step``: the same course, to the last bit on a CPU. [unverified on GPU]

    ``advance`` reads and writes the same tensors for ever; so does ``load_state_dict``. Use one of the two kinds of steps.
    """

    _worlds: MaskedBatchedSim

    def __init__(
        self, info: EnvInfo, rules: TaskFunctions[Any], worlds: MaskedBatchedSim, **env_args: Any
    ) -> None:
        super().__init__(info, rules, worlds, **env_args)

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self._worlds.device

    @property
    def current_obs(self) -> Tensor:
        """What to act on next, (N, obs_dim), in the worlds' real type."""
        return self._obs

    @property
    def world_indices(self) -> Tensor:
        """Global indices of the environments, (N,) int64."""
        return self._indices

    def captured(self) -> AbstractContextManager[None]:
        """See MaskedBatchedSim."""
        return self._worlds.captured()

    def advance(self, actions: Tensor) -> MaskedStepResult:
        """Advance every environment; ``actions`` (N, action_dim) on the device.

        An action that is not finite makes its world unstable, which is counted; the learner sees it as it is.
        """
        rules, worlds = self._rules, self._worlds
        self._elapsed += 1
        self._actions.copy_(actions.clamp(-1.0, 1.0))
        controls, changed = rules.control(self._state())
        self._remember(changed)
        broken = worlds.step(controls, self._task.frame_skip)
        assert broken is not None
        state = self._state()
        outcome = rules.reward_and_done(state)
        self._remember(outcome.memory)
        seen = torch.where(broken.unsqueeze(-1), self._obs, rules.observe(state))
        rewards = outcome.rewards.masked_fill(broken, 0.0)
        terminated, truncated = outcome.terminated | broken, self._elapsed >= self._limit
        done = terminated | truncated
        self._begin_where(done)
        self._obs.copy_(torch.where(done.unsqueeze(-1), rules.observe(self._state()), seen))
        return MaskedStepResult(
            rewards, terminated, truncated, seen, stacked_terms(self._task, outcome, broken)
        )

    def _begin_where(self, done: Tensor) -> None:
        """New episodes of the worlds of a mask."""
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

    def reset(self) -> Tensor:
        """Start a new episode everywhere, before anything is captured. Returns (N, obs_dim) float32."""
        begun = super().reset()
        self._clone_buffers()
        return begun

    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """As TaskVecEnv's; tensors stay where they are."""
        homes = self._actions, self._obs, self._elapsed, self._episode, self._memory
        obs = super().load_state_dict(state)
        loaded = self._actions, self._obs, self._elapsed, self._episode, self._memory
        self._actions, self._obs, self._elapsed, self._episode, self._memory = homes
        for home, values in zip(homes[:4], loaded[:4], strict=True):
            home.copy_(values)
        for name, values in loaded[4].items():
            self._memory.setdefault(name, values).copy_(values)
        return obs

    def _clone_buffers(self) -> None:
        """Tensors of this object's own, which nothing else refers to."""
        self._actions, self._obs = self._actions.clone(), self._obs.clone()
        self._memory = {name: values.clone() for name, values in self._memory.items()}


def _rows(mask: Tensor, like: Tensor) -> Tensor:
    """(N,) with as many dimensions as ``like`` (N, ...)."""
    return mask.view(-1, *(1,) * (like.ndim - 1))
