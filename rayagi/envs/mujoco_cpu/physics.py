"""N simulations of one model behind one small interface, with two engines that agree to the last bit.

``BatchPhysics`` steps on ``mujoco.batch.Batch``. Batch never calls ``mj_rnePostConstraint``, so ``cfrc_ext``
stays zero there; tasks that observe or punish contact forces use ``contact_physics.ContactPhysics``, a loop
that makes the same two C calls per step as Gymnasium does.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import mujoco
import numpy as np
from mujoco.batch import Batch
from mujoco.batch import SimulationError as BatchError
from numpy.typing import NDArray

from collectives.barrier_progress import BarrierProgress

Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Fields = Mapping[str, Array]
"""MjData fields by name, (N, ...) each."""

STATE_FIELDS = ("time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl")
"""What MuJoCo's next step depends on, in models without mocap bodies, plugins or applied forces."""

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
    """MuJoCo refuses to step world ``world`` of this batch, or its ``quantity`` is not finite; the engine reports it."""

    def __init__(self, world: int, quantity: str) -> None:
        super().__init__(world, quantity)
        self.world, self.quantity = world, quantity


class Physics(Protocol):
    """N worlds of one model.

    Attributes:
        fields: qpos, qvel and the fields asked for, as MuJoCo leaves them after its last call: fields derived
            from the state lag one substep behind it, as in Gymnasium. (N, ...) float64, live
    """

    fields: dict[str, Array]

    def step(self, controls: Array, num_substeps: int) -> BoolArray | None:
        """Advance every world.

        Args:
            controls: (N, nu)
            num_substeps: of MuJoCo

        Returns:
            which worlds became unstable (NaN, infinite or above 1e10) and need a restart, (N,); None: none did.

        Raises:
            WorldError: MuJoCo refuses to step one.
        """
        ...

    def restart(self, ids: NDArray[np.int64], qpos: Array, qvel: Array) -> None:
        """Reset worlds ``ids`` (K,) to a state, (K, nq) and (K, nv), and compute what derives from it."""
        ...

    def use_idle_cores(self, cores: Mapping[int, Collection[int]], barrier_progress: BarrierProgress) -> bool:
        """Use cores that are lent, as ``actors.protocols.CoreSharingEnv`` says."""
        ...

    def state_dict(self) -> dict[str, Array]:
        """Copies of all that the next step and the next observation depend on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``'s values; the continuation is equal to the last bit."""
        ...

    def close(self) -> None:
        """Stop the threads."""
        ...


def route_warnings_to_logging() -> None:
    """Send MuJoCo's warnings to Python's logging, instead of MUJOCO_LOG.TXT in the working directory.

    A handler that someone else installed stays.
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
        self._seen_warnings = self._warning_counts.copy()

    def step(self, controls: Array, num_substeps: int) -> BoolArray | None:
        """Advance every world."""
        self._state["ctrl"][:] = controls
        try:
            self._batch.step(nstep=num_substeps)
        except BatchError as error:
            raise WorldError(int(error.ids[0]), f"MuJoCo's state ({error})") from error
        for name, view in self._bound.items():
            np.copyto(self.fields[name], view)
        if np.array_equal(self._warning_counts, self._seen_warnings):
            return None
        before, self._seen_warnings = self._seen_warnings, self._warning_counts.copy()
        unstable = became_unstable(self._seen_warnings - before)
        return unstable if unstable.any() else None

    def restart(self, ids: NDArray[np.int64], qpos: Array, qvel: Array) -> None:
        """Reset some worlds."""
        self._batch.reset(ids=ids, stage=mujoco.mjtStage.mjSTAGE_NONE)
        self._state["qpos"][ids] = qpos
        self._state["qvel"][ids] = qvel
        self._batch.forward(ids=ids)
        self._seen_warnings = self._warning_counts.copy()
        for name, view in self._bound.items():
            self.fields[name][ids] = view[ids]

    def use_idle_cores(self, cores: Mapping[int, Collection[int]], barrier_progress: BarrierProgress) -> bool:
        """Not here: the batch deals its worlds to its own threads, which are as many from begin to end."""
        return False

    def state_dict(self) -> dict[str, Array]:
        """Copies of state and derived fields."""
        return _copies(self._state) | _copies(self.fields)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        for name, view in self._state.items():
            view[...] = np.asarray(state[name]).reshape(view.shape)
        _restore(self.fields, state)

    def close(self) -> None:
        """Let go of the batch, whose threads end with it."""
        self._bound, self._state = {}, {}
        self._warning_counts = self._seen_warnings
        self._batch = None


def became_unstable(new_warnings: NDArray[Any]) -> BoolArray:
    """Whether there is an instability among new warnings, (..., kinds); other kinds do no harm."""
    return np.asarray((new_warnings[..., _INSTABILITIES] > 0).any(axis=-1))


def _copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.array(array) for name, array in arrays.items()}


def _restore(arrays: dict[str, Array], state: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        array[...] = state[name]
