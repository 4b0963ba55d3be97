"""Validation of requests, before any of their content is used. Every error states what was expected."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

BodyFormat = Literal["json", "npy", "raw"]


class RequestError(Exception):
    """A request that cannot be answered; ``status`` is the HTTP status."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason, status)
        self.reason, self.status = reason, status

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Shape and size limits of a request."""

    obs_dim: int
    max_rows: int
    state_dim: int = 0
    """Numbers of a recurrent policy's state, which follow each observation; 0: not recurrent."""

    @property
    def row_dim(self) -> int:
        """Numbers of one row."""
        return self.obs_dim + self.state_dim

    @property
    def max_body_bytes(self) -> int:
        """Size limit of a request in any format. JSON is the largest, some 25 characters per number."""
        return 4096 + 32 * self.row_dim * self.max_rows

    def shapes(self) -> str:
        """Expected shapes, for error messages."""
        recurrent = (
            f", each of {self.obs_dim} numbers and a state of {self.state_dim}," if self.state_dim else ""
        )
        return (
            f"expected float32 observations{recurrent} of shape ({self.row_dim},) or (rows, {self.row_dim}), at most "
            f"{self.max_rows} rows"
        )

    def parsed(self, body: bytes, body_format: BodyFormat) -> tuple[NDArray[np.float32], bool]:
        """Parse observations as (rows, row_dim), and whether it was a single one of shape (row_dim,).

        Raises:
            RequestError: the body is not as expected.
        """
        if body_format == "json":
            values = self._from_json(body)
        elif body_format == "npy":
            values = self._from_npy(body)
        else:
            values = self._from_raw(body)
        single = values.ndim == 1
        rows = values[None] if single else values
        if rows.ndim != 2 or rows.shape[1] != self.row_dim or len(rows) == 0:
            raise RequestError(f"got observations of shape {values.shape}; {self.shapes()}")
        if len(rows) > self.max_rows:
            raise RequestError(f"got {len(rows)} rows; {self.shapes()}", status=413)
        with np.errstate(over="ignore"):  # values beyond float32 become infinite, and are rejected
            rows = np.ascontiguousarray(rows, dtype=np.float32)
        if not np.isfinite(rows).all():
            row, column = np.argwhere(~np.isfinite(rows))[0].tolist()
            raise RequestError(
                f"row {row}, number {column} is not finite in float32; expected finite numbers"
            )
        return rows, single

    def _from_json(self, body: bytes) -> NDArray[Any]:
        wanted = f'expected JSON like {{"obs": [...]}} with {self.row_dim} numbers, or a list of such lists'
        try:
            given = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON ({error}); {wanted}") from None
        if not isinstance(given, dict) or set(given) != {"obs"}:
            raise RequestError(f"the body is not an object with the one key 'obs'; {wanted}")
        try:
            values = np.array(given["obs"])
        except (ValueError, OverflowError):
            raise RequestError(f"'obs' has rows of different lengths; {wanted}") from None
        if values.dtype.kind not in "iuf":
            raise RequestError(f"'obs' holds values that are not numbers; {wanted}")
        return values

    def _from_npy(self, body: bytes) -> NDArray[Any]:
        wanted = f"expected a .npy file of {self.shapes().removeprefix('expected ')}"
        stream = io.BytesIO(body)
        try:
            read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[
                npy.read_magic(stream)
            ]
            shape, fortran, dtype = read(stream)
        except (ValueError, KeyError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise RequestError(f"the body is no .npy file ({error}); {wanted}") from None
        if dtype.kind not in "iuf":
            raise RequestError(f"the .npy file holds {dtype}; {wanted}")
        # Before anything is allocated: the header comes from the client.
        content = body[stream.tell() :]
        if math.prod(shape) * dtype.itemsize != len(content):
            raise RequestError(
                f"the .npy file holds {len(content)} bytes, and its header says {shape} of {dtype}; {wanted}"
            )
        return np.frombuffer(content, dtype=dtype).reshape(shape, order="F" if fortran else "C")

    def _from_raw(self, body: bytes) -> NDArray[Any]:
        row_bytes = 4 * self.row_dim
        if not body or len(body) % row_bytes:
            raise RequestError(
                f"got {len(body)} bytes; expected little-endian float32, {row_bytes} bytes for each observation of "
                f"{self.row_dim} numbers"
            )
        return np.frombuffer(body, dtype="<f4").reshape(-1, self.row_dim)


def encoded(actions: NDArray[Any], body_format: BodyFormat) -> bytes:
    """Actions, or records of actions and states, as npy or raw bytes: little-endian float32, int64 for discrete actions."""
    if body_format == "npy":
        stream = io.BytesIO()
        np.save(stream, actions, allow_pickle=False)
        return stream.getvalue()
    return actions.astype(actions.dtype.newbyteorder("<"), copy=False).tobytes()
