"""Worlds whose contact forces count: stepped one by one, by this GMI's threads and on cores that others lend."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from rayagi.envs.mujoco_cpu.physics import Array, UnstableWorldError, raise_if_unstable

_ROW = int(mujoco.mjtState.mjSTATE_INTEGRATION)
_World = tuple[int, Array, tuple[Array, ...]]
"""Its number, its row of state, and its part of each derived field."""
_LOOK_EVERY = 4
"""Worlds between looks for lenders: after physics, code that is not in the cache costs a look several microseconds."""


class ContactPhysics:
    """Steps with ``mj_rnePostConstraint`` after each, so that ``cfrc_ext`` is right.

    As in Batch, a world is a row of state that is loaded into an MjData, stepped and saved. One MjData per
    thread stays in the processor's cache where one per world would not (3 % faster for 32 Ants), and the C
    calls release the interpreter lock, so that threads help. Each takes the next world that none has taken.
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
        self._pool = ThreadPoolExecutor(len(self._datas) - 1, "physics") if len(self._datas) > 1 else None
        self._lenders: dict[int, _Lender] = {}
        self._lent: Callable[[], Collection[int]] = tuple
        self.restart(
            np.arange(num_worlds),
            np.tile(self._datas[0].qpos, (num_worlds, 1)),
            np.zeros((num_worlds, model.nv)),
        )

    def step(self, controls: Array, num_substeps: int) -> None:
        """Advance every world."""
        self._controls[:] = controls
        # One for all threads: the interpreter lock makes it atomic to take the next.
        worlds = iter(self._worlds)
        waiting: list[Future[None]] = []
        if self._pool is not None:
            run = partial(self._pool.submit, self._run)
            waiting = [run(data, worlds, num_substeps) for data in self._datas[1:]]
        try:
            mine = self._inviting(worlds, num_substeps, waiting) if self._lenders else worlds
            self._run(self._datas[0], mine, num_substeps)
        finally:
            wait(waiting)
        for future in waiting:
            future.result()

    def borrow(self, cores: Mapping[int, Collection[int]], lent: Callable[[], Collection[int]]) -> None:
        """Use cores that are lent: a thread for each lender, made when that first lends."""
        self._lenders = {rank: _Lender(self._model, ids) for rank, ids in cores.items()}
        self._lent = lent

    def _inviting(
        self, worlds: Iterator[_World], num_substeps: int, waiting: list[Future[None]]
    ) -> Iterator[_World]:
        """The worlds; before each, who has begun to lend is asked to take some of those that are left."""
        idle = dict(self._lenders)
        for world in worlds:
            if world[0] % _LOOK_EVERY == 0:
                begun = [idle.pop(rank) for rank in self._lent() if rank in idle]
                waiting += [lender.run(self._run, worlds, num_substeps) for lender in begun]
            yield world

    def _run(self, data: mujoco.MjData, worlds: Iterator[_World], num_substeps: int) -> None:
        model, warnings = self._model, data.warning.number
        seen = warnings.tobytes()
        sources = [getattr(data, name) for name in self._derived]
        for world, row, outputs in worlds:
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
        for lender in self._lenders.values():
            lender.close()
        self._datas, self._worlds, self._lenders = [], [], {}


class _Lender:
    """Another GMI's cores: a thread there, and a simulation for it, made when they are first used."""

    def __init__(self, model: mujoco.MjModel, cores: Collection[int]) -> None:
        self._model = model
        self._data: mujoco.MjData | None = None
        self._pool = ThreadPoolExecutor(1, "borrowed", initializer=_pin, initargs=(cores,))

    def run(
        self,
        run: Callable[[mujoco.MjData, Iterator[_World], int], None],
        worlds: Iterator[_World],
        num_substeps: int,
    ) -> Future[None]:
        """Start to take worlds there."""
        if self._data is None:
            self._data = mujoco.MjData(self._model)
        return self._pool.submit(run, self._data, worlds, num_substeps)

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(wait=True)
        self._data = None


def _pin(cores: Collection[int]) -> None:
    """This thread alone. One that may not go there is of no use, and does no harm."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)


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
    raise_if_unstable((counts - np.frombuffer(seen, dtype=counts.dtype))[np.newaxis], first_world=world)
    return bytes(counts.tobytes())
