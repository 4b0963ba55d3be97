"""Memory of batches on a device, and its counterpart on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.replay import ReplayError, ReplaySchema, Subscription

_ALIGNMENT = 16
"""Bytes: of every tensor in a buffer."""


class UnavailableError(ReplayError):
    """A way to make batches is not available for this store, on this device. The text says why."""


class DeviceBatch(NamedTuple):
    """A batch on a device. Valid until the gatherer's next call, in the order of the device's current stream.

    Attributes:
        values: by name, (n, length, *shape), or (n, *shape) without a length
        masks: by name, (n, length) or (n,) bool: which steps are of the trajectory
        current: (n,) bool. False where the row was overwritten before the copy was complete; its values are not to be used
    """

    values: dict[str, Tensor]
    masks: dict[str, Tensor]
    current: Tensor


class BatchField(NamedTuple):
    """A tensor's type and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def torch_type(dtype: np.dtype[np.generic]) -> torch.dtype:
    """torch's name of a NumPy type."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class StagingBuffers:
    """Tensors on the host, page-locked for a CUDA device, which cross to their counterparts there in one copy."""

    def __init__(self, fields: Sequence[BatchField], device: torch.device) -> None:
        """Allocate both sides."""
        at, places = 0, []
        for field in fields:
            places.append(at)
            at += -(-field.size // _ALIGNMENT) * _ALIGNMENT
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._bytes = torch.zeros(at, dtype=torch.uint8, pin_memory=self._event is not None)
        self._there = torch.zeros(at, dtype=torch.uint8, device=device)
        self.host, self.there = (
            [
                memory[place : place + field.size].view(field.dtype).view(field.shape)
                for place, field in zip(places, fields, strict=True)
            ]
            for memory in (self._bytes, self._there)
        )

    def wait(self) -> None:
        """Wait until the host side may be written: the copy of before has ended."""
        if self._event is not None:
            self._event.synchronize()

    def upload(self) -> None:
        """Copy everything, in the order of the device's current stream."""
        self._there.copy_(self._bytes, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))


def batch_fields(schema: ReplaySchema, subscriptions: Sequence[Subscription], n: int) -> list[BatchField]:
    """Of a batch: the values of each subscription, then their masks, then ``current``."""
    windows = [() if wanted.length is None else (wanted.length,) for wanted in subscriptions]
    columns = [schema.columns[schema.position(wanted.column)] for wanted in subscriptions]
    return [
        *(
            BatchField(torch_type(column.dtype), (n, *window, *column.shape))
            for column, window in zip(columns, windows, strict=True)
        ),
        *(BatchField(torch.bool, (n, *window)) for window in windows),
        BatchField(torch.bool, (n,)),
    ]


def as_batch(tensors: Sequence[Tensor], subscriptions: Sequence[Subscription]) -> DeviceBatch:
    """Tensors of ``batch_fields`` by name."""
    names = [wanted.key for wanted in subscriptions]
    values, masks = tensors[: len(names)], tensors[len(names) : -1]
    return DeviceBatch(
        dict(zip(names, values, strict=True)), dict(zip(names, masks, strict=True)), tensors[-1]
    )


def unit_bytes(step_bytes: int) -> int:
    """Bytes that are copied at a time: 4 where steps are whole words, for a row's blocks begin at multiples of 8."""
    return 4 if step_bytes % 4 == 0 else 1
