"""MujocoVecEnv: N environments of one MuJoCo task, stepped as one VecEnv."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.protocols import StateDict, StepResult
from actors.rollout import environment_generator
from rayagi.envs.errors import SimulationError
from rayagi.envs.lifetime import ClosableEnv, while_open
from rayagi.envs.mujoco_cpu.physics import Array, WorldError
from rayagi.envs.mujoco_cpu.tasks import GymnasiumTask, describe, load_model, make_physics
from rayagi.envs.providers import check_num_envs, log_sim_errors


@dataclass(slots=True)
class RawStep:
    """StepResult in MuJoCo's own precision: the same fields and shapes, float64."""

    obs: Array
    rewards: Array
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_ids: NDArray[np.int64]
    final_obs: Array


class MujocoVecEnv(ClosableEnv):
    """Implements VecEnv for a task.

    An environment's randomness comes from a counter-based generator keyed by (seed, global index, episode),
    so its trajectory does not depend on its GMI, on the number of environments there, or on threads.

    A world that becomes unstable (NaN, infinite or above 1e10) ends its episode: terminated, with a reward of 0 and the last
    observation before that step. It is counted in ``sim_errors``, and a new episode starts.
    """

    resumes_episodes = True

    def __init__(
        self,
        env_id: str,
        task: GymnasiumTask,
        *,
        num_envs: int,
        first_env_index: int = 0,
        seed: int = 0,
        num_threads: int = 1,
        max_episode_steps: int | None = 1000,
    ) -> None:
        super().__init__()
        self.num_envs, self._task = num_envs, task
        self._compiled = load_model(env_id, task)
        self.info = describe(env_id, self._compiled, task, max_episode_steps)
        self._physics = make_physics(self._compiled, task, num_envs, num_threads)
        self._first_env_index, self._seed = first_env_index, seed
        self._low, self._high = np.array(self.info.action.low), np.array(self.info.action.high)
        self._limit = np.iinfo(np.int64).max if max_episode_steps is None else max_episode_steps
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._episode = np.full(num_envs, -1, dtype=np.int64)
        self._num_unstable = 0
        self._obs: Array | None = None
        """Observations of the last step; None after a whole rollout."""

    @property
    def sim_errors(self) -> Mapping[str, int]:
        """How often a world became unstable, since this object was made."""
        return {"unstable": self._num_unstable}

    @while_open
    def reset(self) -> Tensor:
        """Start a new episode everywhere. Returns (N, obs_dim) float32."""
        return _to_float32(self.reset_raw())

    @while_open
    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment; ``actions`` (N, nu) are clipped to the action range.

        Raises:
            SimulationError: an action is not finite, or MuJoCo refuses to step a world.
        """
        raw = self.step_raw(actions.detach().cpu().numpy())
        return StepResult(
            obs=_to_float32(raw.obs),
            rewards=_to_float32(raw.rewards),
            terminated=torch.from_numpy(raw.terminated),
            truncated=torch.from_numpy(raw.truncated),
            final_ids=torch.from_numpy(raw.final_ids),
            final_obs=_to_float32(raw.final_obs),
        )

    def reset_raw(self) -> Array:
        """``reset`` in float64, for comparisons; it knows nothing of ``close``."""
        self._start_episodes(np.arange(self.num_envs))
        self._obs = self._task.observe(self._compiled, self._physics.fields)
        return self._obs

    def step_raw(self, actions: NDArray[Any]) -> RawStep:
        """``step`` in float64, for comparisons; it knows nothing of ``close``."""
        task, compiled, fields = self._task, self._compiled, self._physics.fields
        self._elapsed += 1
        given = np.asarray(actions, dtype=np.float64)
        if not np.isfinite(given).all():
            row = int(np.flatnonzero(~np.isfinite(given).all(axis=1))[0])
            raise SimulationError(self._first_env_index + row, int(self._elapsed[row]), "action")
        controls = np.clip(given, self._low, self._high)
        before = task.observe(compiled, fields) if self._obs is None else self._obs
        start = task.forward_position(compiled, fields).copy()
        try:
            unstable = self._physics.step(controls, task.frame_skip)
        except WorldError as error:
            step = int(self._elapsed[error.world])
            raise SimulationError(self._first_env_index + error.world, step, error.quantity) from error
        speed = (task.forward_position(compiled, fields) - start) / compiled.dt
        obs = task.observe(compiled, fields)
        rewards, terminated = task.reward_and_done(compiled, fields, controls, speed)
        if unstable is not None:
            self._num_unstable += int(unstable.sum())
            rewards, terminated = np.where(unstable, 0.0, rewards), terminated | unstable
            obs = np.where(unstable[:, np.newaxis], before, obs)
        truncated = self._elapsed >= self._limit
        final_ids = np.flatnonzero(terminated | truncated)
        final_obs = obs[final_ids]
        if final_ids.size:
            self._start_episodes(final_ids)
            obs[final_ids] = task.observe(
                compiled, {name: field[final_ids] for name, field in fields.items()}
            )
        self._obs = obs
        return RawStep(obs, rewards, terminated, truncated, final_ids, final_obs)

    def _start_episodes(self, ids: NDArray[np.int64]) -> None:
        starts = [self._next_start(int(i)) for i in ids]
        self._physics.restart(
            ids, np.stack([qpos for qpos, _ in starts]), np.stack([qvel for _, qvel in starts])
        )

    def _next_start(self, i: int) -> tuple[Array, Array]:
        """Start to count environment ``i``'s next episode. Returns its first qpos and qvel."""
        self._elapsed[i] = 0
        self._episode[i] += 1
        return self._task.draw_start(self._compiled, self._generator(i))

    def _generator(self, i: int) -> np.random.Generator:
        return environment_generator(self._seed, self._first_env_index + i, "reset", int(self._episode[i]))

    @while_open
    def state_dict(self) -> StateDict:
        """Physics, elapsed steps and episode counters: enough to continue bit for bit."""
        return {
            "physics": self._physics.state_dict(),
            "elapsed": self._elapsed.copy(),
            "episode": self._episode.copy(),
        }

    @while_open
    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """Restore a saved state of the same number of environments. Returns the observation to act on next."""
        check_num_envs(self.info.env_id, len(state["elapsed"]), self.num_envs)
        self._physics.load_state_dict(state["physics"])
        self._elapsed[:] = state["elapsed"]
        self._episode[:] = state["episode"]
        self._obs = self._task.observe(self._compiled, self._physics.fields)
        return _to_float32(self._obs)

    def _release(self) -> None:
        log_sim_errors(self.info.env_id, self.sim_errors)
        self._physics.close()


def _to_float32(values: Array) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
