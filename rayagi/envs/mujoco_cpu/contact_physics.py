"""Physics with contact forces: worlds stepped one by one, by this GMI's threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from rayagi.envs.lifetime import ThreadOwner
from rayagi.envs.mujoco_cpu.physics import STATE, Array, BoolArray, PythonLoop, WorldBatch, WorldLoop
from rayagi.native.worlds import compiled_loop

_MAX_ITEMS = 64
"""Items per call. Between calls Python handles signals."""


class ContactPhysics:
    """Calls ``mj_rnePostConstraint`` after each step, which computes ``cfrc_ext``.

    As in Batch, a world is a row of state that is loaded into an MjData, stepped and saved. One MjData per
    thread stays in the cache, which one per world would not (3 % faster for 32 Ants). Each thread claims the
    next unclaimed world.

    Attributes:
        rows: state of each world, (N, width)
        controls: the columns of ``rows`` with the controls, (N, nu)
        loop: steps the worlds
        datas: one MjData per thread
    """

    def __init__(
        self, model: mujoco.MjModel, num_worlds: int, num_threads: int, names: Sequence[str]
    ) -> None:
        self._model = model
        self.rows = np.zeros((num_worlds, mujoco.mj_stateSize(model, STATE)))
        self.datas = [mujoco.MjData(model) for _ in range(min(num_threads, num_worlds))]
        views = _state_views(model, self.rows)
        self.controls = views["ctrl"]
        self._derived = {
            name: np.zeros((num_worlds, *getattr(self.datas[0], name).shape))
            for name in names
            if name not in views
        }
        self.fields = {name: views[name] for name in names if name in views} | self._derived
        self._unstable = np.zeros(num_worlds, dtype=np.bool_)
        worlds = WorldBatch(model, self.rows, self._derived, self._unstable)
        self.loop: WorldLoop = compiled_loop(worlds) or PythonLoop(worlds)
        self._pool = ThreadPoolExecutor(len(self.datas) - 1, "physics") if len(self.datas) > 1 else None
        self._owner = ThreadOwner(len(self.datas))
        self.restart(
            np.arange(num_worlds),
            np.tile(self.datas[0].qpos, (num_worlds, 1)),
            np.zeros((num_worlds, model.nv)),
        )

    def step(self, controls: Array, num_substeps: int) -> BoolArray | None:
        """As of ``BatchPhysics``."""
        self.controls[:] = controls
        self._unstable[:] = False  # of a step that ended with an error
        self.loop.begin()
        self.run_parallel(lambda data, most: self.loop.run(data, num_substeps, most))
        if not self._unstable.any():
            return None
        return self._unstable.copy()

    def run_parallel(
        self, work: Callable[[mujoco.MjData, int], bool], cancel: Callable[[], None] = lambda: None
    ) -> None:
        """Do work on this GMI's threads.

        Args:
            work: claims and does at most so many items with a thread's MjData; returns whether unclaimed ones may be left
            cancel: makes all threads return, those included that wait for another item
        """
        self._owner.check()
        futures: list[Future[None]] = []
        if self._pool is not None:
            futures = [self._pool.submit(self._run_to_end, work, cancel, data) for data in self.datas[1:]]
        try:
            self._run_to_end(work, cancel, self.datas[0])
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def _run_to_end(
        self, work: Callable[[mujoco.MjData, int], bool], cancel: Callable[[], None], data: mujoco.MjData
    ) -> None:
        try:
            while work(data, _MAX_ITEMS):
                pass
        except BaseException:
            cancel()  # others may wait for an item that this thread has begun
            mujoco.mj_resetData(self._model, data)  # an error leaves MuJoCo's stack in it as full as it was
            raise

    def restart(self, ids: NDArray[np.int64], qpos: Array, qvel: Array) -> None:
        """Reset some worlds."""
        for world, positions, speeds in zip(ids, qpos, qvel, strict=True):
            self.restart_in(self.datas[0], int(world), positions, speeds)

    def restart_in(self, data: mujoco.MjData, world: int, qpos: Array, qvel: Array) -> None:
        """Reset one world, using a thread's own MjData."""
        mujoco.mj_resetData(self._model, data)
        data.qpos[:] = qpos
        data.qvel[:] = qvel
        mujoco.mj_forward(self._model, data)
        mujoco.mj_getState(self._model, data, self.rows[world], STATE)
        for name, field in self._derived.items():
            field[world] = getattr(data, name)

    def state_dict(self) -> dict[str, Array]:
        """Copies of state rows and derived fields."""
        return {"rows": self.rows.copy()} | {name: field.copy() for name, field in self._derived.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.rows[...] = state["rows"]
        for name, field in self._derived.items():
            field[...] = state[name]

    def close(self) -> None:
        """Stop the threads and free the simulations."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self.datas = []


def _state_views(model: mujoco.MjModel, rows: Array) -> dict[str, Array]:
    """Views of the rows' columns. A row holds the components of mjtState in the order of their bits."""
    views: dict[str, Array] = {}
    start = 0
    for bit in range(int(mujoco.mjtState.mjNSTATE)):
        if not STATE & (1 << bit):
            continue
        size = mujoco.mj_stateSize(model, 1 << bit)
        name = mujoco.mjtState(1 << bit).name.removeprefix("mjSTATE_").lower()
        views[name] = rows[:, start : start + size]
        start += size
    return views
