"""Rows as a store names and describes them: keys, selections, status; and checks of what callers give for rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from actors.replay.errors import ReplayError
from actors.replay.kernel import FormStruct, HeaderStruct, StatisticsStruct, address
from actors.replay.schema import ReplaySchema
from actors.replay.tree import Floats, Integers

STATUS = np.dtype(
    [
        ("index", np.int64),
        ("generation", np.uint64),
        ("state", np.uint8),
        ("priority", np.float64),
        ("timestamp", np.int64),
        ("length", np.int64),
        ("sampled", np.int64),
        ("sequence", np.int64),
    ]
)
"""A row of ``ReplayStore.status``: states are FREE, WRITING, COMMITTED and DELETED of ``kernel``."""


class TreeSpec(NamedTuple):
    """What the leaves of a tree are: a kind of ``kernel``, for PRIORITIES the exponent, for WINDOWS length and stride."""

    kind: int
    exponent: float = 1.0
    length: int = 1
    stride: int = 1


class Keys(NamedTuple):
    """Rows by global index and generation, (n,) each. A row that was overwritten has another generation."""

    indices: Integers
    generations: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected rows in their order, (n,) each. Its length is their number.

    Attributes:
        keys: global indices and generations
        steps: timestep of the trajectory that was selected; for sequences, their first
        probabilities: of each, in one draw; 1 for selectors without chance
        weights: importance weights, float32, at most 1; 1 without importance sampling
        lengths: of the rows' trajectories; None if whoever made the selection did not say
    """

    keys: Keys
    steps: Integers
    probabilities: Floats
    weights: NDArray[np.float32]
    lengths: Integers | None = None

    def __len__(self) -> int:
        return len(self.steps)


class Drawn(NamedTuple):
    """Rows drawn from a tree.

    Attributes:
        indices, generations, lengths, weights: of the rows, (n,)
        rest: of the target within the row's leaf, (n,)
        total: of the tree, (1,)
        accepted: False where a row was selected too often within the draw, (n,); None: all are good
    """

    indices: Integers
    generations: NDArray[np.uint64]
    lengths: Integers
    weights: Floats
    rest: Floats
    total: Floats
    accepted: NDArray[np.bool_] | None

    @classmethod
    def of(cls, n: int) -> Self:
        """Space for n rows."""
        return cls(
            np.empty(n, np.int64),
            np.empty(n, np.uint64),
            np.empty(n, np.int64),
            np.empty(n),
            np.empty(n),
            np.empty(1),
            np.empty(n, bool),
        )


class Frozen(NamedTuple):
    """A store without its blocks.

    Attributes:
        header: of kernel.c, with all counters
        rows: of kernel.c, (capacity,)
        queue: free local indices in the order of their use
    """

    header: HeaderStruct
    rows: NDArray[Any]
    queue: NDArray[np.int32]


def status_of(rows: NDArray[Any], base: int) -> NDArray[Any]:
    """Status of a shard's rows, whose first has the global index ``base``: (capacity,) of ``STATUS``."""
    found = np.empty(len(rows), STATUS)
    found["index"] = np.arange(base, base + len(rows))
    found["generation"], found["state"] = rows["tag"] >> np.uint64(2), rows["tag"] & np.uint64(3)
    for name in ("priority", "timestamp", "length", "sampled", "sequence"):
        found[name] = rows[name]
    return found


class Statistics(NamedTuple):
    """Lengths, priorities and timestamps of rows; their addresses for the kernel, and the address of these."""

    arrays: tuple[NDArray[Any] | None, ...]
    addresses: tuple[int | None, ...]
    struct: StatisticsStruct
    at: int

    @classmethod
    def of(cls, *arrays: NDArray[Any] | None) -> Self:
        """With the addresses of the arrays."""
        addresses = tuple(None if array is None else address(array) for array in arrays)
        struct = StatisticsStruct(*addresses)
        return cls(arrays, addresses, struct, ctypes.addressof(struct))


@lru_cache(maxsize=64)
def default_statistics(count: int, steps: int) -> Statistics:
    """Of rows of ``steps`` timesteps, priority 1, and no timestamp yet."""
    return Statistics.of(np.full(count, steps, np.int64), np.ones(count), None)


@dataclass(frozen=True, slots=True)
class StepForms:
    """The forms of arrays with one timestep a row, and their address for the kernel."""

    kept: tuple[object, ...]
    at: int

    @classmethod
    def of(cls, schema: ReplaySchema) -> Self | None:
        """Of a schema's columns; None if its rows have several timesteps."""
        columns = schema.columns
        if schema.max_length > 1 or any(column.extra for column in columns):
            return None
        forms = (FormStruct * len(columns))()
        shapes = [np.array(column.shape, np.int64) for column in columns]
        for form, column, shape in zip(forms, columns, shapes, strict=True):
            form.format, form.ndim, form.shape = ord(column.dtype.char), shape.size, address(shape)
        return cls((forms, shapes), ctypes.addressof(forms))


def in_order(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """A function that gives a mapping's values of these keys in their order. It raises KeyError where one is missing."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda rows: (rows[names[0]],)


def checked(keys: Keys) -> Keys:
    """Keys as contiguous arrays of the kernel's types. Raises ReplayError where they are not (n,) each."""
    indices = np.ascontiguousarray(keys.indices, np.int64)
    generations = np.ascontiguousarray(keys.generations, np.uint64)
    if indices.shape != generations.shape or indices.ndim != 1:
        raise ReplayError(
            f"keys have indices {list(indices.shape)} and generations {list(generations.shape)}: give (n,) of each"
        )
    return Keys(indices, generations)


def brief(values: Any) -> str:
    """The first values, for an error message."""
    found = np.asarray(values).ravel()
    return f"{found[:4].tolist()}{'...' if len(found) > 4 else ''}"


def whole(name: str, values: ArrayLike) -> Integers:
    """Whole numbers of any shape.

    Raises:
        ReplayError: they are none.
    """
    try:
        given = np.asarray(values)
        with np.errstate(invalid="ignore"):  # a NaN is not what it is cast to
            found = given.astype(np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise ReplayError(f"{name} are {brief(values)}: use whole numbers") from error
    if given.dtype.kind not in "biu" and not (given == found).all():
        raise ReplayError(f"{name} are {brief(values)}: use whole numbers")
    return found


def non_negative(name: str, values: ArrayLike, count: int) -> Floats:
    """(count,) finite values that are not negative."""
    try:
        found = np.ascontiguousarray(values, np.float64)
        if found.shape != (count,):
            found = np.ascontiguousarray(np.broadcast_to(np.asarray(values, np.float64), (count,)))
    except (ValueError, TypeError, OverflowError) as error:
        raise ReplayError(f"{name} are {brief(values)}: give one, or {count}") from error
    if count and not (found.min() >= 0 and np.isfinite(found.max())):
        raise ReplayError(
            f"{name} are {brief(found[~((found >= 0) & np.isfinite(found))])}: use finite ones, at least 0"
        )
    return found
