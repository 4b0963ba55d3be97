"""Batches out of device memory, which has a copy of every row that was selected once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.replay import Column, Keys, ReplayStore, Selection, Subscription
from actors.replay.shards import ReplayShards
from rayagi.device_replay.buffers import (
    BatchField,
    CopyGatherer,
    DeviceBatch,
    Located,
    StagingBuffers,
    UnavailableError,
    empty_batch,
    locate,
    refuse_unreadable,
    unit_bytes,
)
from rayagi.device_replay.window_launches import WindowLaunches
from rayagi.device_replay.windows_kernel import LENGTH, ROWS, SLOT, STEP

_MOST_OF_FREE = 0.25
"""Of the device's free memory: the rest is for networks, and for others that share it."""
_NOTHING = np.iinfo(np.uint64).max
"""Generation of a row that is not in the mirror."""


class _Mirrored(NamedTuple):
    """A column on the device: units of its blocks, (capacity, units of a block)."""

    column: Column
    blocks: Tensor


class MirrorGatherer:
    """Rows cross once per generation, when they are first selected; a kernel reads the windows."""

    def __init__(
        self,
        store: ReplayStore | ReplayShards,
        subscriptions: Sequence[Subscription],
        n: int,
        device: torch.device,
    ) -> None:
        """Allocate the columns that are subscribed to. Arguments as of ``DeviceGatherer``; one shard, in memory.

        Raises:
            UnavailableError: they need too much of the device's memory.
            ReplayError: an unknown column.
        """
        self._store, self._n = refuse_unreadable(store), n
        schema = store.schema
        names = dict.fromkeys(wanted.column for wanted in subscriptions)
        columns = [schema.columns[schema.position(name)] for name in names]
        needed = self._store.capacity * sum(map(schema.block_bytes, columns))
        if device.type == "cuda" and needed > (most := _MOST_OF_FREE * torch.cuda.mem_get_info(device)[0]):
            raise UnavailableError(
                f"its columns need {needed / 2**20:,.0f} MiB, and a quarter of the device's free memory is "
                f"{most / 2**20:,.0f} MiB"
            )
        self._device = device
        try:
            self._mirrored = {column.name: self._allocate(column) for column in columns}
        except torch.OutOfMemoryError as error:  # of a slice that may have less than the device has free
            raise UnavailableError(
                f"its columns need {needed / 2**20:,.0f} MiB of the device: {error}"
            ) from error
        self._generations = np.full(self._store.capacity, _NOTHING, np.uint64)
        self._replaced = self._store.replaced
        self._lengths = np.zeros(self._store.capacity, np.int64)
        """Of the rows that the mirror has."""
        self._whole = [
            Subscription(column=column.name, length=schema.max_length + column.extra) for column in columns
        ]
        self._copiers: dict[int, tuple[CopyGatherer, StagingBuffers]] = {}
        """By number of rows: what crosses, and the rows' places."""
        self._batch = empty_batch(schema, subscriptions, n, device)
        self._staging = StagingBuffers(
            [BatchField(torch.int64, (ROWS, n)), BatchField(torch.bool, (n,))], device
        )
        """Places of the selected rows, and which of them are current."""
        self._launches = WindowLaunches(n, device, self._staging.there[0])
        for wanted in subscriptions:
            column, blocks = self._mirrored[wanted.column]
            slots, row_bytes = len(blocks), schema.block_bytes(column)
            self._launches.add_copy(
                column,
                wanted,
                self._batch,
                address=blocks.data_ptr(),
                slots=slots,
                row_bytes=row_bytes,
                first_byte=0,
            )

    def _allocate(self, column: Column) -> _Mirrored:
        unit = unit_bytes(column.step_bytes)
        units = self._store.schema.block_bytes(column) // unit
        shape = (self._store.capacity, units)
        return _Mirrored(column, torch.zeros(shape, dtype=_UNITS[unit], device=self._device))

    def __call__(self, selection: Selection) -> DeviceBatch:
        """The windows of these n rows.

        Raises:
            ReplayError: another number of rows, a row of another shard, or a timestep that its trajectory does not have.
        """
        if self._replaced != (replaced := self._store.replaced):
            self._replaced = replaced
            self._generations.fill(_NOTHING)
        found = locate(self._store, selection, self._n)
        self._fetch(found)
        current = found.valid & (self._generations[found.slots] == found.generations)
        self._staging.wait()
        words, marks = self._staging.host[0].numpy(), self._staging.host[1].numpy()
        words[SLOT], words[STEP] = found.slots, found.steps
        words[LENGTH] = np.where(current, self._lengths[found.slots], 0)
        marks[:] = current
        self._staging.upload()
        self._launches.copy()
        self._batch.current.copy_(self._staging.there[1])
        return self._batch

    def _fetch(self, found: Located) -> None:
        """Bring the rows that the mirror does not have, or has in another generation."""
        missing = found.valid & (self._generations[found.slots] != found.generations)
        slots, at = np.unique(found.slots[missing], return_index=True)
        if not len(slots):
            return
        generations = found.generations[missing][at]
        count = len(slots)
        rows = min(self._n, 1 << (count - 1).bit_length())  # few sizes, and at most twice what is missing
        copier, places = self._copier(rows)
        # Where fewer are missing, the first ones are copied again, and left out on the device.
        keys = Keys(np.resize(slots + self._store.base, rows), np.resize(generations, rows))
        ones = np.ones(rows)
        staged = copier.stage(Selection(keys, np.zeros(rows, np.int64), ones, ones.astype(np.float32)))
        batch = copier.upload()
        places.wait()
        places.host[0].numpy()[:count] = slots
        places.upload()
        for wanted in self._whole:
            blocks = self._mirrored[wanted.column].blocks
            units = batch.values[wanted.key].view(-1).view(blocks.dtype).view(rows, -1)
            blocks.index_copy_(0, places.there[0][:count], units[:count])
        self._generations[slots] = np.where(staged.current[:count], generations, _NOTHING)
        first = self._whole[0]
        extra = self._mirrored[first.column].column.extra
        self._lengths[slots] = staged.masks[first.key][:count].sum(1) - extra

    def _copier(self, rows: int) -> tuple[CopyGatherer, StagingBuffers]:
        if rows not in self._copiers:
            self._copiers[rows] = (
                CopyGatherer(self._store, self._whole, rows, self._device),
                StagingBuffers([BatchField(torch.int64, (rows,))], self._device),
            )
        return self._copiers[rows]

    def close(self) -> None:
        """Nothing is to be released."""


_UNITS = {1: torch.uint8, 4: torch.int32}
"""Types that are copied, by their bytes."""
