"""Physics: N worlds of one MuJoCo model. Two implementations with bit-for-bit equal results.

``BatchPhysics`` uses ``mujoco.batch.Batch``. Batch never calls ``mj_rnePostConstraint``, so ``cfrc_ext`` stays
zero there. Tasks that observe or penalise contact forces use ``contact_physics.ContactPhysics``, which makes
the same two C calls per step as Gymnasium.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mujoco
import numpy as np
from mujoco.batch import Batch
from mujoco.batch import SimulationError as BatchError
from numpy.typing import NDArray

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


class Physics(Protocol):
    """N worlds of one model.

    Attributes:
        fields: qpos, qvel and the requested fields, as MuJoCo's last call left them: derived fields lag one
            substep behind the state, as in Gymnasium. (N, ...) float64, updated in place
    """

    fields: dict[str, Array]

    def step(self, controls: Array, num_substeps: int) -> BoolArray | None:
        """Advance every world.

        Args:
            controls: (N, nu)
            num_substeps: MuJoCo steps

        Returns:
            Which worlds became unstable (NaN, infinite or above 1e10) and need a restart, (N,); None: none.

        Raises:
            WorldError: MuJoCo refuses to step a world.
        """

    def restart(self, ids: NDArray[np.int64], qpos: Array, qvel: Array) -> None:
        """Reset worlds ``ids`` (K,) to a state, (K, nq) and (K, nv), and compute its derived fields."""

    def state_dict(self) -> dict[str, Array]:
        """Copies of everything that the next step and observation depend on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``'s values; the simulation continues bit for bit."""

    def close(self) -> None:
        """Stop the threads."""


def route_warnings_to_logging() -> None:
    """Send MuJoCo's warnings to Python's logging instead of MUJOCO_LOG.TXT in the working directory.

    A handler that is already installed stays.
    """
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_logger.info)


class BatchPhysics:
    """Worlds on ``mujoco.batch.Batch``, which runs them on its own threads; ``cfrc_ext`` is always zero."""

    def __init__(
        self, model: mujoco.MjModel, num_worlds: int, num_threads: int, names: Sequence[str]
    ) -> None:
        self._batch = Batch(model, num_worlds, num_threads)
        self._bound = {name: self._batch.bind(name) for name in names}
        self._state = {name: self._batch.bind(name) for name in STATE_FIELDS}
        self.fields = {name: np.array(view) for name, view in self._bound.items()}
        self._warning_counts = self._batch.warning[:, :, 1]
        self._last_warnings = self._warning_counts.copy()

    def step(self, controls: Array, num_substeps: int) -> BoolArray | None:
        """Advance every world."""
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
        """Reset some worlds."""
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
        _restore(self.fields, state)

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


def _restore(arrays: dict[str, Array], state: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        array[...] = state[name]
