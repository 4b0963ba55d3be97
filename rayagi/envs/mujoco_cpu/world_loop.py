"""World loop: steps worlds one by one in any number of threads, each of which claims the next unclaimed world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import mujoco

from rayagi.envs.mujoco_cpu.physics import Array, BoolArray, WorldError, became_unstable

STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
"""mjtState bits of what a row of state holds."""


@dataclass(frozen=True)
class WorldBatch:
    """N worlds of one model.

    Attributes:
        rows: state of each world, (N, width) float64
        derived: MjData fields computed from the state, (N, ...) float64
        unstable: which worlds became unstable, (N,); a loop only sets entries, and its user clears them
    """

    model: mujoco.MjModel
    rows: Array
    derived: Mapping[str, Array]
    unstable: BoolArray


class WorldLoop(Protocol):
    """Steps worlds: loads a row into an MjData, steps, computes contact forces, saves the row and the derived fields."""

    def begin(self) -> None:
        """Mark all worlds as unclaimed. Not to be called while threads are in ``run``."""

    def run(self, data: mujoco.MjData, num_substeps: int, max_worlds: int) -> bool:
        """Claim and step at most ``max_worlds`` worlds, in this thread's own MjData.

        Returns:
            Whether unclaimed worlds may be left.

        Raises:
            WorldError: MuJoCo refuses to step a world.
        """


class PythonLoop:
    """A WorldLoop that needs no compiler. MuJoCo's calls release the interpreter lock, so threads run in parallel."""

    def __init__(self, worlds: WorldBatch) -> None:
        self._model, self._names = worlds.model, tuple(worlds.derived)
        self._unstable = worlds.unstable
        # Views of each world, made once instead of in every step.
        outputs = zip(*worlds.derived.values(), strict=True)
        self._worlds = list(zip(range(len(worlds.rows)), worlds.rows, outputs, strict=True))
        self.begin()

    def begin(self) -> None:
        """Mark all worlds as unclaimed."""
        # One iterator for all threads: the interpreter lock makes claiming the next world atomic.
        self._unclaimed: Iterator[tuple[int, Array, tuple[Array, ...]]] = iter(self._worlds)

    def run(self, data: mujoco.MjData, num_substeps: int, max_worlds: int) -> bool:
        """Claim and step at most ``max_worlds`` worlds."""
        model, warnings, claimed = self._model, data.warning.number, 0
        sources = [getattr(data, name) for name in self._names]
        for world, row, outputs in islice(self._unclaimed, max_worlds):
            claimed += 1
            mujoco.mj_setState(model, data, row, STATE)
            # Reset the counts: MuJoCo zeroes them when it resets an unstable world, so a difference could miss a warning.
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
        return claimed == max_worlds


def failed(world: int, message: str) -> WorldError:
    """The error for a world that MuJoCo refuses to step."""
    return WorldError(world, f"MuJoCo's state ({message})")
