"""Worlds stepped by a compiled loop around MuJoCo's own functions.

Python's part of a step takes some 3 % of it, and holds the interpreter lock, which other threads that step worlds want.
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
from rayagi.envs.mujoco_cpu.physics import became_unstable
from rayagi.envs.mujoco_cpu.world_loop import STATE, WorldBatch, failed
from rayagi.envs.mujoco_cpu.world_structs import (
    FAILED,
    FUNCTIONS,
    MIRRORS,
    NONE_LEFT,
    WARNED,
    SimulationStruct,
    WorldBatchStruct,
)
from rayagi.native.headers import shared

WORLDS = Kernel(
    name="MuJoCo's worlds",
    module=__name__,
    reference="rayagi.envs.mujoco_cpu.world_loop:PythonLoop",
    without="worlds are stepped by Python",
)
_I64, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class CompiledLoop:
    """Implements WorldLoop: the same calls in the same order as PythonLoop, so the same bits."""

    def __init__(self, program: ctypes.CDLL, worlds: WorldBatch) -> None:
        self._step, self._roll = program.rayagi_step_worlds, program.rayagi_run_rollout
        self._kept = worlds  # while its addresses are used
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
        """Nobody has taken a world yet."""
        self._worlds.next = 0

    def run(self, data: mujoco.MjData, num_substeps: int, most: int) -> bool:
        """Step at most so many worlds that nobody has taken."""
        thread = self._thread(data)
        end = thread.checked(self._step(self.address, thread.address, num_substeps, most))
        if end == WARNED and thread.became_unstable():
            self._kept.unstable[thread.world] = True
        return end != NONE_LEFT

    def run_rollout(self, data: mujoco.MjData, rollout: int, turn: int, most: int) -> int:
        """rayagi_run_rollout of world_rollout.h in this thread's own MjData; ``rollout`` and ``turn`` are addresses.

        Returns:
            what ended it

        Raises:
            WorldError: MuJoCo refuses to step a world.
        """
        thread = self._thread(data)
        return thread.checked(self._roll(rollout, thread.address, turn, most))

    def became_unstable(self, data: mujoco.MjData) -> bool:
        """Whether the world that this MjData stepped last did."""
        return self._thread(data).became_unstable()

    def _thread(self, data: mujoco.MjData) -> _Thread:
        thread = self._simulations.get(data._address)
        if thread is None:
            thread = self._simulations[data._address] = _Thread(data, tuple(self._kept.derived))
        return thread


class _Thread:
    """A thread's MjData and where the program finds its parts."""

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
        """The world that was stepped last."""
        return int(self._simulation.world)

    def checked(self, end: int) -> int:
        """What ended a call. Raises WorldError where MuJoCo refused to step."""
        if end == FAILED:
            raise failed(self.world, bytes(self._simulation.message).decode(errors="replace"))
        return end

    def became_unstable(self) -> bool:
        """Whether the world that was stepped last did."""
        return bool(became_unstable(self._warnings))


def compiled_loop(worlds: WorldBatch) -> CompiledLoop | None:
    """The loop for these worlds; None where it cannot be compiled."""
    program = _program()
    return None if program is None else CompiledLoop(program, worlds)


@cache
def _program() -> ctypes.CDLL | None:
    """None where it cannot be had, which is logged once."""
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
    found.rayagi_catch.argtypes = (_ADDRESS,)
    found.rayagi_catch.restype = None
    # MuJoCo ends the process after an error that nobody catches; Python's own calls catch theirs in another way.
    found.rayagi_catch(ctypes.addressof(handler))
    return found


@cache
def _engine() -> ctypes.CDLL:
    """The library that the mujoco package has loaded. Raises OSError where it is not where it should be."""
    folder = Path(mujoco.__file__).parent
    for path in sorted(folder.glob("libmujoco.so*")):
        return ctypes.CDLL(str(path))
    raise OSError(f"no libmujoco.so in {folder}")


def _addresses(arrays: list[NDArray[np.float64]]) -> ctypes.Array[ctypes.c_void_p]:
    return (_ADDRESS * len(arrays))(*(array.ctypes.data for array in arrays))
