"""MuJoCo environments that collect a whole rollout in one call, in which no world waits for another."""

from __future__ import annotations

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
from rayagi.envs.errors import SimulationError
from rayagi.envs.fused.errors import SimulatorError
from rayagi.envs.mujoco_cpu.compiled_loop import CompiledLoop
from rayagi.envs.mujoco_cpu.contact_physics import ContactPhysics
from rayagi.envs.mujoco_cpu.engine import MujocoVecEnv
from rayagi.envs.mujoco_cpu.physics import WorldError
from rayagi.envs.mujoco_cpu.task import GymnasiumTask
from rayagi.envs.mujoco_cpu.whole_rollouts.formulas import FORMULAS, compile_formulas
from rayagi.envs.mujoco_cpu.whole_rollouts.program import RolloutLoop, RolloutSettings
from rayagi.native import acting

_GROUP = 8
"""Worlds per group: as many as fill a vector register, which makes the policy's cost per world lowest."""


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
