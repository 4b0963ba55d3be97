"""Batches that the device gathers itself out of the store's memory (GEAR, section 3.4: zero-copy access)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actors.replay import ReplayStore, Selection, Subscription
from actors.replay.shards import ReplayShards
from collectives.page_locking import MAPPED, PORTABLE, page_lock, unlock
from rayagi.device_replay.buffers import (
    BatchField,
    DeviceBatch,
    StagingBuffers,
    UnavailableError,
    empty_batch,
    locate,
    refuse_unreadable,
)
from rayagi.device_replay.window_launches import WindowLaunches
from rayagi.device_replay.windows_kernel import GENERATION, LENGTH, ROWS, SLOT, STEP


class PageLockedArray:
    """An array's memory, registered with the CUDA driver until ``close``.

    Attributes:
        device_address: where a kernel finds the first byte
    """

    def __init__(self, array: NDArray[np.generic]) -> None:
        """Register. Raises UnavailableError: the driver refuses."""
        self._array = array
        """Kept, so that the memory is not unmapped while it is registered."""
        self.address = int(array.__array_interface__["data"][0])
        status = page_lock(self.address, array.nbytes, PORTABLE | MAPPED)
        self._is_registered = status == 0
        if not self._is_registered:
            raise UnavailableError(
                f"CUDA does not page-lock the store's {array.nbytes / 2**20:,.0f} MiB (error {status}): see ulimit -l, and "
                "the container's limit of locked memory"
            )
        try:
            self.device_address = _device_address(self.address)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unregister, after the device has finished its work. Safe to call twice."""
        if self._is_registered:
            self._is_registered = False
            torch.cuda.synchronize()
            unlock(self.address)

    def __del__(self) -> None:
        if (
            getattr(self, "_is_registered", False) and not sys.is_finalizing()
        ):  # the driver ends with the process
            self.close()


def _device_address(address: int) -> int:
    """Where the current device sees registered memory; torch does not have this call.

    Raises:
        UnavailableError: it does not see it.
    """
    found = ctypes.c_uint64()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2(
            ctypes.byref(found), ctypes.c_void_p(address), 0
        )
    except OSError as error:
        raise UnavailableError(f"the CUDA driver's library cannot be opened: {error}") from error
    if status != 0:
        raise UnavailableError(f"the device has no access to page-locked memory (error {status})")
    return found.value


class ZeroCopyGatherer:
    """One launch for each subscription; only the rows' places cross beside the windows.

    On a CPU device the same kernels read the memory as it is.
    """

    def __init__(
        self,
        store: ReplayStore | ReplayShards,
        subscriptions: Sequence[Subscription],
        n: int,
        device: torch.device,
    ) -> None:
        """Page-lock the store's memory, and prepare the launches. Arguments as of ``DeviceGatherer``; one shard, in memory.

        Raises:
            UnavailableError: the device cannot read this store's memory.
            ReplayError: an unknown column.
        """
        self._store, self._n, self._device = refuse_unreadable(store), n, device
        self._locked: list[PageLockedArray] = []
        self._batch = empty_batch(store.schema, subscriptions, n, device)
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
