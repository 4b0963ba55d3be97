"""world_rollout.h's structures, and its loop for threads that each have an MjData."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.rollout import Rollout
from collectives.barrier_progress import BarrierProgress
from rayagi.envs.mujoco_cpu.compiled_loop import CompiledLoop
from rayagi.envs.mujoco_cpu.physics import Array, Fields, WorldError
from rayagi.envs.mujoco_cpu.whole_rollouts.formulas import Formulas
from rayagi.envs.mujoco_cpu.world_structs import (
    ENDED,
    NONE_LEFT,
    UNFIT,
    WARNED,
    RolloutStruct,
    RowsStruct,
    ThreadStateStruct,
)
from rayagi.native.acting import CompiledActing
from rayagi.native.pointers import pointer

_ADDRESS = ctypes.c_void_p
Begin = Callable[[mujoco.MjData, int], None]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What stays the same from rollout to rollout of N worlds.

    Attributes:
        loop: that steps the worlds
        formulas: the task's
        fields: of the worlds that the formulas read, (N, ...) each, in their order
        controls_at: where a row of state holds the controls
        low, high: the actions' box, (nu,)
        substeps: of a step
        dt: seconds of a step
        limit: steps of an episode
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
    """One rollout for threads to share: groups of worlds, step by step."""

    def __init__(
        self,
        settings: RolloutSettings,
        agent: CompiledActing,
        rollout: Rollout,
        final_obs: Tensor,
        begin: Begin,
        group: int,
    ) -> None:
        """
        Args:
            course: of these worlds
            agent: acting through ``rollout``
            rollout: T steps; ``last_obs`` is what to act on first, and in the end next
            final_obs: of episodes that end, (T, N, obs_dim) float32
            begin: starts a world's next episode in a thread's own MjData
            group: worlds that act together
        """
        num_worlds = len(settings.elapsed)
        self._settings, self._agent, self._begin = settings, agent, begin
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
        self._turns: dict[int, tuple[ThreadStateStruct, Tensor]] = {}
        self._counting = threading.Lock()
        self.num_unstable = 0
        """Times that a world became unstable; its episode ended there."""

    def watch_peers(
        self, data: mujoco.MjData, barrier_progress: BarrierProgress, away: Collection[int]
    ) -> None:
        """Let ``run`` with this MjData return when one of these ranks waits for this member."""
        turn = self._turn(data)
        self._watched = barrier_progress, (_ADDRESS * len(away))(*map(barrier_progress.address, away))
        turn.own, turn.others = (
            barrier_progress.address(barrier_progress.rank),
            ctypes.addressof(self._watched[1]),
        )
        turn.num_others = len(away)

    def run(self, data: mujoco.MjData, most: int) -> bool:
        """Make at most so many steps of groups, in this thread's own MjData. Returns whether some may be left.

        Earlier where one of those that it watches waits.

        Raises:
            WorldError: MuJoCo refuses to step one, or ``action`` for one is not finite; all threads leave what is left.
        """
        try:
            return self._run(data, most)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Nobody waits for groups that somebody has begun."""
        self._rollout.stopped = 1

    def _run(self, data: mujoco.MjData, most: int) -> bool:
        turn = self._turn(data)
        at = ctypes.addressof(self._rollout), ctypes.addressof(turn)
        while True:
            end = self._settings.loop.run_rollout(data, *at, most)
            if end == ENDED:
                self._begin(data, turn.world)
            elif end == UNFIT:
                raise WorldError(turn.world, "action")
            elif end != WARNED:
                return end != NONE_LEFT
            elif self._settings.loop.became_unstable(data):  # other warnings do no harm
                turn.unstable = 1
                with self._counting:
                    self.num_unstable += 1
            most = max(most - 1, 0)

    def _turn(self, data: mujoco.MjData) -> ThreadStateStruct:
        if data._address not in self._turns:
            scratch = self._agent.make_scratch()
            self._turns[data._address] = ThreadStateStruct(pointer(scratch)), scratch
        return self._turns[data._address][0]


def _rows(field: Array) -> RowsStruct:
    """Each world's numbers lie side by side."""
    inner = field[0]
    if field.dtype != np.float64 or not inner.flags.c_contiguous:
        raise ValueError(f"worlds' rows of {field.shape} do not lie side by side")
    return RowsStruct(field.ctypes.data, field.strides[0] // field.itemsize)
