"""Batches that the device gathers itself out of the store's memory (GEAR, section 3.4: zero-copy access)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actors.replay import ReplayStore, Selection, Subscription
from actors.replay.subscriptions import ReadableShards
from rayagi.device_replay.buffers import BatchField, DeviceBatch, StagingBuffers, as_batch, batch_fields
from rayagi.device_replay.located import locate, refuse_unreadable
from rayagi.device_replay.page_locking import PageLockedArray
from rayagi.device_replay.window_launches import WindowLaunches
from rayagi.device_replay.windows_kernel import GENERATION, LENGTH, ROWS, SLOT, STEP


class ZeroCopyGatherer:
    """One launch for each subscription; only the rows' places cross beside the windows.

    On a CPU device the same kernels read the memory as it is.
    """

    def __init__(
        self,
        store: ReplayStore | ReadableShards,
        subscriptions: Sequence[Subscription],
        n: int,
        device: torch.device,
    ) -> None:
        """Page-lock the store's memory, and prepare the launches.

        Args:
            store: one shard, in memory
            subscriptions, n: as of ``Gatherer``
            device: of the batches

        Raises:
            UnavailableError: the device cannot read this store's memory.
            ReplayError: an unknown column.
        """
        self._store, self._n, self._device = refuse_unreadable(store), n, device
        self._locked: list[PageLockedArray] = []
        self._outputs = [
            torch.empty(field.shape, dtype=field.dtype, device=device)
            for field in batch_fields(store.schema, subscriptions, n)
        ]
        self._batch = as_batch(self._outputs, subscriptions)
        self._staging = StagingBuffers([BatchField(torch.int64, (ROWS, n))], device)
        self._launches = WindowLaunches(n, device, self._staging.there[0])
        try:
            self._record(subscriptions)
        except BaseException:
            self.close()
            raise

    def _record(self, subscriptions: Sequence[Subscription]) -> None:
        schema, status = self._store.schema, self._store.status_words
        blocks, tags = (self._readable(one) for one in (self._store.slot_bytes, status))
        slots, row_bytes = self._store.slot_bytes.shape
        for wanted in subscriptions:
            position = schema.position(wanted.column)
            self._launches.add_copy(
                schema.columns[position],
                wanted,
                self._batch,
                address=blocks,
                slots=slots,
                row_bytes=row_bytes,
                first_byte=schema.offsets[position],
            )
        self._launches.add_check(self._batch, address=tags, shape=status.shape)

    def _readable(self, array: NDArray[Any]) -> int:
        """Where the device finds this memory."""
        if self._device.type != "cuda":
            return int(array.__array_interface__["data"][0])
        with torch.cuda.device(self._device):
            self._locked.append(PageLockedArray(array))
        return self._locked[-1].device_address

    def __call__(self, selection: Selection) -> DeviceBatch:
        """The windows of these n rows.

        Raises:
            ReplayError: another number of rows, a row of another shard, or a timestep that its trajectory does not have.
        """
        self._staging.wait()
        found = locate(self._store, selection, self._n)
        words = self._staging.host[0].numpy()
        words[SLOT], words[LENGTH], words[STEP] = found.slots, found.lengths, found.steps
        words[GENERATION] = found.generations.view(np.int64)
        self._staging.upload()
        self._copy()
        self._check()
        return self._batch

    def _copy(self) -> None:
        self._launches.copy()

    def _check(self) -> None:
        self._launches.check()

    def close(self) -> None:
        """Release the store's memory. Safe to call twice."""
        for locked in self._locked:
            locked.close()
        self._locked.clear()
