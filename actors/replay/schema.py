"""Schema of a replay store: columns of fixed type and shape, trajectories of any length up to a maximum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import numpy as np

from actors.replay.errors import ReplayError

_KINDS = "biuf"
"""NumPy's kinds of types that a column may have: bool, integers, floating-point numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One field of a trajectory."""

    name: str
    dtype: Any
    """np.dtype, or what NumPy makes one of: bool, or an integer or floating-point type of at most 8 bytes."""
    shape: tuple[int, ...] = ()
    """Of one timestep."""
    extra: int = 0
    """Steps beyond the trajectory's length: 1 for observations that include the one after the last action."""

    def __post_init__(self) -> None:
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            dtype = np.dtype(object)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if dtype.kind not in _KINDS or dtype.itemsize > 8 or not dtype.isnative:
            raise ReplayError(
                f"column {self.name!r} has type {self.dtype}: use bool, an integer or a float of at most 64 bits"
            )
        if any(size < 1 for size in self.shape) or self.extra < 0:
            raise ReplayError(
                f"column {self.name!r} has shape {self.shape} and {self.extra} extra steps: use positive sizes"
            )

    @property
    def step_bytes(self) -> int:
        """Bytes of one timestep."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def alignment(self) -> int:
        """Bytes that its place in a row is a multiple of: its type's; 4 where a timestep is copied in words of 4 bytes."""
        return max(self.dtype.itemsize, 1 if self.step_bytes % 4 else 4)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ReplaySchema:
    """The columns of a store, and the length of its longest trajectory.

    Attributes:
        columns: at least one, of different names
        max_length: timesteps; 1 for single transitions
    """

    columns: tuple[Column, ...]
    max_length: int = 1

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names or len(set(names)) != len(names):
            raise ReplayError(f"columns {names}: at least one is needed, each with a name of its own")
        if not 0 < self.max_length < 2**31:
            raise ReplayError(f"max_length is {self.max_length}: a trajectory has 1 to {2**31 - 1} steps")

    @property
    def row_bytes(self) -> int:
        """Bytes of a trajectory of the maximum length, all columns, up to where the next is aligned as this one."""
        largest = max(column.alignment for column in self.columns)
        return -(-sum(map(self.block_bytes, self.columns)) // largest) * largest

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each column's block begins in a row."""
        # By falling alignment, a power of two: each block then ends where the next may begin, without a gap.
        order = sorted(range(len(self.columns)), key=lambda k: -self.columns[k].alignment)
        begins = accumulate((self.block_bytes(self.columns[k]) for k in order), initial=0)
        places = dict(zip(order, begins, strict=False))
        return tuple(places[k] for k in range(len(self.columns)))

    def block_bytes(self, column: Column) -> int:
        """Bytes of one trajectory in this column."""
        return (self.max_length + column.extra) * column.step_bytes

    def position(self, name: str) -> int:
        """Number of a column. Raises ReplayError where there is none of this name."""
        for position, column in enumerate(self.columns):
            if column.name == name:
                return position
        known = ", ".join(column.name for column in self.columns)
        raise ReplayError(f"this store has no column {name!r}: its columns are {known}")

    def to_json(self) -> dict[str, Any]:
        """As values of JSON."""
        columns = [[c.name, c.dtype.str, list(c.shape), c.extra] for c in self.columns]
        return {"columns": columns, "max_length": self.max_length}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        columns = tuple(
            Column(name=name, dtype=np.dtype(dtype), shape=tuple(shape), extra=extra)
            for name, dtype, shape, extra in values["columns"]
        )
        return cls(columns, values["max_length"])
