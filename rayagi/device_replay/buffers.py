"""Memory of batches on a device, and its counterpart on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.replay import Gatherer, ReplayError, ReplaySchema, ReplayStore, Selection, Subscription, kernel
from actors.replay.shards import ReplayShards
from actors.replay.store import checked
from actors.replay.subscriptions import Gathered, refuse_outside
from placement.errors import counted

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


def empty_batch(
    schema: ReplaySchema, subscriptions: Sequence[Subscription], n: int, device: torch.device
) -> DeviceBatch:
    """A batch on the device, to be written."""
    fields = batch_fields(schema, subscriptions, n)
    return as_batch(
        [torch.empty(field.shape, dtype=field.dtype, device=device) for field in fields], subscriptions
    )


def unit_bytes(step_bytes: int) -> int:
    """Bytes that are copied at a time: 4 where steps are whole words, for a row's blocks begin at multiples of 8."""
    return 4 if step_bytes % 4 == 0 else 1


class CopyGatherer:
    """Available for every store and device."""

    def __init__(
        self,
        store: ReplayStore | ReplayShards,
        subscriptions: Sequence[Subscription],
        n: int,
        device: torch.device,
    ) -> None:
        """Arguments and errors as of ``Gatherer``; ``device``: of the batches."""
        fields = batch_fields(store.schema, subscriptions, n)
        self._staging = StagingBuffers(fields, device)
        self._host = as_batch(self._staging.host, subscriptions)
        self._batch = as_batch(self._staging.there, subscriptions)
        self._gatherer = Gatherer(store, subscriptions, n, out=self._host.values)

    def stage(self, selection: Selection) -> Gathered:
        """Gather on the host."""
        self._staging.wait()
        found = self._gatherer(selection)
        for name, mask in found.masks.items():
            self._host.masks[name].numpy()[...] = mask
        self._host.current.numpy()[:] = found.current
        return found

    def upload(self) -> DeviceBatch:
        """Copy what was staged."""
        self._staging.upload()
        return self._batch

    def __call__(self, selection: Selection) -> DeviceBatch:
        """The windows of these n rows. Raises ReplayError: as of ``Gatherer``."""
        self.stage(selection)
        return self.upload()

    def close(self) -> None:
        """Nothing is to be released."""


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


def refuse_unreadable(store: ReplayStore | ReplayShards) -> ReplayStore:
    """The store, if a device can read its rows in this process's memory. Raises UnavailableError: it cannot."""
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
        raise ReplayError(f"got {counted(len(selection), 'row')}; expected {n}")
    valid = store.examine(selection.keys, selection.steps)
    refuse_outside(valid, selection)
    indices, generations = checked(selection.keys)
    slots, good = indices - store.base, valid == kernel.VALID
    lengths = np.where(good, store.lengths_of(slots), 0)
    return Located(slots, generations, lengths, np.ascontiguousarray(selection.steps, np.int64), good)
