"""MuJoCo environments that collect a whole rollout in one call, in which no world waits for another."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.noise import exploration_noise
from actors.policy_tensors import PolicyTensors
from actors.rollout import Episodes, Rollout
from collectives.compiler import CompilerError
from rayagi.envs.errors import SimulationError, SimulatorError
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
from rayagi.envs.mujoco_cpu.physics import Array, Fields, WorldError
from rayagi.envs.mujoco_cpu.task import GymnasiumTask
from rayagi.envs.mujoco_cpu.whole_rollouts.formulas import FORMULAS, Formulas, compile_formulas
from rayagi.native import acting
from rayagi.native.acting import CompiledActing
from rayagi.native.binding import pointer

_GROUP = 8
"""Worlds per group: as many as fill a vector register, which makes the policy's cost per world lowest."""


StartEpisode = Callable[[mujoco.MjData, int], None]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What is the same in every rollout of N worlds.

    Attributes:
        loop: steps the worlds
        formulas: the task's compiled functions
        fields: the fields that the formulas read, (N, ...) each, in their order
        controls_at: index of the controls in a row of state
        low, high: action range, (nu,)
        substeps: MuJoCo steps per environment step
        dt: seconds per environment step
        limit: environment steps per episode
        elapsed: steps of each running episode, (N,) int64
    """

    loop: CompiledLoop
    formulas: Formulas
    fields: Fields
    controls_at: int
    low: Array
    high: Array
    substeps: int
    dt: float
    limit: int
    elapsed: NDArray[np.int64]


class RolloutLoop:
    """One rollout, shared by threads, which claim groups of worlds step by step."""

    def __init__(
        self,
        settings: RolloutSettings,
        agent: CompiledActing,
        rollout: Rollout,
        final_obs: Tensor,
        start_episode: StartEpisode,
        group: int,
    ) -> None:
        """
        Args:
            settings: of these worlds
            agent: acts into ``rollout``
            rollout: T steps to fill; ``last_obs`` holds the first observation, and at the end the next one
            final_obs: filled where an episode ends, (T, N, obs_dim) float32
            start_episode: starts a world's next episode, in a thread's own MjData
            group: worlds per group; the policy acts for a group at once
        """
        num_worlds = len(settings.elapsed)
        self._settings, self._agent, self._start_episode = settings, agent, start_episode
        self._rows = (RowsStruct * len(settings.fields))(*map(_rows, settings.fields.values()))
        self._done = torch.zeros(-(-num_worlds // group), dtype=torch.int64)
        self._kept = rollout, final_obs
        self._rollout = RolloutStruct(
            settings.loop.address,
            settings.substeps,
            agent.function,
            agent.policy.address,
            agent.address,
            settings.formulas.forward_position,
            settings.formulas.compute_reward_done,
            settings.formulas.observe,
            len(settings.fields),
            ctypes.addressof(self._rows),
            settings.dt,
            settings.limit,
            settings.elapsed.ctypes.data,
            len(settings.low),
            settings.low.ctypes.data,
            settings.high.ctypes.data,
            settings.controls_at,
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
            end = self._settings.loop.run_rollout(data, self._rollout, state, max_items)
            if end == EPISODE_ENDED:
                self._start_episode(data, state.world)
            elif end == ACTION_NOT_FINITE:
                raise WorldError(state.world, "action")
            elif end != WARNED:
                return end != NONE_LEFT
            elif self._settings.loop.became_unstable(data):  # other warnings are harmless
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
        self._settings = RolloutSettings(
            loop=physics.loop,
            formulas=compile_formulas(task, self._compiled, physics.fields),
            fields=physics.fields,
            controls_at=(physics.controls.ctypes.data - physics.rows.ctypes.data) // physics.rows.itemsize,
            low=self._low,
            high=self._high,
            substeps=task.frame_skip,
            dt=self._compiled.dt,
            limit=self._limit,
            elapsed=self._elapsed,
        )
        self._final_obs = torch.empty(0)

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
        loop = RolloutLoop(self._settings, agent, rollout, self._final_obs, self._start_episode, group)
        try:
            self._physics.run_parallel(loop)
        except WorldError as error:
            step = int(self._elapsed[error.world])
            raise SimulationError(self._first_env_index + error.world, step, error.quantity) from error
        self._num_unstable += loop.num_unstable
        self._obs = None
        ends = rollout.gather_finals(self._final_obs)
        return _episodes(rollout.rewards, ends, running, before)

    def _start_episode(self, data: mujoco.MjData, world: int) -> None:
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
