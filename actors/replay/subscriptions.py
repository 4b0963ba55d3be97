"""What is copied of selected rows: columns and windows about the selected timestep, straight into the caller's batch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.replay import kernel
from actors.replay.errors import ReplayError
from actors.replay.kernel import PartStruct, address
from actors.replay.selection import Selection
from actors.replay.store import ReplayStore, checked

Padding = Literal["in_place", "head", "tail"]
_THREAD_BYTES = 2**19
"""Of a batch, for each thread: for less, starting one costs more than it gains."""


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
        if self.padding not in kernel.PADDINGS:
            raise ReplayError(f"padding {self.padding!r} is not known: use {', '.join(kernel.PADDINGS)}")

    @property
    def key(self) -> str:
        """Name in the batch."""
        return self.name or self.column


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
    """Copies windows of n selected rows of one shard into the same batch, again and again."""

    def __init__(
        self,
        store: ReplayStore,
        subscriptions: Sequence[Subscription],
        n: int,
        *,
        out: Mapping[str, Any] | None = None,
        threads: int | None = None,
    ) -> None:
        """Prepare the batch.

        Args:
            store: the shard that has the rows
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
        self._store, self._n = store, n
        self._parts, size = (PartStruct * len(names))(), 0
        self.values: dict[str, Any] = {}
        self.masks: dict[str, NDArray[np.bool_]] = {}
        for part, wanted in zip(self._parts, subscriptions, strict=True):
            size += self._prepare(part, wanted, (out or {}).get(wanted.key))
        most = threads or len(os.sched_getaffinity(0))
        workers = min(most, max(1, size // _THREAD_BYTES), max(1, n))
        self._bounds = [n * worker // workers for worker in range(workers + 1)]
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
        indices, generations = checked(selection.keys)
        steps = np.ascontiguousarray(selection.steps, np.int64)
        if not len(indices) == len(steps) == self._n:
            raise ReplayError(
                f"{len(indices)} rows and {len(steps)} steps were given where {self._n} are expected"
            )
        valid = np.empty(self._n, np.uint8)
        arguments = (
            address(indices),
            address(generations),
            address(steps),
            *self._part_arguments,
            address(valid),
        )
        ranges = zip(self._bounds[1:-1], self._bounds[2:], strict=True)
        others = [_pool().submit(self._store.gather, begin, end, *arguments) for begin, end in ranges]
        try:
            bad = self._store.gather(0, self._bounds[1], *arguments)
        finally:
            for other in others:
                other.exception()  # the arrays must live until all threads have ended
        if bad + sum(other.result() for other in others) and (valid == kernel.OUTSIDE).any():
            at = int(np.argmax(valid == kernel.OUTSIDE))
            raise ReplayError(
                f"row {int(indices[at])} has no timestep {int(steps[at])}: its trajectory is shorter"
            )
        return Gathered(self.values, self.masks, valid.view(bool))  # STALE is 0, VALID is 1


def gather(
    store: ReplayStore,
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
        array = (
            given if isinstance(given, np.ndarray) else np.asarray(given.detach())
        )  # of a CPU tensor: a view
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


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="replay")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads
