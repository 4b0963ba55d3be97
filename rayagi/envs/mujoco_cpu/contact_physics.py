"""Physics with contact forces: worlds stepped one by one, by this GMI's threads and on idle cores of its peers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import mujoco
import numpy as np
from numpy.typing import NDArray

from collectives.barrier_progress import BarrierProgress
from rayagi.envs.mujoco_cpu.compiled_loop import compiled_loop
from rayagi.envs.mujoco_cpu.physics import Array, BoolArray
from rayagi.envs.mujoco_cpu.world_loop import STATE, PythonLoop, WorldBatch, WorldLoop

_PEER_CHECK_WORLDS = 4
"""Worlds between checks for waiting peers: a check before every world cost more than idle cores gained."""
MAX_ITEMS = 64
"""Items per call where Python does not check for waiting peers. Between calls it handles signals."""


class SharedWork(Protocol):
    """Items of work that threads claim, each thread with its own MjData."""

    def run(self, data: mujoco.MjData, max_items: int) -> bool:
        """Claim and do at most ``max_items`` items. Returns whether unclaimed items may be left."""

    def watch_peers(
        self, data: mujoco.MjData, barrier_progress: BarrierProgress, peers: Collection[int]
    ) -> None:
        """Let ``run`` with this MjData return early when one of the ranks ``peers`` waits for this GMI."""

    def cancel(self) -> None:
        """Make all threads return, those included that wait for another item."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of all worlds: an item is a world, and items are independent."""

    loop: WorldLoop
    num_substeps: int

    def run(self, data: mujoco.MjData, max_items: int) -> bool:
        return self.loop.run(data, self.num_substeps, max_items)

    def watch_peers(
        self, data: mujoco.MjData, barrier_progress: BarrierProgress, peers: Collection[int]
    ) -> None:
        """Nothing to do: Python checks between calls."""

    def cancel(self) -> None:
        """Nothing to do: no item waits for another."""


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
        self._model, self._num_worlds = model, num_worlds
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
        self._idle_core_workers: dict[int, _IdleCoreWorker] = {}
        self._barrier_progress: BarrierProgress | None = None
        self.restart(
            np.arange(num_worlds),
            np.tile(self.datas[0].qpos, (num_worlds, 1)),
            np.zeros((num_worlds, model.nv)),
        )

    def step(self, controls: Array, num_substeps: int) -> BoolArray | None:
        """Advance every world."""
        self.controls[:] = controls
        self.loop.begin()
        self.run_parallel(_Step(self.loop, num_substeps), _PEER_CHECK_WORLDS)
        if not self._unstable.any():
            return None
        unstable = self._unstable.copy()
        self._unstable[:] = False
        return unstable

    def run_parallel(self, work: SharedWork, check_every: int) -> None:
        """Do work on this GMI's threads, and on idle cores of its peers.

        Args:
            work: the items to do
            check_every: items between Python's checks for waiting peers
        """
        futures: list[Future[None]] = []
        if self._pool is not None:
            futures = [self._pool.submit(_run_to_end, work, data) for data in self.datas[1:]]
        try:
            if self._idle_core_workers:
                self._run_with_idle_cores(work, check_every, futures)
            else:
                _run_to_end(work, self.datas[0])
        except BaseException:
            work.cancel()  # others may wait for an item that this thread has begun
            raise
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def use_idle_cores(self, cores: Mapping[int, Collection[int]], barrier_progress: BarrierProgress) -> bool:
        """Use cores of waiting peers: one thread per peer, started when that peer first waits."""
        self._idle_core_workers = {rank: _IdleCoreWorker(self._model, ids) for rank, ids in cores.items()}
        self._barrier_progress = barrier_progress
        return True

    @property
    def num_workers(self) -> int:
        """Threads to divide work for: this GMI's, and one more where peers share their cores."""
        return len(self.datas) + bool(self._idle_core_workers)

    def _run_with_idle_cores(self, work: SharedWork, check_every: int, futures: list[Future[None]]) -> None:
        """As ``_run_to_end``, but every ``check_every`` items start a thread on the cores of each peer that waits by now."""
        assert self._barrier_progress is not None
        unused, more = dict(self._idle_core_workers), True
        while more:
            idle = [unused.pop(rank) for rank in self._barrier_progress.waiting_ranks() if rank in unused]
            futures += [worker.submit(work) for worker in idle]
            work.watch_peers(self.datas[0], self._barrier_progress, unused)
            more = work.run(self.datas[0], check_every)

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
        for worker in self._idle_core_workers.values():
            worker.close()
        self.datas, self._idle_core_workers = [], {}


class _IdleCoreWorker:
    """A thread pinned to a peer's cores, with an MjData; both are made when first used."""

    def __init__(self, model: mujoco.MjModel, cores: Collection[int]) -> None:
        self._model = model
        self._data: mujoco.MjData | None = None
        self._pool = ThreadPoolExecutor(1, "idle_core", initializer=_pin, initargs=(cores,))

    def submit(self, work: SharedWork) -> Future[None]:
        """Start to do items there."""
        if self._data is None:
            self._data = mujoco.MjData(self._model)
        return self._pool.submit(_run_to_end, work, self._data)

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(wait=True)
        self._data = None


def _run_to_end(work: SharedWork, data: mujoco.MjData) -> None:
    while work.run(data, MAX_ITEMS):
        pass


def _pin(cores: Collection[int]) -> None:
    """Pin this thread. If the operating system forbids it, the thread runs where it may."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)


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
