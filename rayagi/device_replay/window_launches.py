"""Recorded launches of the kernels in ``windows_kernel``: their arguments never change, so launching again costs little."""

from __future__ import annotations

import math
from typing import Any

import torch
import warp as wp
from torch import Tensor

from actors.replay import Column, Subscription, kernel
from rayagi.device_replay.buffers import DeviceBatch, unit_bytes
from rayagi.device_replay.windows_kernel import ROWS, check_generations, copy_windows
from rayagi.native.warp_streams import current_stream

_UNITS = {1: wp.uint8, 4: wp.uint32}
"""Types that are copied, by their bytes."""


class WindowLaunches:
    """Windows of n rows from memory that the device can read, in the order of torch's current stream."""

    def __init__(self, n: int, device: torch.device, located: Tensor) -> None:
        """``located``: SLOT, GENERATION, LENGTH and STEP of each row, on the device, (ROWS, n) int64."""
        wp.init()
        self._n, self._device = n, device
        self._arrays: list[Any] = []
        """Of the recorded launches, which do not keep them."""
        self._copies: list[Any] = []
        self._checks: list[Any] = []
        self._located = self._array(located.data_ptr(), wp.int64, (ROWS, n))

    def add_copy(
        self,
        column: Column,
        wanted: Subscription,
        batch: DeviceBatch,
        *,
        address: int,
        slots: int,
        row_bytes: int,
        first_byte: int,
    ) -> None:
        """Copy a subscription's windows.

        Args:
            column: of the subscription ``wanted``
            batch: has its values and mask
            address: of the rows, for the device
            slots, row_bytes: their number, and bytes from one to the next
            first_byte: where the column begins in a row
        """
        length, unit = wanted.length or 1, unit_bytes(column.step_bytes)
        shape = (self._n, length * column.step_bytes // unit)
        arguments = [
            self._array(address, _UNITS[unit], (slots, row_bytes // unit)),
            self._located,
            first_byte // unit,
            column.step_bytes // unit,
            wp.int64(column.extra),
            wp.int64(wanted.offset),
            length,
            kernel.PADDINGS.index(wanted.padding),
            self._array(batch.values[wanted.key].data_ptr(), _UNITS[unit], shape),
            self._array(batch.masks[wanted.key].data_ptr(), wp.uint8, (self._n, length)),
        ]
        self._copies.append(self._record(copy_windows, shape, arguments))

    def add_check(self, batch: DeviceBatch, *, address: int, shape: tuple[int, ...]) -> None:
        """Look once more at the tags of the rows, whose status words are at ``address``; the result is ``current``."""
        current = self._array(batch.current.data_ptr(), wp.uint8, (self._n,))
        tags = self._array(address, wp.uint64, shape)
        self._checks.append(self._record(check_generations, (self._n,), [tags, self._located, current]))

    def copy(self) -> None:
        """Launch the copies."""
        self._launch(self._copies)

    def check(self) -> None:
        """Launch the checks."""
        self._launch(self._checks)

    def _array(self, address: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        size = math.prod(shape) * wp.types.type_size_in_bytes(dtype)
        array = wp.array(ptr=address, dtype=dtype, shape=shape, capacity=size, device=str(self._device))
        self._arrays.append(array)
        return array

    def _record(self, function: Any, shape: tuple[int, ...], arguments: list[Any]) -> Any:
        return wp.launch(function, shape, inputs=arguments, device=str(self._device), record_cmd=True)

    def _launch(self, launches: list[Any]) -> None:
        stream = current_stream(self._device) if self._device.type == "cuda" else None
        for launch in launches:
            launch.launch(stream=stream)
