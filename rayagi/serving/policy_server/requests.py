"""Parsing and validation of requests, and encoding of answers, in pieces of bounded work. Every error states what was
expected."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from placement.errors import counted
from rayagi.serving.policy_server.json_rows import JsonRows
from rayagi.serving.policy_server.obs_leaves import Leaf, vector_leaf

BodyFormat = Literal["json", "npy", "raw"]
PIECE_ROWS = 128
"""Most observations of a piece."""
PIECE_BYTES = 32 * 2**10
"""Most JSON that is parsed, and float32 that goes to one inference, at once, unless a row is longer."""
_NPY_HEADER_BYTES = 2**14
"""More than numpy's limit for headers that it evaluates."""


class RequestError(Exception):
    """A request that cannot be answered; ``status`` is the HTTP status."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason, status)
        self.reason, self.status = reason, status

    def __str__(self) -> str:
        return self.reason


class Piece(NamedTuple):
    """Some rows of a request."""

    rows: NDArray[np.float32]
    """(rows, row_dim)"""
    is_last: bool
    is_single: bool
    """Whether the request is one observation of shape (row_dim,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Shape and size limits of a request."""

    obs_dim: int
    max_rows: int
    state_dim: int = 0
    """Numbers of a recurrent policy's state, which follow each observation; 0: not recurrent."""
    leaves: tuple[Leaf, ...] = ()
    """Arrays of an observation that is no vector, in the order of a row; empty: it is one."""

    @property
    def row_dim(self) -> int:
        """Numbers of one row."""
        return self.obs_dim + self.state_dim

    @property
    def piece_rows(self) -> int:
        """Most rows of a piece."""
        return max(1, min(PIECE_ROWS, PIECE_BYTES // (4 * self.row_dim)))

    @property
    def max_body_bytes(self) -> int:
        """Size limit of a request in any format. JSON is the largest, some 25 characters per number."""
        return 4096 + self._json_row_bytes * self.max_rows

    @property
    def _json_row_bytes(self) -> int:
        """Most JSON of a row: its numbers, and the keys of dicts."""
        return 32 * self.row_dim + sum(len(json.dumps(leaf["path"])) for leaf in self._json_leaves)

    @property
    def _json_leaves(self) -> tuple[Leaf, ...]:
        """Arrays of a row in JSON. A recurrent policy's row is a pair of the observation and the state."""
        if not self.leaves:
            return (vector_leaf(self.row_dim),)
        if not self.state_dim:
            return self.leaves
        state = {**vector_leaf(self.state_dim), "path": (1,)}
        return (*({**leaf, "path": (0, *leaf["path"])} for leaf in self.leaves), state)

    def shapes(self) -> str:
        """Expected shapes, for error messages."""
        recurrent = (
            f", each of {counted(self.obs_dim, 'number')} and a state of {self.state_dim},"
            if self.state_dim
            else ""
        )
        return (
            f"expected float32 observations{recurrent} of shape ({self.row_dim},) or (rows, {self.row_dim}), at most "
            f"{counted(self.max_rows, 'row')}"
        )

    def pieces(self, body: bytes | bytearray, body_format: BodyFormat) -> Iterator[Piece]:
        """Parse observations, of which each piece is a bounded amount of work.

        Raises:
            RequestError: the body is not as expected; pieces before the fault have been returned already.
        """
        parse = {"json": self._from_json, "npy": self._from_npy, "raw": self._from_raw}[body_format]
        num_rows = 0
        for values, is_last in parse(body):
            is_single = values.ndim == 1
            rows = values[None] if is_single else values
            if rows.ndim != 2 or rows.shape[1] != self.row_dim or len(rows) == 0:
                raise RequestError(f"got observations of shape {values.shape}; {self.shapes()}")
            if num_rows + len(rows) > self.max_rows:
                more = "" if is_last else "at least "
                raise RequestError(
                    f"got {more}{counted(num_rows + len(rows), 'row')}; {self.shapes()}", status=413
                )
            for begin in range(0, len(rows), self.piece_rows):
                end = begin + self.piece_rows
                ends = is_last and end >= len(rows)
                yield Piece(_finite(rows[begin:end], num_rows + begin), ends, is_single)
            num_rows += len(rows)

    def _from_json(self, body: bytes | bytearray) -> Iterator[tuple[NDArray[Any], bool]]:
        rows = JsonRows(
            leaves=self._json_leaves,
            row_dim=self.row_dim,
            piece_bytes=max(PIECE_BYTES, 4096 + self._json_row_bytes),
            piece_rows=self.piece_rows,
        )
        try:
            yield from rows.pieces(body)
        except ValueError as error:
            raise RequestError(str(error) if self.leaves else f"{error}; {self.shapes()}") from None

    def _from_npy(self, body: bytes | bytearray) -> Iterator[tuple[NDArray[Any], bool]]:
        wanted = f"expected a .npy file of {self.shapes().removeprefix('expected ')}"
        stream = io.BytesIO(body[:_NPY_HEADER_BYTES])
        try:
            read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[
                npy.read_magic(stream)
            ]
            shape, fortran, dtype = read(stream)
        except Exception as error:  # numpy's parser raises any on headers that it did not write
            raise RequestError(f"the body is no .npy file ({error}); {wanted}") from None
        if dtype.kind not in "iuf":
            raise RequestError(f"the .npy file holds {dtype}; {wanted}")
        if len(shape) > 2 or any(size < 1 or isinstance(size, bool) for size in shape):
            raise RequestError(f"got observations of shape {shape}; {self.shapes()}")
        # Before anything is allocated: the header comes from the client.
        content = memoryview(body)[stream.tell() :]
        if math.prod(shape) * dtype.itemsize != len(content):
            raise RequestError(
                f"the .npy file holds {len(content)} bytes, and its header says {shape} of {dtype}; {wanted}"
            )
        yield np.frombuffer(content, dtype=dtype).reshape(shape, order="F" if fortran else "C"), True

    def _from_raw(self, body: bytes | bytearray) -> Iterator[tuple[NDArray[Any], bool]]:
        row_bytes = 4 * self.row_dim
        if not body or len(body) % row_bytes:
            raise RequestError(
                f"got {len(body)} bytes; expected little-endian float32, {row_bytes} bytes for each observation of "
                f"{counted(self.row_dim, 'number')}"
            )
        yield np.frombuffer(body, dtype="<f4").reshape(-1, self.row_dim), True


def _finite(rows: NDArray[Any], first_row: int) -> NDArray[np.float32]:
    """Rows in float32; ``first_row`` is the index of the first of them in the request."""
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, and are rejected
        rows = np.ascontiguousarray(rows, dtype=np.float32)
    if not np.isfinite(rows).all():
        row, column = np.argwhere(~np.isfinite(rows))[0].tolist()
        raise RequestError(
            f"row {first_row + row}, number {column} is not finite in float32; expected finite numbers"
        )
    return rows


class AnswerEncoder:
    """Encodes the answer of one request piece by piece, in the request's format."""

    def __init__(self, body_format: BodyFormat) -> None:
        self._format = body_format
        self._arrays: list[NDArray[Any]] = []
        self._texts: dict[str, list[str]] = {}
        """JSON of the rows by field."""
        self._is_single = False

    def add(self, actions: NDArray[Any], piece: Piece) -> None:
        """Add the actions (rows, dim) or (rows,) of the next piece, or its records of actions and states.

        Raises:
            RequestError: the policy's answer has NaN or infinity, which JSON has not, and nobody can act by.
        """
        self._is_single = piece.is_single
        names = actions.dtype.names or ()
        fields = {name: actions[name] for name in names} or {"actions": actions}
        for name, values in fields.items():
            if not np.isfinite(values).all():
                reason = (
                    f"the policy's {name} for these observations are not finite; see the run's last metrics"
                )
                raise RequestError(reason, status=500)
        if self._format != "json":
            self._arrays.append(actions)
            return
        for name, values in fields.items():
            self._texts.setdefault(name, []).append(json.dumps(values.tolist())[1:-1])

    def body(self, version: int) -> bytes:
        """The complete answer, of the policy's ``version``."""
        if self._format == "json":
            rows = {name: ", ".join(texts) for name, texts in self._texts.items()}
            fields = [f'"{name}": {text if self._is_single else f"[{text}]"}' for name, text in rows.items()]
            return f'{{{", ".join(fields)}, "policy_version": {version}}}'.encode()
        actions = np.concatenate(self._arrays)
        return encoded(actions[0] if self._is_single else actions, self._format)


def encoded(actions: NDArray[Any], body_format: BodyFormat) -> bytes:
    """Actions, or records of actions and states, as npy or raw bytes: little-endian float32, int64 for discrete actions."""
    if body_format == "npy":
        stream = io.BytesIO()
        np.save(stream, actions, allow_pickle=False)
        return stream.getvalue()
    return actions.astype(actions.dtype.newbyteorder("<"), copy=False).tobytes()
