"""The Python side of world_rollout.h: one whole rollout, run by threads that each have an MjData."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.rollout import Rollout
from rayagi.envs.mujoco_cpu.compiled_loop import CompiledLoop
from rayagi.envs.mujoco_cpu.physics import Array, Fields, WorldError
from rayagi.envs.mujoco_cpu.whole_rollouts.formulas import Formulas
from rayagi.envs.mujoco_cpu.world_structs import (
    ACTION_NOT_FINITE,
    EPISODE_ENDED,
    NONE_LEFT,
    WARNED,
    RolloutStruct,
    RowsStruct,
    ThreadStateStruct,
)
from rayagi.native.acting import CompiledActing
from rayagi.native.binding import pointer

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
