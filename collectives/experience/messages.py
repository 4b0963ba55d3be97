"""Where columns lie in an Arrow record-batch message, so that tensors can be written where Arrow will read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from collectives.experience.schema import ExperienceSchema, Field
from collectives.transports.shm.memory import CACHE_LINE_BYTES


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """A record batch of so many rows, as an encapsulated Arrow IPC message: metadata, then a body of columns."""

    schema: ExperienceSchema
    rows: int
    metadata: bytes
    """All that comes before the body: the same for every batch of as many rows."""
    offsets: tuple[int, ...]
    """Of each field's values, from the begin of the message."""
    size: int
    """Bytes of the whole message."""

    @property
    def lead(self) -> int:
        """Bytes that a message begins behind a cache line, so that its body begins at one: copies are faster then."""
        return -len(self.metadata) % CACHE_LINE_BYTES

    def tensors(self, buffer: memoryview, begin: int) -> dict[str, Tensor]:
        """Each field as (rows, *shape), in place; they keep ``buffer`` alive."""
        with torch.inference_mode(
            mode=False
        ):  # whoever runs a policy asks in that mode; others could not write then
            return {
                field.name: self._tensor(field, buffer, begin + offset)
                for field, offset in zip(self.schema.fields, self.offsets, strict=True)
            }

    def _tensor(self, field: Field, buffer: memoryview, begin: int) -> Tensor:
        shape = (self.rows, *field.shape)
        if self.rows == 0:
            return torch.empty(shape, dtype=field.dtype)
        count = self.rows * field.row_numel
        return torch.frombuffer(buffer, dtype=field.dtype, count=count, offset=begin).view(shape)


class Layouts:
    """The layouts of one schema, by number of rows; each is worked out once."""

    def __init__(self, schema: ExperienceSchema) -> None:
        self.schema = schema
        self.arrow = schema.arrow()
        self._known: dict[int, MessageLayout] = {}

    def of(self, rows: int) -> MessageLayout:
        """The layout of a batch of ``rows`` rows."""
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._work_out(rows)
        return known

    def schema_message(self) -> bytes:
        """What comes before record batches in a stream."""
        message: bytes = self.arrow.serialize().to_pybytes()
        return message

    def read(self, message: memoryview) -> pa.RecordBatch:
        """The record batch in place; it keeps ``message`` alive: this very object, as a slice of it would not."""
        return pa.ipc.read_record_batch(pa.py_buffer(message), self.arrow)

    def _work_out(self, rows: int) -> MessageLayout:
        """pyarrow serialises a template; where it put each column is then read off the batch that it reads back."""
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
    """A column of any values. Made of buffers: of lists or NumPy arrays, pyarrow would import pandas."""
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
