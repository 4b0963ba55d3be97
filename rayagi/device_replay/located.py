"""Where the selected rows of a store are, as its host finds them: what the device is told of a selection."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.replay import ReplayError, ReplayStore, Selection, kernel
from actors.replay.store import checked
from actors.replay.subscriptions import ReadableShards, refuse_outside
from rayagi.device_replay.buffers import UnavailableError

_MOST_ROW_BYTES = 2**31
"""Exclusive: places within a row are 32-bit numbers on the device."""


class Located(NamedTuple):
    """Selected rows, (n,) each.

    Attributes:
        slots: of their blocks
        generations: of their keys
        lengths: timesteps of their trajectories; 0 where the row was overwritten. To be believed if the generation is
            found unchanged once more afterwards
        steps: that were selected
        valid: bool: the row had this generation
    """

    slots: NDArray[np.int64]
    generations: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    steps: NDArray[np.int64]
    valid: NDArray[np.bool_]


def refuse_unreadable(store: ReplayStore | ReadableShards) -> ReplayStore:
    """The store, if a device can read its rows in this process's memory.

    Raises:
        UnavailableError: it cannot.
    """
    if not isinstance(store, ReplayStore):
        raise UnavailableError("the table has several shards")
    if store.spills:
        raise UnavailableError("the store spills rows to a file")
    if store.schema.row_bytes >= _MOST_ROW_BYTES:
        raise UnavailableError(
            f"a row has {store.schema.row_bytes:,} bytes, and places in it are 32-bit numbers"
        )
    return store


def locate(store: ReplayStore, selection: Selection, n: int) -> Located:
    """Find these n rows of a store that does not spill, where a row's slot is its index.

    Raises:
        ReplayError: another number of rows, a row of another shard, or a timestep that its trajectory does not have.
    """
    if len(selection) != n:
        raise ReplayError(f"{len(selection)} rows were given where {n} are expected")
    valid = store.examine(selection.keys, selection.steps)
    refuse_outside(valid, selection)
    indices, generations = checked(selection.keys)
    slots, good = indices - store.base, valid == kernel.VALID
    lengths = np.where(good, store.lengths_of(slots), 0)
    return Located(slots, generations, lengths, np.ascontiguousarray(selection.steps, np.int64), good)
