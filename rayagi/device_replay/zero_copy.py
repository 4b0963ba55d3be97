"""Batches that the device gathers itself out of the store's memory (GEAR, section 3.4: zero-copy access)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import warp as wp
from numpy.typing import NDArray

from actors.replay import ReplayStore, Selection, Subscription, kernel
from actors.replay.subscriptions import ReadableShards
from rayagi.device_replay.buffers import DeviceBatch, Field, Staging, as_batch, batch_fields, unit_bytes
from rayagi.device_replay.located import locate, refuse_unreadable
from rayagi.device_replay.page_locking import PageLockedArray
from rayagi.device_replay.windows_kernel import (
    GENERATION,
    LENGTH,
    ROWS,
    SLOT,
    STEP,
    check_generations,
    copy_windows,
)

_UNITS = {1: wp.uint8, 4: wp.uint32}
"""Types that are copied, by their bytes."""


class ZeroCopyGatherer:
    """One launch for each subscription; only the rows' places cross beside the windows. [unverified on GPU]

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
        wp.init()
        self._locked: list[PageLockedArray] = []
        self._streams: dict[int, Any] = {}
        self._outputs = [
            torch.empty(field.shape, dtype=field.dtype, device=device)
            for field in batch_fields(store.schema, subscriptions, n)
        ]
        self._batch = as_batch(self._outputs, subscriptions)
        self._staging = Staging([Field(torch.int64, (ROWS, n))], device)
        self._arrays: list[Any] = []
        """Of the recorded launches, which do not keep them."""
        try:
            self._launches = self._recorded(subscriptions)
        except BaseException:
            self.close()
            raise

    def _recorded(self, subscriptions: Sequence[Subscription]) -> list[Any]:
        """The launches, whose arguments never change: recorded ones cost little to launch again."""
        blocks, status = (self._readable(one) for one in (self._store.slot_bytes, self._store.status_words))
        (located,) = self._staging.there
        words = self._array(located.data_ptr(), wp.int64, (ROWS, self._n))
        slots, row_bytes = self._store.slot_bytes.shape
        launches = []
        for wanted, values, mask in zip(
            subscriptions, self._batch.values.values(), self._batch.masks.values(), strict=True
        ):
            position = self._store.schema.position(wanted.column)
            column, length = self._store.schema.columns[position], wanted.length or 1
            unit = unit_bytes(column.step_bytes)
            shape = (self._n, length * column.step_bytes // unit)
            arguments = [
                self._array(blocks, _UNITS[unit], (slots, row_bytes // unit)),
                words,
                self._store.schema.offsets[position] // unit,
                column.step_bytes // unit,
                wp.int64(column.extra),
                wp.int64(wanted.offset),
                length,
                kernel.PADDINGS.index(wanted.padding),
                self._array(values.data_ptr(), _UNITS[unit], shape),
                self._array(mask.data_ptr(), wp.uint8, (self._n, length)),
            ]
            launches.append(self._record(copy_windows, shape, arguments))
        current = self._array(self._batch.current.data_ptr(), wp.uint8, (self._n,))
        tags = self._array(status, wp.uint64, self._store.status_words.shape)
        launches.append(self._record(check_generations, (self._n,), [tags, words, current]))
        return launches

    def _readable(self, array: NDArray[Any]) -> int:
        """Where the device finds this memory."""
        if self._device.type != "cuda":
            return int(array.__array_interface__["data"][0])
        with torch.cuda.device(self._device):
            self._locked.append(PageLockedArray(array))
        return self._locked[-1].device_address

    def _array(self, address: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        size = math.prod(shape) * wp.types.type_size_in_bytes(dtype)
        array = wp.array(ptr=address, dtype=dtype, shape=shape, capacity=size, device=str(self._device))
        self._arrays.append(array)
        return array

    def _record(self, function: Any, shape: tuple[int, ...], arguments: list[Any]) -> Any:
        return wp.launch(function, shape, inputs=arguments, device=str(self._device), record_cmd=True)

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
        for launch in self._launches[:-1]:
            launch.launch(stream=self._stream())

    def _check(self) -> None:
        self._launches[-1].launch(stream=self._stream())

    def _stream(self) -> Any:
        """torch's current stream as a Warp stream; None on a CPU."""
        if self._device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in self._streams:
            self._streams[stream.cuda_stream] = wp.stream_from_torch(stream)
        return self._streams[stream.cuda_stream]

    def close(self) -> None:
        """Release the store's memory. Safe to call twice."""
        for locked in self._locked:
            locked.close()
        self._locked.clear()
