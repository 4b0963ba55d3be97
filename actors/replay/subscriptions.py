"""What is copied of selected rows: columns and windows about the selected timestep, straight into the caller's batch."""

from __future__ import annotations

import ctypes
import itertools
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
from actors.replay.store import ReplayStore

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


def gather(
    store: ReplayStore,
    selection: Selection,
    subscriptions: Sequence[Subscription],
    *,
    out: Mapping[str, Any] | None = None,
    threads: int | None = None,
) -> Gathered:
    """Copy the windows of selected rows of one shard.

    Args:
        store: the shard that has all of them
        selection: n rows and their timesteps
        subscriptions: at least one, of different names
        out: arrays or CPU tensors (pinned ones, too) to copy into, by name; others are made
        threads: at most; None: as many as this process has cores, for large batches

    Raises:
        ReplayError: an unknown column, a timestep that its trajectory does not have, or an ``out`` of another kind.
    """
    n = len(selection)
    local, generations = store.local(selection.keys)
    parts, values, masks, size = _parts(store, n, subscriptions, out or {})
    valid = np.empty(n, np.uint8)
    steps = np.ascontiguousarray(selection.steps, np.int64)
    arguments = (
        *map(address, (local, generations, steps)),
        len(parts),
        ctypes.addressof(parts),
        address(valid),
    )
    wanted = min(threads or len(os.sched_getaffinity(0)), max(1, size // _THREAD_BYTES), max(1, n))
    bounds = [n * thread // wanted for thread in range(wanted + 1)]
    others = [
        _pool().submit(store.gather, begin, end, *arguments) for begin, end in itertools.pairwise(bounds)
    ]
    try:
        store.gather(0, bounds[1], *arguments)
    finally:
        for other in others:
            other.result()
    if (valid == kernel.OUTSIDE).any():
        at = int(np.argmax(valid == kernel.OUTSIDE))
        raise ReplayError(
            f"row {int(selection.keys.indices[at])} has no timestep {int(steps[at])}: its trajectory is shorter"
        )
    return Gathered(values, masks, valid == kernel.VALID)


def _parts(
    store: ReplayStore, n: int, subscriptions: Sequence[Subscription], out: Mapping[str, Any]
) -> tuple[Any, dict[str, Any], dict[str, NDArray[np.bool_]], int]:
    """The kernel's parts, the arrays they fill, and their bytes."""
    names = [subscription.key for subscription in subscriptions]
    if not names or len(set(names)) != len(names):
        raise ReplayError(
            f"subscriptions are named {names}: at least one is needed, each with a name of its own"
        )
    if unknown := out.keys() - set(names):
        raise ReplayError(f"out has {sorted(unknown)}, which no subscription fills: they are {names}")
    parts, size = (PartStruct * len(names))(), 0
    values: dict[str, Any] = {}
    masks: dict[str, NDArray[np.bool_]] = {}
    for part, wanted in zip(parts, subscriptions, strict=True):
        position = store.schema.position(wanted.column)
        column, steps = store.schema.columns[position], () if wanted.length is None else (wanted.length,)
        shape = (n, *steps, *column.shape)
        given = out.get(wanted.key)
        values[wanted.key] = np.empty(shape, column.dtype) if given is None else given
        masks[wanted.key] = np.empty((n, *steps), bool)
        part.column, part.offset, part.length = position, wanted.offset, wanted.length or 1
        part.padding = kernel.PADDINGS.index(wanted.padding)
        part.out = _address_of(values[wanted.key], wanted.key, shape, column.dtype)
        part.mask = address(masks[wanted.key])
        size += n * part.length * column.step_bytes
    return parts, values, masks, size


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
