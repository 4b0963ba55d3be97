"""Worlds whose contact forces count: stepped one by one, by this GMI's threads and on cores that others lend."""

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

_LOOK_EVERY = 4
"""Worlds between looks for lenders: a look before each cost more than lending gained."""
MAX_ITEMS = 64
"""Pieces where nobody has to look for lenders: between them Python sees to signals."""


class SharedWork(Protocol):
    """Pieces that threads share, each in an MjData of its own."""

    def run(self, data: mujoco.MjData, most: int) -> bool:
        """Do at most so many. Returns whether some may be left."""
        ...

    def watch_peers(
        self, data: mujoco.MjData, barrier_progress: BarrierProgress, away: Collection[int]
    ) -> None:
        """Who works in this MjData looks for lenders: ``run`` may return when one of these ranks waits for this member."""
        ...

    def cancel(self) -> None:
        """Nobody waits for what is left."""
        ...


@dataclass(frozen=True, slots=True)
class _Step:
    """Work of one step of all worlds, which do not wait for each other."""

    loop: WorldLoop
    num_substeps: int

    def run(self, data: mujoco.MjData, most: int) -> bool:
        return self.loop.run(data, self.num_substeps, most)

    def watch_peers(
        self, data: mujoco.MjData, barrier_progress: BarrierProgress, away: Collection[int]
    ) -> None:
        """Python looks, every few worlds."""

    def cancel(self) -> None:
        """Threads end by themselves."""


class ContactPhysics:
    """Steps with ``mj_rnePostConstraint`` after each, so that ``cfrc_ext`` is right.

    As in Batch, a world is a row of state that is loaded into an MjData, stepped and saved. One MjData per
    thread stays in the processor's cache where one per world would not (3 % faster for 32 Ants). Each thread
    takes the next world that none has taken.

    Attributes:
        rows: state of each world, (N, width)
        controls: those of its columns that hold the controls, (N, nu)
        loop: what steps worlds
        datas: each thread's own
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
        self.run_parallel(_Step(self.loop, num_substeps), _LOOK_EVERY)
        if not self._unstable.any():
            return None
        unstable = self._unstable.copy()
        self._unstable[:] = False
        return unstable

    def run_parallel(self, work: SharedWork, look_every: int) -> None:
        """Do work on all threads, and on cores that are lent.

        Args:
            work: to be done
            look_every: pieces between Python's looks for lenders
        """
        waiting: list[Future[None]] = []
        if self._pool is not None:
            waiting = [self._pool.submit(_run_to_end, work, data) for data in self.datas[1:]]
        try:
            if self._idle_core_workers:
                self._run_with_idle_cores(work, look_every, waiting)
            else:
                _run_to_end(work, self.datas[0])
        except BaseException:
            work.cancel()  # of what this thread has begun
            raise
        finally:
            wait(waiting)
        for future in waiting:
            future.result()

    def use_idle_cores(self, cores: Mapping[int, Collection[int]], barrier_progress: BarrierProgress) -> bool:
        """Use cores that are lent: a thread for each lender, made when that first lends."""
        self._idle_core_workers = {rank: _IdleCoreWorker(self._model, ids) for rank, ids in cores.items()}
        self._barrier_progress = barrier_progress
        return True

    @property
    def num_workers(self) -> int:
        """Threads that work should be divided for: own ones, and a lender's where there may be any."""
        return len(self.datas) + bool(self._idle_core_workers)

    def _run_with_idle_cores(self, work: SharedWork, look_every: int, waiting: list[Future[None]]) -> None:
        """As ``_run_to_end``; now and then, who has begun to lend is asked to take some of what is left."""
        assert self._barrier_progress is not None
        away, more = dict(self._idle_core_workers), True
        while more:
            begun = [away.pop(rank) for rank in self._barrier_progress.waiting_ranks() if rank in away]
            waiting += [worker.submit(work) for worker in begun]
            work.watch_peers(self.datas[0], self._barrier_progress, away)
            more = work.run(self.datas[0], look_every)

    def restart(self, ids: NDArray[np.int64], qpos: Array, qvel: Array) -> None:
        """Reset some worlds."""
        for world, positions, speeds in zip(ids, qpos, qvel, strict=True):
            self.restart_in(self.datas[0], int(world), positions, speeds)

    def restart_in(self, data: mujoco.MjData, world: int, qpos: Array, qvel: Array) -> None:
        """Reset one world, in a thread's own MjData."""
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
        """Go on from a saved state."""
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
    """Another GMI's cores: a thread there, and a simulation for it, made when they are first used."""

    def __init__(self, model: mujoco.MjModel, cores: Collection[int]) -> None:
        self._model = model
        self._data: mujoco.MjData | None = None
        self._pool = ThreadPoolExecutor(1, "borrowed", initializer=_pin, initargs=(cores,))

    def submit(self, work: SharedWork) -> Future[None]:
        """Start to take pieces there."""
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
    """This thread alone. One that may not go there is of no use, and does no harm."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)


def _state_views(model: mujoco.MjModel, rows: Array) -> dict[str, Array]:
    """Views of the rows' columns; a row holds its components in the order of their bits."""
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
