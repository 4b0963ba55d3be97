"""N environments of one MuJoCo task as a VecEnv: MujocoVecEnv, and RolloutMujocoVecEnv, which fills a rollout in one call.

Whole rollouts run policy, physics, rewards and observations of T steps in C, and no world waits for another.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.policy_tensors import PolicyTensors
from actors.protocols import StateDict, StepResult
from actors.rollout import Episodes, Rollout, environment_generator, exploration_noise
from collectives.compiler import CompilerError
from rayagi.envs.errors import SimulationError, SimulatorError
from rayagi.envs.lifetime import ClosableEnv, while_open
from rayagi.envs.mujoco_cpu.contact_physics import ContactPhysics
from rayagi.envs.mujoco_cpu.formulas import FORMULAS, compile_formulas
from rayagi.envs.mujoco_cpu.physics import Array, WorldError
from rayagi.envs.mujoco_cpu.tasks import GymnasiumTask, describe, load_model, make_physics
from rayagi.envs.providers import check_num_envs, log_sim_errors
from rayagi.native import acting
from rayagi.native.acting import CompiledActing
from rayagi.native.binding import pointer
from rayagi.native.worlds import (
    ACTION_NOT_FINITE,
    EPISODE_ENDED,
    NONE_LEFT,
    WARNED,
    CompiledLoop,
    RolloutStruct,
    RowsStruct,
    ThreadStateStruct,
)

_GROUP = 8
"""Worlds per group: as many as fill a vector register, which makes the policy's cost per world lowest."""


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
        generator = environment_generator(
            self._seed, self._first_env_index + i, "reset", int(self._episode[i])
        )
        return self._task.draw_start(self._compiled, generator)

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


class RolloutLoop:
    """One rollout, shared by threads, which claim groups of worlds step by step."""

    def __init__(
        self,
        env: RolloutMujocoVecEnv,
        agent: CompiledActing,
        rollout: Rollout,
        final_obs: Tensor,
        group: int,
    ) -> None:
        """
        Args:
            env: has the worlds and their task
            agent: acts into ``rollout``
            rollout: T steps to fill; ``last_obs`` holds the first observation, and at the end the next one
            final_obs: filled where an episode ends, (T, N, obs_dim) float32
            group: worlds per group; the policy acts for a group at once
        """
        self._env, self._agent = env, agent
        fields, low, high = env._physics.fields, env._low, env._high
        self._rows = (RowsStruct * len(fields))(*map(_rows, fields.values()))
        self._done = torch.zeros(-(-env.num_envs // group), dtype=torch.int64)
        self._kept = rollout, final_obs
        self._rollout = RolloutStruct(
            env.loop.address,
            env._task.frame_skip,
            agent.function,
            agent.policy.address,
            agent.address,
            env.formulas.forward_position,
            env.formulas.compute_reward_done,
            env.formulas.observe,
            len(fields),
            ctypes.addressof(self._rows),
            env._compiled.dt,
            env._limit,
            env._elapsed.ctypes.data,
            len(low),
            low.ctypes.data,
            high.ctypes.data,
            (env._physics.controls.ctypes.data - env._physics.rows.ctypes.data) // env._physics.rows.itemsize,
            rollout.num_steps,
            rollout.last_obs.shape[1],
            *map(pointer, (rollout.last_obs, rollout.actions, rollout.rewards)),
            *map(pointer, (rollout.terminated, rollout.truncated, final_obs)),
            group,
            pointer(self._done),
            0,
            0,
        )
        self._thread_states: dict[int, tuple[ThreadStateStruct, Tensor]] = {}
        self._counting = threading.Lock()
        self.num_unstable = 0
        """How often a world became unstable, which ended its episode."""

    def run(self, data: mujoco.MjData, max_items: int) -> bool:
        """Step at most ``max_items`` groups, in this thread's own MjData. Returns whether groups may be left.

        Raises:
            WorldError: MuJoCo refuses to step a world, or its ``action`` is not finite.
        """
        env, state = self._env, self._thread_state(data)
        while True:
            end = env.loop.run_rollout(data, self._rollout, state, max_items)
            if end == EPISODE_ENDED:
                env._physics.restart_in(data, state.world, *env._next_start(state.world))
            elif end == ACTION_NOT_FINITE:
                raise WorldError(state.world, "action")
            elif end != WARNED:
                return end != NONE_LEFT
            elif env.loop.became_unstable(data):  # other warnings are harmless
                state.unstable = 1
                with self._counting:
                    self.num_unstable += 1
            max_items = max(max_items - 1, 0)

    def cancel(self) -> None:
        """Make all threads return, those included that wait for a group's previous step."""
        self._rollout.cancelled = 1

    def _thread_state(self, data: mujoco.MjData) -> ThreadStateStruct:
        if data._address not in self._thread_states:
            scratch = self._agent.make_scratch()
            self._thread_states[data._address] = ThreadStateStruct(pointer(scratch)), scratch
        return self._thread_states[data._address][0]


def _rows(field: Array) -> RowsStruct:
    """The Rows of a field, in which each world's values must be contiguous."""
    inner = field[0]
    if field.dtype != np.float64 or not inner.flags.c_contiguous:
        raise ValueError(
            f"each world's values must be contiguous float64, not {field.dtype} with strides {field.strides}"
        )
    return RowsStruct(field.ctypes.data, field.strides[0] // field.itemsize)


class RolloutMujocoVecEnv(MujocoVecEnv):
    """Implements RolloutEnv for tasks whose physics steps worlds one by one.

    Observations, actions and physics equal those of ``step`` bit for bit. Rewards differ by rounding:
    sums have another order.
    """

    _physics: ContactPhysics

    def __init__(self, env_id: str, task: GymnasiumTask, **options: Any) -> None:
        """Arguments: as MujocoVecEnv.

        Raises:
            CompilerError: no compiler was found.
            SimulatorError: the task's formulas cannot be compiled.
        """
        super().__init__(env_id, task, **options)
        physics = self._physics
        if not isinstance(physics.loop, CompiledLoop) or acting.library() is None:
            raise CompilerError("the kernels for worlds and acting are not compiled")
        self.loop, self.formulas = physics.loop, compile_formulas(task, self._compiled, physics.fields)
        self._final_obs = torch.empty(0)

    @while_open
    def collect_rollout(
        self, rollout: Rollout, policy: PolicyTensors, iteration: int, running: Tensor
    ) -> Episodes:
        """Collect T steps in one call: see RolloutEnv.

        Raises:
            SimulationError: an action is not finite, or MuJoCo refuses to step a world.
        """
        before = self._elapsed.copy()
        shape = rollout.raw_obs.shape
        if self._final_obs.shape != shape:  # written only where episodes end: most of it is never paged in
            self._final_obs = torch.empty(shape)
        rollout.last_obs.copy_(torch.from_numpy(self._task.observe(self._compiled, self._physics.fields)))
        noise = exploration_noise(
            seed=self._seed,
            first_env_index=self._first_env_index,
            num_envs=self.num_envs,
            iteration=iteration,
            num_steps=rollout.num_steps,
            dim=self.info.action.dim,
            gumbel=False,
        )
        agent = acting.compiled_acting(policy, rollout, noise)
        assert agent is not None
        group = max(1, min(_GROUP, self.num_envs // (2 * len(self._physics.datas))))
        loop = RolloutLoop(self, agent, rollout, self._final_obs, group)
        try:
            self._physics.run_parallel(loop.run, loop.cancel)
        except WorldError as error:
            step = int(self._elapsed[error.world])
            raise SimulationError(self._first_env_index + error.world, step, error.quantity) from error
        self._num_unstable += loop.num_unstable
        self._obs = None
        ends = rollout.gather_finals(self._final_obs)
        return _episodes(rollout.rewards, ends, running, before)


def _episodes(
    rewards: Tensor, ends: tuple[Tensor, Tensor], running: Tensor, elapsed: NDArray[np.int64]
) -> Episodes:
    """Returns and lengths of the episodes that ended in a rollout. Updates ``running``.

    Args:
        rewards: (T, N)
        ends: steps and environments of the ends, in order
        running: return so far of each running episode      (N,) float64
        elapsed: steps of each episode before the rollout   (N,)
    """
    ended: dict[int, list[int]] = {}
    for step, env in zip(*(each.tolist() for each in ends), strict=True):
        ended.setdefault(step, []).append(env)
    returns, began = running.numpy(), -elapsed
    episodes = Episodes([], [])
    for step, row in enumerate(rewards.numpy()):
        returns += row
        ids = ended.get(step)
        if ids is not None:
            episodes.returns.extend(returns[ids].tolist())
            episodes.lengths.extend((step + 1 - began[ids]).tolist())
            returns[ids] = 0.0
            began[ids] = step + 1
    return episodes


def make_vec_env(env_id: str, task: GymnasiumTask, **options: Any) -> MujocoVecEnv:
    """Environments with whole rollouts, where the task's physics and a compiler allow it."""
    if task.needs_contact_forces:
        make = partial(RolloutMujocoVecEnv, env_id, task, **options)
        made = FORMULAS.made_or_none(make, whose=env_id, unfit=(SimulatorError,))
        if made is not None:
            return made
    return MujocoVecEnv(env_id, task, **options)
