"""Compiled WorldLoop: calls MuJoCo's C functions for many worlds per Python call.

It saves Python's part of a step, some 3 % of its time, which holds the interpreter lock that other stepping threads need.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import NDArray

from collectives.compiler import CompilerError
from collectives.kernels import Kernel
from collectives.mirrors import Mirrors
from rayagi.envs.mujoco_cpu.physics import STATE, WorldBatch, became_unstable, failed
from rayagi.native.binding import shared
from rayagi.profiler import Category, activity

WORLDS = Kernel(
    name="MuJoCo's worlds",
    module=__name__,
    reference="rayagi.envs.mujoco_cpu.physics:PythonLoop",
    without="worlds are stepped by Python",
)
_I64, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


NONE_LEFT, LIMIT_REACHED, WARNED, FAILED = range(4)
"""Return values of rayagi_step_worlds."""
EPISODE_ENDED, ACTION_NOT_FINITE = FAILED + 1, FAILED + 2
"""Further return values of rayagi_run_rollout."""
FUNCTIONS = {
    "load": "mj_setState",
    "step": "mj_step",
    "forces": "mj_rnePostConstraint",
    "save": "mj_getState",
}
"""MuJoCo's functions by their names in worlds.h."""


class WorldBatchStruct(ctypes.Structure):
    """WorldBatch of worlds.h."""

    _fields_ = (
        *((name, _ADDRESS) for name in (*FUNCTIONS, "model")),
        *((name, _I64) for name in ("parts", "num_worlds", "width")),
        ("rows", _ADDRESS),
        ("num_fields", _I64),
        ("fields", _ADDRESS),
        ("sizes", _ADDRESS),
        ("next", _I64),
    )


class SimulationStruct(ctypes.Structure):
    """Simulation of worlds.h."""

    _fields_ = (
        ("data", _ADDRESS),
        ("fields", _ADDRESS),
        ("warnings", _ADDRESS),
        ("kinds", _I64),
        ("stride", _I64),
        ("world", _I64),
        ("message", ctypes.c_char * 256),
    )


class RowsStruct(ctypes.Structure):
    """Rows of world_rollout.h."""

    _fields_ = (("start", _ADDRESS), ("stride", _I64))


class RolloutStruct(ctypes.Structure):
    """Rollout of world_rollout.h."""

    _fields_ = (
        ("worlds", _ADDRESS),
        ("substeps", _I64),
        *(
            (name, _ADDRESS)
            for name in ("act", "policy", "acting", "forward_position", "compute_reward_done", "observe")
        ),
        ("num_fields", _I64),
        ("fields", _ADDRESS),
        ("dt", ctypes.c_double),
        ("limit", _I64),
        ("elapsed", _ADDRESS),
        ("num_actions", _I64),
        *((name, _ADDRESS) for name in ("low", "high")),
        *((name, _I64) for name in ("controls", "num_steps", "obs_dim")),
        *((name, _ADDRESS) for name in ("obs", "actions", "rewards", "terminated", "truncated", "final_obs")),
        ("group", _I64),
        ("done", _ADDRESS),
        ("next", _I64),
        ("cancelled", _I64),
    )


class ThreadStateStruct(ctypes.Structure):
    """ThreadState of world_rollout.h."""

    unstable: int

    _fields_ = (
        ("scratch", _ADDRESS),
        ("stage", ctypes.c_int),
        *((name, _I64) for name in ("t", "group", "world", "end")),
        ("start_position", ctypes.c_double),
        ("unstable", _I64),
        ("acting", _ADDRESS),
        ("acted", _I64),
    )


MIRRORS: Mirrors = {
    "WorldBatch": WorldBatchStruct,
    "Simulation": SimulationStruct,
    "Rows": RowsStruct,
    "Rollout": RolloutStruct,
    "ThreadState": ThreadStateStruct,
    "NONE_LEFT": NONE_LEFT,
    "LIMIT_REACHED": LIMIT_REACHED,
    "WARNED": WARNED,
    "FAILED": FAILED,
    "EPISODE_ENDED": EPISODE_ENDED,
    "ACTION_NOT_FINITE": ACTION_NOT_FINITE,
}


class CompiledLoop:
    """Implements WorldLoop with the same calls in the same order as PythonLoop, so with the same bits."""

    def __init__(self, program: ctypes.CDLL, worlds: WorldBatch) -> None:
        self._step, self._run_rollout = program.rayagi_step_worlds, program.rayagi_run_rollout
        self._kept = worlds  # the program has its addresses
        derived = list(worlds.derived.values())
        self._fields = _addresses(derived)
        self._sizes = (_I64 * len(derived))(*(field[0].size for field in derived))
        engine = _engine()
        functions = (ctypes.cast(getattr(engine, name), _ADDRESS).value for name in FUNCTIONS.values())
        self._worlds = WorldBatchStruct(
            *functions,
            worlds.model._address,
            STATE,
            *worlds.rows.shape,
            worlds.rows.ctypes.data,
            len(derived),
            ctypes.addressof(self._fields),
            ctypes.addressof(self._sizes),
            0,
        )
        self.address = ctypes.addressof(self._worlds)
        self._simulations: dict[int, _Thread] = {}

    def begin(self) -> None:
        """Mark all worlds as unclaimed."""
        self._worlds.next = 0

    def run(self, data: mujoco.MjData, num_substeps: int, max_worlds: int) -> bool:
        """Claim and step at most ``max_worlds`` worlds."""
        thread = self._thread(data)
        with activity(Category.SIMULATOR, "step worlds"):
            end = thread.checked(self._step(self.address, thread.address, num_substeps, max_worlds))
        if end == WARNED and thread.became_unstable():
            self._kept.unstable[thread.world] = True
        return end != NONE_LEFT

    def run_rollout(
        self, data: mujoco.MjData, rollout: RolloutStruct, state: ThreadStateStruct, max_groups: int
    ) -> int:
        """rayagi_run_rollout of world_rollout.h, in this thread's own MjData. Returns why it ended: a constant above.

        Raises:
            WorldError: MuJoCo refuses to step a world.
        """
        thread = self._thread(data)
        addresses = ctypes.addressof(rollout), thread.address, ctypes.addressof(state)
        with activity(Category.SIMULATOR, "whole rollout") as whole:
            # A profile tells acting from physics: the program notes when it acted.
            most = min(max_groups, rollout.num_steps * -(-self._worlds.num_worlds // rollout.group))
            times = np.empty((most if whole.is_recorded else 0, 2), np.int64)
            state.acting, state.acted = times.ctypes.data if times.size else None, 0
            end = thread.checked(self._run_rollout(*addresses, max_groups))
        for started, ended in times[: state.acted].tolist():
            whole.record_part(started, ended, Category.KERNEL_ACT, "act")
        return end

    def became_unstable(self, data: mujoco.MjData) -> bool:
        """Whether the world that was last stepped in this MjData became unstable."""
        return self._thread(data).became_unstable()

    def _thread(self, data: mujoco.MjData) -> _Thread:
        thread = self._simulations.get(data._address)
        if thread is None:
            thread = self._simulations[data._address] = _Thread(data, tuple(self._kept.derived))
        return thread


class _Thread:
    """A thread's MjData, and the Simulation of worlds.h with its addresses."""

    def __init__(self, data: mujoco.MjData, names: tuple[str, ...]) -> None:
        self._data = data
        self._warnings = data.warning.number
        self._fields = _addresses([getattr(data, name) for name in names])
        self._simulation = SimulationStruct(
            data._address,
            ctypes.addressof(self._fields),
            self._warnings.ctypes.data,
            self._warnings.size,
            self._warnings.strides[0],
        )
        self.address = ctypes.addressof(self._simulation)

    @property
    def world(self) -> int:
        """The world stepped last."""
        return int(self._simulation.world)

    def checked(self, end: int) -> int:
        """Pass a call's return value on. Raises WorldError where MuJoCo refused to step."""
        if end == FAILED:
            raise failed(self.world, bytes(self._simulation.message).decode(errors="replace"))
        return end

    def became_unstable(self) -> bool:
        """Whether the world stepped last became unstable."""
        return bool(became_unstable(self._warnings))


def compiled_loop(worlds: WorldBatch) -> CompiledLoop | None:
    """The loop for these worlds; None if it cannot be compiled."""
    program = _program()
    return None if program is None else CompiledLoop(program, worlds)


@cache
def _program() -> ctypes.CDLL | None:
    """None if it cannot be compiled, which is logged once."""
    return WORLDS.made_or_none(_load)


def _load() -> ctypes.CDLL:
    source = "\n".join(map(shared, ("worlds.h", "world_rollout.h")))
    found = WORLDS.load(source, mirrors=MIRRORS)
    try:
        handler = _ADDRESS.in_dll(_engine(), "mju_user_error")
    except (OSError, ValueError) as error:
        raise CompilerError(str(error)) from error
    found.rayagi_step_worlds.argtypes = (_ADDRESS, _ADDRESS, _I64, _I64)
    found.rayagi_step_worlds.restype = _I64
    found.rayagi_run_rollout.argtypes = (_ADDRESS, _ADDRESS, _ADDRESS, _I64)
    found.rayagi_run_rollout.restype = _I64
    found.rayagi_install_error_handler.argtypes = (_ADDRESS,)
    found.rayagi_install_error_handler.restype = None
    # Without a handler MuJoCo ends the process on an error. The mujoco package's own calls have handlers of their own.
    found.rayagi_install_error_handler(ctypes.addressof(handler))
    return found


@cache
def _engine() -> ctypes.CDLL:
    """The libmujoco that the mujoco package has loaded. Raises OSError if it is not in the package's folder."""
    folder = Path(mujoco.__file__).parent
    for path in sorted(folder.glob("libmujoco.so*")):
        return ctypes.CDLL(str(path))
    raise OSError(f"no libmujoco.so in {folder}")


def _addresses(arrays: list[NDArray[np.float64]]) -> ctypes.Array[ctypes.c_void_p]:
    return (_ADDRESS * len(arrays))(*(array.ctypes.data for array in arrays))
