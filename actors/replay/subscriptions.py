"""What is copied of selected rows: columns and windows about the selected timestep, straight into the caller's batch."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from actors.replay import kernel
from actors.replay.errors import ReplayError, ShardLostError
from actors.replay.kernel import PartStruct, address
from actors.replay.rows import Keys, Selection, checked
from actors.replay.store import ReplayStore
from placement.errors import counted

if TYPE_CHECKING:
    from actors.replay.remote_shard import Request
    from actors.replay.shards import ReplayShards

Padding = Literal["in_place", "head", "tail"]
_MOST_STEPS = 2**31
"""Of a window's offset or length: trajectories have less."""
_BYTES_PER_START = 2**18
"""That a thread copies in the time in which another one is started: two threads are worth their start from 1 MiB on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subscription:
    """A window of one column about the selected timestep t (GEAR, section 3.2).

    Attributes:
        column: name
        offset: first timestep of the window, relative to t
        length: timesteps. The window ends at min(t + offset + length, trajectory length): nothing beyond the trajectory is
            read. None: the one step t + offset, without a time axis
        padding: where zeros go if the window has less than ``length`` steps. in_place: every step at its own place; head:
            before the steps; tail: behind them
        name: in the batch; the column's by default
    """

    column: str
    offset: int = 0
    length: int | None = None
    padding: Padding = "in_place"
    name: str = ""

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise ReplayError(f"a window of {self.column} has length {self.length}: use a positive number")
        if not (-_MOST_STEPS < self.offset < _MOST_STEPS and (self.length or 1) < _MOST_STEPS):
            raise ReplayError(
                f"a window of {self.column} has offset {self.offset} and length {self.length}: use numbers below 2**31"
            )
        if self.padding not in kernel.PADDINGS:
            raise ReplayError(f"padding {self.padding!r} is not known: use {', '.join(kernel.PADDINGS)}")

    @property
    def key(self) -> str:
        """Name in the batch."""
        return self.name or self.column

    def to_json(self) -> list[Any]:
        """As values of JSON."""
        return [self.column, self.offset, self.length, self.padding, self.name]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        """Inverse of ``to_json``."""
        column, offset, length, padding, name = values
        return cls(column=column, offset=offset, length=length, padding=padding, name=name)


class Sources(NamedTuple):
    """Where the rows of a batch are.

    Attributes:
        order: positions of all rows, those of one shard together; None: as they are, of one shard
        local: a store of this host, and the part of ``order`` that it has
        remote: what another host was asked for, and its part of ``order``
        lost: parts of ``order`` whose shard is lost
    """

    order: NDArray[np.int64] | None
    local: list[tuple[ReplayStore, int, int]]
    remote: list[tuple[Request, int, int]]
    lost: list[tuple[int, int]]


class Gathered(NamedTuple):
    """A batch.

    Attributes:
        values: by name, (n, length, *shape), or (n, *shape) without a length
        masks: by name, (n, length) or (n,) bool: which steps are of the trajectory
        current: (n,) bool. False where the row was overwritten before the copy was complete; its values are not to be used
    """

    values: dict[str, Any]
    masks: dict[str, NDArray[np.bool_]]
    current: NDArray[np.bool_]


class Gatherer:
    """Copies windows of n selected rows into the same batch, again and again."""

    def __init__(
        self,
        store: ReplayStore | ReplayShards,
        subscriptions: Sequence[Subscription],
        n: int,
        *,
        out: Mapping[str, Any] | None = None,
        threads: int | None = None,
    ) -> None:
        """Prepare the batch.

        Args:
            store: the shard that has the rows, or all shards
            subscriptions: at least one, of different names
            n: rows of a batch
            out: arrays or CPU tensors (pinned ones, too) to copy into, by name; others are made
            threads: at most; None: as many as this process has cores, for large batches

        Raises:
            ReplayError: an unknown column, or an ``out`` of another kind.
        """
        names = [subscription.key for subscription in subscriptions]
        if not names or len(set(names)) != len(names):
            raise ReplayError(
                f"subscriptions are named {names}: at least one is needed, each with a name of its own"
            )
        if unknown := (out or {}).keys() - set(names):
            raise ReplayError(f"out has {sorted(unknown)}, which no subscription fills: they are {names}")
        self._store, self._subscriptions, self._n = store, tuple(subscriptions), n
        self._parts, size = (PartStruct * len(names))(), 0
        self.values: dict[str, Any] = {}
        self.masks: dict[str, NDArray[np.bool_]] = {}
        for part, wanted in zip(self._parts, subscriptions, strict=True):
            size += self._prepare(part, wanted, (out or {}).get(wanted.key))
        self._workers = min(threads or len(os.sched_getaffinity(0)), worthwhile_threads(size), max(1, n))
        self._part_arguments = (len(names), ctypes.addressof(self._parts))

    def _prepare(self, part: PartStruct, wanted: Subscription, given: Any) -> int:
        """Fill one part and make its arrays. Returns the bytes of its values."""
        position = self._store.schema.position(wanted.column)
        column, steps = (
            self._store.schema.columns[position],
            () if wanted.length is None else (wanted.length,),
        )
        shape = (self._n, *steps, *column.shape)
        values = np.empty(shape, column.dtype) if given is None else given
        self.values[wanted.key], self.masks[wanted.key] = values, np.empty((self._n, *steps), bool)
        part.column, part.offset, part.length = position, wanted.offset, wanted.length or 1
        part.padding = kernel.PADDINGS.index(wanted.padding)
        part.out = _address_of(values, wanted.key, shape, column.dtype)
        part.mask = address(self.masks[wanted.key])
        return int(self._n * part.length * column.step_bytes)

    def __call__(self, selection: Selection) -> Gathered:
        """Copy the windows of these n rows; the values of the call before are overwritten.

        Raises:
            ReplayError: another number of rows, a row of another shard, or a timestep that its trajectory does not have.
        """
        valid = self.copy(*selection.keys, selection.steps)
        refuse_outside(valid, selection)
        return Gathered(self.values, self.masks, valid.view(bool))  # STALE is 0, VALID is 1

    def copy(self, indices: Any, generations: Any, steps: Any) -> NDArray[np.uint8]:
        """Copy the windows; returns STALE, VALID or OUTSIDE of ``kernel`` for each row, (n,).

        Raises:
            ReplayError: another number of rows, or a row of another shard.
        """
        indices, generations = checked(Keys(indices, generations))
        steps = np.ascontiguousarray(steps, np.int64)
        if len(indices) != self._n or steps.shape != indices.shape:
            raise ReplayError(
                f"got {counted(len(indices), 'row')} and steps {list(steps.shape)}; expected {self._n} of each"
            )
        valid = np.empty(self._n, np.uint8)
        if isinstance(self._store, ReplayStore):
            whole = Sources(None, [(self._store, 0, self._n)], [], [])
            self._copy_local(whole, indices, generations, steps, valid)
            return valid
        sources = self._store.sources(indices, generations, steps, self._subscriptions)
        order = sources.order
        assert order is not None
        failures: list[Exception] = []
        try:
            self._copy_local(sources, indices, generations, steps, valid)
        except Exception as error:
            failures.append(error)
        for answer, begin, end in sources.remote:  # all, so that no answer is left behind
            try:
                self._place(answer, order[begin:end], valid)
            except Exception as error:
                failures.append(error)
        for begin, end in sources.lost:
            self._clear(order[begin:end], valid)
        if failures:
            raise failures[0]
        return valid

    def _copy_local(
        self,
        sources: Sources,
        indices: NDArray[np.int64],
        generations: NDArray[np.uint64],
        steps: NDArray[np.int64],
        valid: NDArray[np.uint8],
    ) -> None:
        """Copy the rows of this host, with all threads."""
        arguments = (self._part_arguments, (indices, generations, steps, valid, sources.order))
        if self._workers == 1:
            for store, begin, end in sources.local:
                store.gather(begin, end, *arguments)
            return
        most = -(-self._n // self._workers)
        tasks = [
            (store, first, min(first + most, end))
            for store, begin, end in sources.local
            for first in range(begin, end, most)
        ]
        others = [_pool().submit(store.gather, begin, end, *arguments) for store, begin, end in tasks[1:]]
        try:
            for store, begin, end in tasks[:1]:
                store.gather(begin, end, *arguments)
        finally:
            for other in others:
                other.exception()  # the arrays must live until all threads have ended
        for other in others:
            other.result()

    def _place(self, answer: Request, at: NDArray[np.int64], valid: NDArray[np.uint8]) -> None:
        """Put the rows of another host at their places."""
        try:
            valid[at], values, masks = answer.result()
        except ShardLostError:
            self._clear(at, valid)
            return
        for key, part, mask in zip(self.masks, values, masks, strict=True):
            _array(self.values[key])[at], self.masks[key][at] = part, mask

    def _clear(self, at: NDArray[np.int64], valid: NDArray[np.uint8]) -> None:
        """Rows that are lost are as those that were overwritten."""
        valid[at] = kernel.STALE
        for key in self.masks:
            _array(self.values[key])[at], self.masks[key][at] = 0, False


def worthwhile_threads(size: int) -> int:
    """Threads that copy ``size`` bytes soonest, if a machine has as many."""
    # They are started one after the other, d seconds each, and copy r bytes/s each: W d + size / (W r) seconds, least for
    # W = sqrt(size / (r d)).
    return max(1, math.isqrt(size // _BYTES_PER_START))


def refuse_outside(valid: NDArray[np.uint8], selection: Selection) -> None:
    """Raise if a row is OUTSIDE.

    Raises:
        ReplayError: names the first one.
    """
    at = valid.tobytes().find(kernel.OUTSIDE)  # a search in bytes begins sooner than NumPy does
    if at >= 0:
        raise ReplayError(
            f"row {int(selection.keys.indices[at])} has no timestep {int(selection.steps[at])}: its trajectory is shorter"
        )


def gather(
    store: ReplayStore | ReplayShards,
    selection: Selection,
    subscriptions: Sequence[Subscription],
    *,
    out: Mapping[str, Any] | None = None,
    threads: int | None = None,
) -> Gathered:
    """Copy the windows of selected rows once. Arguments and errors as of ``Gatherer``."""
    return Gatherer(store, subscriptions, len(selection), out=out, threads=threads)(selection)


def _address_of(given: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Address of an array or tensor, if it has this shape and type and is contiguous."""
    try:
        array = _array(given)
    except (AttributeError, TypeError, RuntimeError) as error:
        raise ReplayError(
            f"out[{name!r}] is {type(given).__name__}: give an array, or a tensor on the CPU"
        ) from error
    if (
        array.shape != shape
        or array.dtype != dtype
        or not array.flags.c_contiguous
        or not array.flags.writeable
    ):
        raise ReplayError(
            f"out[{name!r}] is {array.dtype}{list(array.shape)} where a contiguous, writable {dtype}{list(shape)} is "
            "expected"
        )
    return address(array)


def _array(given: Any) -> NDArray[Any]:
    """An array, or a CPU tensor's memory as one."""
    return given if isinstance(given, np.ndarray) else np.asarray(given.detach())


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="replay")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads
