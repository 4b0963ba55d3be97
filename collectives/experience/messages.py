"""Offsets of the columns in an Arrow IPC record-batch message, so that tensors can be written in place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from collectives.experience.schema import ExperienceSchema, Field
from collectives.transports.shm.memory import CACHE_LINE_BYTES


@dataclass(frozen=True)
class MessageLayout:
    """An encapsulated Arrow IPC message with a record batch of ``rows`` rows: metadata, then a body of columns."""

    schema: ExperienceSchema
    rows: int
    metadata: bytes
    """Everything before the body: the same for every batch with this number of rows."""
    offsets: tuple[int, ...]
    """Of each field's values, in bytes from the start of the message."""
    size: int
    """Bytes of the whole message."""

    @cached_property
    def lead(self) -> int:
        """Bytes between a cache-line boundary and the message, so that the body is aligned: copies are faster then."""
        return -len(self.metadata) % CACHE_LINE_BYTES

    @cached_property
    def _places(self) -> tuple[tuple[str, torch.dtype, int, int, tuple[int, ...], tuple[int, ...]], ...]:
        """Name, dtype, elements, offset, shape and strides of each field. Cached, because tensors are made per batch."""
        return tuple(
            (
                field.name,
                field.dtype,
                self.rows * field.row_numel,
                offset,
                (self.rows, *field.shape),
                torch.empty((self.rows, *field.shape), device="meta").stride(),
            )
            for field, offset in zip(self.schema.fields, self.offsets, strict=True)
        )

    def tensors(self, buffer: memoryview, begin: int) -> dict[str, Tensor]:
        """Each field as (rows, *shape), in place; they keep ``buffer`` alive."""
        if torch.is_inference_mode_enabled():
            # Tensors created in inference mode could not be written outside of it.
            with torch.inference_mode(mode=False):
                return self.tensors(buffer, begin)
        if self.rows == 0:
            return {name: torch.empty(shape, dtype=dtype) for name, dtype, _, _, shape, _ in self._places}
        # as_strided() takes a third of the time of view().
        return {
            name: torch.as_strided(
                torch.frombuffer(buffer, dtype=dtype, count=count, offset=begin + offset), shape, strides
            )
            for name, dtype, count, offset, shape, strides in self._places
        }


class MessageLayouts:
    """The layouts of one schema, cached by number of rows."""

    def __init__(self, schema: ExperienceSchema) -> None:
        self.schema = schema
        self.arrow = schema.arrow()
        self._known: dict[int, MessageLayout] = {}

    def for_rows(self, rows: int) -> MessageLayout:
        """The layout of a batch of ``rows`` rows."""
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._work_out(rows)
        return known

    def schema_message(self) -> bytes:
        """The Arrow IPC schema message, which precedes record batches in a stream."""
        message: bytes = self.arrow.serialize().to_pybytes()
        return message

    def read(self, message: memoryview) -> pa.RecordBatch:
        """The record batch, in place. It refers to the object ``message`` itself, whose reference count ``Batch`` checks."""
        return pa.ipc.read_record_batch(pa.py_buffer(message), self.arrow)

    def _work_out(self, rows: int) -> MessageLayout:
        """Serialise a template with pyarrow, read it back, and take the offsets from the buffers of that batch."""
        template = pa.record_batch([_column(field, rows) for field in self.schema.fields], schema=self.arrow)
        message = template.serialize()
        back = pa.ipc.read_record_batch(message, self.arrow)
        offsets = tuple(_values_address(column, message.address) for column in back.columns)
        metadata_bytes = 8 + int.from_bytes(message[4:8].to_pybytes(), "little")
        return MessageLayout(
            schema=self.schema,
            rows=rows,
            metadata=message[:metadata_bytes].to_pybytes(),
            offsets=offsets,
            size=message.size,
        )


def _column(field: Field, rows: int) -> Any:
    """A column with arbitrary values. Built from buffers: from lists or NumPy arrays pyarrow would import pandas."""
    column = field.arrow().type
    count = rows * field.row_numel
    values = pa.allocate_buffer(rows * field.row_bytes)
    if not isinstance(column, pa.FixedShapeTensorType):
        return pa.Array.from_buffers(column, count, [None, values])
    flat = pa.Array.from_buffers(column.value_type, count, [None, values])
    storage = pa.Array.from_buffers(column.storage_type, rows, [None], children=[flat])
    return pa.ExtensionArray.from_storage(column, storage)


def _values_address(column: Any, begin: int) -> int:
    storage = column.storage if isinstance(column, pa.ExtensionArray) else column
    values = storage.buffers()[-1]
    return 0 if values is None else int(values.address) - begin
