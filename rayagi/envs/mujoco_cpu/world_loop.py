"""Worlds that are stepped one after the other, by any number of threads: each takes what none has taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import mujoco

from rayagi.envs.mujoco_cpu.physics import Array, BoolArray, WorldError, became_unstable

STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
"""What a row of state holds."""


@dataclass(frozen=True)
class WorldBatch:
    """N worlds of one model.

    Attributes:
        rows: state of each, (N, width) float64
        derived: fields of MjData that follow from it, (N, ...) float64
        unstable: which became unstable; who steps them sets it, nobody clears it there, (N,)
    """

    model: mujoco.MjModel
    rows: Array
    derived: Mapping[str, Array]
    unstable: BoolArray


class WorldLoop(Protocol):
    """Steps worlds: loads a row of state into an MjData, steps, computes contact forces, saves the row and what follows."""

    def begin(self) -> None:
        """Nobody has taken a world yet. Not while threads are in ``run``."""
        ...

    def run(self, data: mujoco.MjData, num_substeps: int, most: int) -> bool:
        """Step at most so many worlds that nobody has taken, in this thread's own MjData.

        Returns:
            Whether some may be left.

        Raises:
            WorldError: MuJoCo refuses to step one; those after it are left.
        """
        ...


class PythonLoop:
    """A WorldLoop that needs no compiler. MuJoCo's calls release the interpreter lock, so that threads help."""

    def __init__(self, worlds: WorldBatch) -> None:
        self._model, self._names = worlds.model, tuple(worlds.derived)
        self._unstable = worlds.unstable
        # Every world's own views, once, not in every step.
        outputs = zip(*worlds.derived.values(), strict=True)
        self._worlds = list(zip(range(len(worlds.rows)), worlds.rows, outputs, strict=True))
        self.begin()

    def begin(self) -> None:
        """Nobody has taken a world yet."""
        # One for all threads: the interpreter lock makes it atomic to take the next.
        self._left: Iterator[tuple[int, Array, tuple[Array, ...]]] = iter(self._worlds)

    def run(self, data: mujoco.MjData, num_substeps: int, most: int) -> bool:
        """Step at most so many worlds that nobody has taken."""
        model, warnings, took = self._model, data.warning.number, 0
        sources = [getattr(data, name) for name in self._names]
        for world, row, outputs in islice(self._left, most):
            took += 1
            mujoco.mj_setState(model, data, row, STATE)
            # From zero: MuJoCo sets the counts to zero when it resets an unstable world, so a difference could be missed.
            warnings[:] = 0
            try:
                mujoco.mj_step(model, data, num_substeps)
            except mujoco.FatalError as error:
                raise failed(world, str(error)) from error
            mujoco.mj_rnePostConstraint(model, data)
            mujoco.mj_getState(model, data, row, STATE)
            for output, source in zip(outputs, sources):  # noqa: B905 - of one length by construction
                output[...] = source
            if warnings.any():
                self._unstable[world] |= became_unstable(warnings)
        return took == most


def failed(world: int, message: str) -> WorldError:
    """Of a world that MuJoCo refuses to step."""
    return WorldError(world, f"MuJoCo's state ({message})")
