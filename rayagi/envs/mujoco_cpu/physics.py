"""Physics: N worlds of one MuJoCo model. Two implementations with bit-for-bit equal results.

``BatchPhysics`` uses ``mujoco.batch.Batch``. Batch never calls ``mj_rnePostConstraint``, so ``cfrc_ext`` stays
zero there. Tasks that observe or penalise contact forces use ``contact_physics.ContactPhysics``, which makes
the same two C calls per step as Gymnasium.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import mujoco
import numpy as np
from mujoco.batch import Batch
from mujoco.batch import SimulationError as BatchError
from numpy.typing import NDArray

from rayagi.envs.lifetime import ThreadOwner

Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Fields = Mapping[str, Array]
"""MjData fields by name, (N, ...) each."""

STATE_FIELDS = ("time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl")
"""The state that MuJoCo's next step depends on, in models without mocap bodies, plugins or applied forces."""

_INSTABILITIES = [
    int(kind)
    for kind in (
        mujoco.mjtWarning.mjWARN_BADQPOS,
        mujoco.mjtWarning.mjWARN_BADQVEL,
        mujoco.mjtWarning.mjWARN_BADQACC,
        mujoco.mjtWarning.mjWARN_BADCTRL,
    )
]
_logger = logging.getLogger("rayagi.envs.mujoco")


class WorldError(Exception):
    """MuJoCo refuses to step world ``world`` of this batch, or the world's ``quantity`` is not finite."""

    def __init__(self, world: int, quantity: str) -> None:
        super().__init__(world, quantity)
        self.world, self.quantity = world, quantity


def route_warnings_to_logging() -> None:
    """Send MuJoCo's warnings to Python's logging instead of MUJOCO_LOG.TXT in the working directory.

    A handler that is already installed stays.
    """
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_logger.info)


class BatchPhysics:
    """Worlds on ``mujoco.batch.Batch``, which runs them on its own threads; ``cfrc_ext`` is always zero.

    Attributes:
        fields: qpos, qvel and the requested fields, as MuJoCo's last call left them: derived fields lag one
            substep behind the state, as in Gymnasium. (N, ...) float64, updated in place
    """

    def __init__(
        self, model: mujoco.MjModel, num_worlds: int, num_threads: int, names: Sequence[str]
    ) -> None:
        self._batch, self._owner = Batch(model, num_worlds, num_threads), ThreadOwner(num_threads)
        self._bound = {name: self._batch.bind(name) for name in names}
        self._state = {name: self._batch.bind(name) for name in STATE_FIELDS}
        self.fields = {name: np.array(view) for name, view in self._bound.items()}
        self._warning_counts = self._batch.warning[:, :, 1]
        self._last_warnings = self._warning_counts.copy()

    def step(self, controls: Array, num_substeps: int) -> BoolArray | None:
        """Advance every world; ``controls`` (N, nu). Raises WorldError if MuJoCo refuses to step a world.

        Returns:
            Which worlds became unstable (NaN, infinite or above 1e10) and need a restart, (N,); None: none.
        """
        self._owner.check()
        self._state["ctrl"][:] = controls
        try:
            self._batch.step(nstep=num_substeps)
        except BatchError as error:
            raise WorldError(int(error.ids[0]), f"MuJoCo's state ({error})") from error
        for name, view in self._bound.items():
            np.copyto(self.fields[name], view)
        if np.array_equal(self._warning_counts, self._last_warnings):
            return None
        before, self._last_warnings = self._last_warnings, self._warning_counts.copy()
        unstable = became_unstable(self._last_warnings - before)
        return unstable if unstable.any() else None

    def restart(self, ids: NDArray[np.int64], qpos: Array, qvel: Array) -> None:
        """Reset worlds ``ids`` (K,) to a state, (K, nq) and (K, nv), and compute its derived fields."""
        self._owner.check()
        self._batch.reset(ids=ids, stage=mujoco.mjtStage.mjSTAGE_NONE)
        self._state["qpos"][ids] = qpos
        self._state["qvel"][ids] = qvel
        self._batch.forward(ids=ids)
        self._last_warnings = self._warning_counts.copy()
        for name, view in self._bound.items():
            self.fields[name][ids] = view[ids]

    def state_dict(self) -> dict[str, Array]:
        """Copies of state and derived fields."""
        return _copies(self._state) | _copies(self.fields)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        for name, view in self._state.items():
            view[...] = np.asarray(state[name]).reshape(view.shape)
        for name, field in self.fields.items():
            field[...] = state[name]

    def close(self) -> None:
        """Release the batch, which ends its threads."""
        self._bound, self._state = {}, {}
        self._warning_counts = self._last_warnings
        self._batch = None


def became_unstable(new_warnings: NDArray[Any]) -> BoolArray:
    """Whether new warnings, (..., kinds), contain an instability. Other kinds are harmless."""
    return np.asarray((new_warnings[..., _INSTABILITIES] > 0).any(axis=-1))


def _copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.array(array) for name, array in arrays.items()}


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
