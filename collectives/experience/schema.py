"""Schema of a channel: fields of fixed shape, in torch and in Arrow terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import torch
from torch import Tensor

from collectives.errors import counted
from collectives.experience.errors import SchemaError

_ARROW: dict[torch.dtype, Any] = {
    torch.float32: pa.float32(),
    torch.float64: pa.float64(),
    torch.float16: pa.float16(),
    torch.bfloat16: pa.uint16(),
    torch.int64: pa.int64(),
    torch.int32: pa.int32(),
    torch.int16: pa.int16(),
    torch.int8: pa.int8(),
    torch.uint8: pa.uint8(),
    torch.bool: pa.uint8(),
}
"""Arrow packs bool in bits and has no bfloat16: both are sent as the unsigned integer of their size."""
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _ARROW}
_DTYPE_KEY, _NAME_KEY = b"rayagi.dtype", b"rayagi.channel"
_MAX_NAME_BYTES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One type of experience: the papers' package."""

    name: str
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    """Of one row."""

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.row_numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def arrow(self) -> pa.Field:
        """Arrow column: a primitive type for scalars, ``arrow.fixed_shape_tensor`` for tensors."""
        kind = _ARROW[self.dtype]
        if self.shape:
            kind = pa.fixed_shape_tensor(kind, self.shape)
        name = str(self.dtype).removeprefix("torch.").encode()
        return pa.field(self.name, kind, nullable=False, metadata={_DTYPE_KEY: name})

    @classmethod
    def from_arrow(cls, column: pa.Field) -> Self:
        """Inverse of ``arrow``. Raises SchemaError where rayagi did not create the column."""
        dtype = _NAMES.get((column.metadata or {}).get(_DTYPE_KEY, b"").decode())
        if dtype is None:
            raise SchemaError("?", f"column {column.name!r} does not say which torch type it holds")
        shape = tuple(column.type.shape) if isinstance(column.type, pa.FixedShapeTensorType) else ()
        return cls(name=column.name, dtype=dtype, shape=shape)


@dataclass(frozen=True, slots=True)
class ExperienceSchema:
    """The fields of a channel, in the order of its columns."""

    name: str
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        if not self.name.isprintable() or not 0 < len(self.name.encode()) <= _MAX_NAME_BYTES:
            raise SchemaError(
                self.name,
                f"a channel's name must be printable and of 1 to {_MAX_NAME_BYTES} bytes: it is part of a file name",
            )
        names = [field.name for field in self.fields]
        if not names or len(set(names)) != len(names):
            raise SchemaError(
                self.name, f"fields {names}: at least one is needed, each with a name of its own"
            )
        for field in self.fields:
            if field.dtype not in _ARROW:
                known = ", ".join(_NAMES)
                raise SchemaError(self.name, f"{field} has a type that channels do not support: use {known}")
            if any(size < 1 for size in field.shape):
                raise SchemaError(self.name, f"{field} has an empty dimension")

    @classmethod
    def from_tensors(cls, name: str, rows: Mapping[str, Tensor]) -> Self:
        """The schema of tensors whose first dimension counts rows."""
        return cls(
            name,
            tuple(
                Field(name=key, dtype=tensor.dtype, shape=tuple(tensor.shape[1:]))
                for key, tensor in rows.items()
            ),
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all fields."""
        return sum(field.row_bytes for field in self.fields)

    def arrow(self) -> pa.Schema:
        """Arrow schema, with the channel's name in its metadata."""
        return pa.schema([field.arrow() for field in self.fields], metadata={_NAME_KEY: self.name.encode()})

    @classmethod
    def from_arrow(cls, schema: pa.Schema) -> Self:
        """Inverse of ``arrow``. Raises SchemaError where rayagi did not create the schema."""
        name = (schema.metadata or {}).get(_NAME_KEY, b"?").decode()
        return cls(name, tuple(Field.from_arrow(column) for column in schema))

    def refuse_other(self, other: ExperienceSchema, whose: str) -> None:
        """Raise if the schemas of two processes differ.

        Raises:
            SchemaError: with the first difference.
        """
        if self.name != other.name:
            raise SchemaError(
                self.name, f"{whose} belongs to channel {other.name!r}: connect it to its own channel"
            )
        for own, theirs in zip(self.fields, other.fields, strict=False):
            if own != theirs:
                raise SchemaError(
                    self.name,
                    f"{whose} has {theirs} where {own} is expected: use one version of the code on both sides",
                )
        if len(self.fields) != len(other.fields):
            raise SchemaError(
                self.name,
                f"{whose} has {counted(len(other.fields), 'field')}; expected {len(self.fields)}: "
                f"{', '.join(map(str, other.fields))}",
            )

    def refuse_tensors(self, rows: Mapping[str, Tensor]) -> int:
        """Number of rows, if every field is present with its type and shape.

        Raises:
            SchemaError: with the first difference.
        """
        given = {field.name for field in self.fields}
        if rows.keys() != given:
            raise SchemaError(
                self.name, f"fields {sorted(rows)} were given where {sorted(given)} are expected"
            )
        first = rows[self.fields[0].name]
        count = first.shape[0] if first.dim() else -1
        for field in self.fields:
            tensor = rows[field.name]
            if tensor.dtype != field.dtype or tuple(tensor.shape) != (count, *field.shape):
                expected = counted(count, "row") if count >= 0 else "rows"
                actual = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                raise SchemaError(
                    self.name, f"{field.name} is {actual} where {expected} of {field} are expected"
                )
        return count
