"""Sums by integer keys, as arrays: a profile with many iterations has hundreds of thousands of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_FEWEST = 1 << 16
"""Keys that an ``Accumulator`` holds at least before it adds them up."""


class KeyedSums(NamedTuple):
    """A sum for each key.

    Attributes:
        keys: distinct, ascending. Shape (n,)
        sums: exact. Shape (n,)
    """

    keys: Ints
    sums: Ints


NOTHING = KeyedSums(np.empty(0, np.int64), np.empty(0, np.int64))


def add_up(keys: Ints, values: Ints) -> KeyedSums:
    """Sum of the values of each key, exact in int64.

    Args:
        keys: in any order; equal ones are allowed. Shape (n,)
        values: Shape (n,)
    """
    if not len(keys):
        return NOTHING
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return KeyedSums(keys[first], np.add.reduceat(values[order], first))


def merged(tables: Sequence[KeyedSums]) -> KeyedSums:
    """The sums of several tables."""
    if len(tables) == 1:
        return tables[0]
    return add_up(*map(np.concatenate, zip(NOTHING, *tables, strict=True)))


class Accumulator:
    """Adds up many tables. It holds at most about twice as many keys as the result, and ``_FEWEST`` more."""

    def __init__(self) -> None:
        self._tables: list[KeyedSums] = []
        self.held, self._limit = 0, _FEWEST
        """Keys in memory."""

    def add(self, table: KeyedSums) -> None:
        """Add a table."""
        self._tables.append(table)
        self.held += len(table.keys)
        if self.held > self._limit:
            self._limit = 2 * len(self.result().keys) + _FEWEST

    def result(self) -> KeyedSums:
        """The sums so far."""
        found = merged(self._tables)
        self._tables, self.held = [found], len(found.keys)
        return found
