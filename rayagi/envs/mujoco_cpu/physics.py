"""N simulations of one model behind one small interface, with two engines that agree to the last bit.

``BatchPhysics`` steps on ``mujoco.batch.Batch``. Batch never calls ``mj_rnePostConstraint``, so ``cfrc_ext``
stays zero there; tasks that observe or punish contact forces use ``ContactPhysics``, a loop
that makes the same two C calls per step as Gymnasium does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
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
"""What MuJoCo's next step depends on, in models without mocap bodies, plugins or applied forces."""

_INSTABILITIES = {
    "qpos": mujoco.mjtWarning.mjWARN_BADQPOS,
    "qvel": mujoco.mjtWarning.mjWARN_BADQVEL,
    "qacc": mujoco.mjtWarning.mjWARN_BADQACC,
    "ctrl": mujoco.mjtWarning.mjWARN_BADCTRL,
}
_ROW = int(mujoco.mjtState.mjSTATE_INTEGRATION)
_logger = logging.getLogger("rayagi.envs.mujoco")


class UnstableWorldError(Exception):
    """World ``world`` of this batch has a NaN, infinite or huge ``quantity``; the engine reports it."""

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

    def step(self, controls: Array, num_substeps: int) -> None:
        """Advance every world. ``controls``: (N, nu). Raises UnstableWorldError."""
        ...

    def restart(self, ids: NDArray[np.int64], qpos: Array, qvel: Array) -> None:
        """Reset worlds ``ids`` (K,) to a state, (K, nq) and (K, nv), and compute what derives from it."""
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
        self._batch = None


class ContactPhysics:
    """Steps with ``mj_rnePostConstraint`` after each, so that ``cfrc_ext`` is right.

    As in Batch, a world is a row of state that is loaded into an MjData, stepped and saved. One MjData per
    thread stays in the processor's cache where one per world would not (3 % faster for 32 Ants), and the C
    calls release the interpreter lock, so that threads help.
    """

    def __init__(
        self, model: mujoco.MjModel, num_worlds: int, num_threads: int, names: Sequence[str]
    ) -> None:
        self._model = model
        self._rows = np.zeros((num_worlds, mujoco.mj_stateSize(model, _ROW)))
        self._datas = [mujoco.MjData(model) for _ in range(min(num_threads, num_worlds))]
        views = _state_views(model, self._rows)
        self._controls = views["ctrl"]
        self._derived = tuple(name for name in names if name not in views)
        self.fields = {name: views[name] for name in names if name in views}
        for name in self._derived:
            self.fields[name] = np.zeros((num_worlds, *getattr(self._datas[0], name).shape))
        # Every world's own views, once, not in every step.
        outputs = zip(*(self.fields[name] for name in self._derived), strict=True)
        self._worlds = list(zip(range(num_worlds), self._rows, outputs, strict=True))
        bounds = np.linspace(0, num_worlds, len(self._datas) + 1).astype(int)
        self._chunks = [slice(first, last) for first, last in pairwise(bounds)]
        self._pool = ThreadPoolExecutor(len(self._chunks) - 1, "physics") if len(self._chunks) > 1 else None
        self.restart(
            np.arange(num_worlds),
            np.tile(self._datas[0].qpos, (num_worlds, 1)),
            np.zeros((num_worlds, model.nv)),
        )

    def step(self, controls: Array, num_substeps: int) -> None:
        """Advance every world."""
        self._controls[:] = controls
        waiting: list[Future[None]] = []
        if self._pool is not None:
            others = zip(self._datas[1:], self._chunks[1:], strict=True)
            waiting = [self._pool.submit(self._run, data, chunk, num_substeps) for data, chunk in others]
        try:
            self._run(self._datas[0], self._chunks[0], num_substeps)
        finally:
            wait(waiting)
        for future in waiting:
            future.result()

    def _run(self, data: mujoco.MjData, chunk: slice, num_substeps: int) -> None:
        model, warnings = self._model, data.warning.number
        seen = warnings.tobytes()
        sources = [getattr(data, name) for name in self._derived]
        for world, row, outputs in self._worlds[chunk]:
            mujoco.mj_setState(model, data, row, _ROW)
            try:
                mujoco.mj_step(model, data, num_substeps)
            except mujoco.FatalError as error:
                raise UnstableWorldError(world, f"MuJoCo's state ({error})") from error
            mujoco.mj_rnePostConstraint(model, data)
            mujoco.mj_getState(model, data, row, _ROW)
            for output, source in zip(outputs, sources):  # noqa: B905 - of one length by construction
                output[...] = source
            if warnings.tobytes() != seen:
                seen = _unharmed(world, warnings, seen)

    def restart(self, ids: NDArray[np.int64], qpos: Array, qvel: Array) -> None:
        """Reset some worlds."""
        data = self._datas[0]
        for world, positions, speeds in zip(ids, qpos, qvel, strict=True):
            mujoco.mj_resetData(self._model, data)
            data.qpos[:] = positions
            data.qvel[:] = speeds
            mujoco.mj_forward(self._model, data)
            mujoco.mj_getState(self._model, data, self._rows[world], _ROW)
            for name in self._derived:
                self.fields[name][world] = getattr(data, name)

    def state_dict(self) -> dict[str, Array]:
        """Copies of state rows and derived fields."""
        return {"rows": self._rows.copy()} | {name: self.fields[name].copy() for name in self._derived}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._rows[...] = state["rows"]
        for name in self._derived:
            self.fields[name][...] = state[name]

    def close(self) -> None:
        """Stop the threads and free the simulations."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._datas, self._worlds = [], []


def _state_views(model: mujoco.MjModel, rows: Array) -> dict[str, Array]:
    """Views of the rows' columns; a row holds its components in the order of their bits."""
    views: dict[str, Array] = {}
    start = 0
    for bit in range(int(mujoco.mjtState.mjNSTATE)):
        if not _ROW & (1 << bit):
            continue
        size = mujoco.mj_stateSize(model, 1 << bit)
        name = mujoco.mjtState(1 << bit).name.removeprefix("mjSTATE_").lower()
        views[name] = rows[:, start : start + size]
        start += size
    return views


def _unharmed(world: int, counts: NDArray[Any], seen: bytes) -> bytes:
    """The new counts, or UnstableWorldError if one of an instability has risen since ``seen``."""
    _raise_if_unstable((counts - np.frombuffer(seen, dtype=counts.dtype))[np.newaxis], first_world=world)
    return bytes(counts.tobytes())


def _raise_if_unstable(new_warnings: NDArray[Any], first_world: int = 0) -> None:
    """Raise for the first world with an instability among its new warnings, (N, kinds); others do no harm."""
    for quantity, kind in _INSTABILITIES.items():
        worlds = np.flatnonzero(new_warnings[:, kind] > 0)
        if worlds.size:
            raise UnstableWorldError(first_world + int(worlds[0]), quantity)


def _copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.array(array) for name, array in arrays.items()}


def _restore(arrays: dict[str, Array], state: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        array[...] = state[name]
