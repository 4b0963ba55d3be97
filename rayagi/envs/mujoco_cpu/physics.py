"""N simulations of one model behind one small interface, with two engines that agree to the last bit.

``BatchPhysics`` steps on ``mujoco.batch.Batch``. Batch never calls ``mj_rnePostConstraint``, so ``cfrc_ext`` stays
zero there; tasks that observe or punish contact forces use ``WorldsPhysics``, a loop over one MjData per world that
makes the same two C calls per step as Gymnasium does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import mujoco
import numpy as np
from mujoco.batch import Batch
from mujoco.batch import SimulationError as BatchError
from numpy.typing import NDArray

Array = NDArray[np.float64]
Fields = Mapping[str, Array]
"""MjData fields by name, (N, ...) each."""

STATE_FIELDS = ("time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl")
"""What MuJoCo's next step depends on, in models without mocap bodies, plugins or applied forces."""

_INSTABILITIES = {
    "qpos": mujoco.mjtWarning.mjWARN_BADQPOS,
    "qvel": mujoco.mjtWarning.mjWARN_BADQVEL,
    "qacc": mujoco.mjtWarning.mjWARN_BADQACC,
    "ctrl": mujoco.mjtWarning.mjWARN_BADCTRL,
}
_logger = logging.getLogger("rayagi.envs.mujoco")


class UnstableWorldError(Exception):
    """World ``world`` of this batch has a NaN, infinite or huge ``quantity``. The engine turns it into a report."""

    def __init__(self, world: int, quantity: str) -> None:
        super().__init__(world, quantity)
        self.world, self.quantity = world, quantity


class Physics(Protocol):
    """N worlds of one model.

    Attributes:
        fields: qpos, qvel and the fields asked for, as MuJoCo leaves them after its last call: fields derived from
            the state lag one substep behind it, as in Gymnasium. (N, ...) float64; overwritten by every call
    """

    fields: dict[str, Array]

    def step(self, controls: Array, num_substeps: int) -> None:
        """Advance every world. ``controls``: (N, nu). Raises UnstableWorldError."""
        ...

    def restart(self, ids: NDArray[np.int64], qpos: Array, qvel: Array) -> None:
        """Reset worlds ``ids`` (K,) to the given state, (K, nq) and (K, nv), and compute what derives from it."""
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
    """Worlds on ``mujoco.batch.Batch``, which runs them on its own threads. ``cfrc_ext`` is always zero here."""

    def __init__(
        self, model: mujoco.MjModel, num_worlds: int, num_threads: int, names: Sequence[str]
    ) -> None:
        self._batch = Batch(model, num_worlds, num_threads)
        self._bound = {name: self._batch.bind(name) for name in names}
        self._state = {name: self._batch.bind(name) for name in STATE_FIELDS}
        self.fields = {name: np.array(view) for name, view in self._bound.items()}
        self._warning_counts = self._batch.warning[:, :, 1]
        self._seen_warnings = self._warning_counts.copy()

    def step(self, controls: Array, num_substeps: int) -> None:
        """Advance every world."""
        self._state["ctrl"][:] = controls
        try:
            self._batch.step(nstep=num_substeps)
        except BatchError as error:
            raise UnstableWorldError(int(error.ids[0]), f"MuJoCo's state ({error})") from error
        if not np.array_equal(self._warning_counts, self._seen_warnings):
            before, self._seen_warnings = self._seen_warnings, self._warning_counts.copy()
            _raise_if_unstable(self._seen_warnings - before)
        for name, view in self._bound.items():
            np.copyto(self.fields[name], view)

    def restart(self, ids: NDArray[np.int64], qpos: Array, qvel: Array) -> None:
        """Reset some worlds."""
        self._batch.reset(ids=ids, stage=mujoco.mjtStage.mjSTAGE_NONE)
        self._state["qpos"][ids] = qpos
        self._state["qvel"][ids] = qvel
        self._batch.forward(ids=ids)
        self._seen_warnings = self._warning_counts.copy()
        for name, view in self._bound.items():
            self.fields[name][ids] = view[ids]

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
        del self._batch


class WorldsPhysics:
    """One MjData per world and ``mj_rnePostConstraint`` after every step, so that ``cfrc_ext`` is right.

    Both C calls release the interpreter lock, so the worlds spread over ``num_threads`` Python threads.
    """

    def __init__(
        self, model: mujoco.MjModel, num_worlds: int, num_threads: int, names: Sequence[str]
    ) -> None:
        self._model = model
        self._worlds = [mujoco.MjData(model) for _ in range(num_worlds)]
        self._controls = [data.ctrl for data in self._worlds]
        self._warnings = [data.warning.number for data in self._worlds]
        # Views of every world's memory, once: a gather is then one concatenate per field.
        self._views = {name: [np.atleast_1d(getattr(data, name)) for data in self._worlds] for name in names}
        self.fields = {name: np.stack(views) for name, views in self._views.items()}
        self._flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in self.fields.items()}
        self._warning_counts = np.zeros(
            (num_worlds, mujoco.mjtWarning.mjNWARNING), dtype=self._warnings[0].dtype
        )
        bounds = np.linspace(0, num_worlds, min(num_threads, num_worlds) + 1).astype(int)
        self._chunks = [range(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]
        self._pool = ThreadPoolExecutor(len(self._chunks) - 1, "worlds") if len(self._chunks) > 1 else None

    def step(self, controls: Array, num_substeps: int) -> None:
        """Advance every world."""
        waiting: list[Future[None]] = []
        if self._pool is not None:
            waiting = [self._pool.submit(self._run, c, controls, num_substeps) for c in self._chunks[1:]]
        self._run(self._chunks[0], controls, num_substeps)
        for future in waiting:
            future.result()
        before = self._warning_counts
        self._warning_counts = np.concatenate(self._warnings).reshape(before.shape)
        if not np.array_equal(before, self._warning_counts):
            _raise_if_unstable(self._warning_counts - before)
        for name, views in self._views.items():
            np.concatenate(views, out=self._flat[name])

    def _run(self, chunk: range, controls: Array, num_substeps: int) -> None:
        model, worlds, ctrl = self._model, self._worlds, self._controls
        step, contact_forces = mujoco.mj_step, mujoco.mj_rnePostConstraint
        for i in chunk:
            data = worlds[i]
            ctrl[i][:] = controls[i]
            try:
                step(model, data, num_substeps)
            except mujoco.FatalError as error:
                raise UnstableWorldError(i, f"MuJoCo's state ({error})") from error
            contact_forces(model, data)

    def restart(self, ids: NDArray[np.int64], qpos: Array, qvel: Array) -> None:
        """Reset some worlds."""
        for row, i in enumerate(ids):
            data = self._worlds[i]
            mujoco.mj_resetData(self._model, data)
            data.qpos[:] = qpos[row]
            data.qvel[:] = qvel[row]
            mujoco.mj_forward(self._model, data)
            self._warning_counts[i] = self._warnings[i]
            for name, views in self._views.items():
                self.fields[name][i] = views[i]

    def state_dict(self) -> dict[str, Array]:
        """Copies of state and derived fields."""
        state = {name: np.stack([np.array(getattr(d, name)) for d in self._worlds]) for name in STATE_FIELDS}
        return state | _copies(self.fields)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        for i, data in enumerate(self._worlds):
            data.time = float(np.ravel(state["time"])[i])
            for name in STATE_FIELDS[1:]:
                getattr(data, name)[:] = state[name][i]
        _restore(self.fields, state)

    def close(self) -> None:
        """Stop the threads and free the worlds."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._views, self._controls, self._warnings, self._worlds = {}, [], [], []


def _raise_if_unstable(new_warnings: NDArray[Any]) -> None:
    """Raise for the first world with an instability among its new warnings, (N, kinds); full buffers are no harm."""
    for quantity, kind in _INSTABILITIES.items():
        worlds = np.flatnonzero(new_warnings[:, kind] > 0)
        if worlds.size:
            raise UnstableWorldError(int(worlds[0]), quantity)


def _copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.array(array) for name, array in arrays.items()}


def _restore(arrays: dict[str, Array], state: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        array[...] = state[name]
