"""MuJoCo environments that collect a whole rollout in one call, in which no world waits for another."""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.policy_tensors import PolicyTensors
from actors.rollout import Episodes, Rollout, exploration_noise
from collectives.compiler import CompilerError
from rayagi.envs.errors import SimulationError, SimulatorError
from rayagi.envs.lifetime import while_open
from rayagi.envs.mujoco_cpu.compiled_loop import (
    ACTION_NOT_FINITE,
    EPISODE_ENDED,
    NONE_LEFT,
    WARNED,
    CompiledLoop,
    RolloutStruct,
    RowsStruct,
    ThreadStateStruct,
)
from rayagi.envs.mujoco_cpu.contact_physics import ContactPhysics
from rayagi.envs.mujoco_cpu.engine import MujocoVecEnv
from rayagi.envs.mujoco_cpu.physics import Array, WorldError
from rayagi.envs.mujoco_cpu.tasks import GymnasiumTask
from rayagi.envs.mujoco_cpu.whole_rollouts.formulas import FORMULAS, compile_formulas
from rayagi.native import acting
from rayagi.native.acting import CompiledActing
from rayagi.native.binding import pointer

_GROUP = 8
"""Worlds per group: as many as fill a vector register, which makes the policy's cost per world lowest."""


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
            WorldError: MuJoCo refuses to step a world, or its ``action`` is not finite. The rollout is cancelled.
        """
        try:
            return self._run(data, max_items)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Make all threads return, those included that wait for a group's previous step."""
        self._rollout.cancelled = 1

    def _run(self, data: mujoco.MjData, max_items: int) -> bool:
        state = self._thread_state(data)
        while True:
            end = self._env.loop.run_rollout(data, self._rollout, state, max_items)
            if end == EPISODE_ENDED:
                self._env.start_episode(data, state.world)
            elif end == ACTION_NOT_FINITE:
                raise WorldError(state.world, "action")
            elif end != WARNED:
                return end != NONE_LEFT
            elif self._env.loop.became_unstable(data):  # other warnings are harmless
                state.unstable = 1
                with self._counting:
                    self.num_unstable += 1
            max_items = max(max_items - 1, 0)

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
            self._physics.run_parallel(loop)
        except WorldError as error:
            step = int(self._elapsed[error.world])
            raise SimulationError(self._first_env_index + error.world, step, error.quantity) from error
        self._num_unstable += loop.num_unstable
        self._obs = None
        ends = rollout.gather_finals(self._final_obs)
        return _episodes(rollout.rewards, ends, running, before)

    def start_episode(self, data: mujoco.MjData, world: int) -> None:
        """Start a world's next episode, in a thread's own MjData."""
        self._physics.restart_in(data, world, *self._next_start(world))


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
