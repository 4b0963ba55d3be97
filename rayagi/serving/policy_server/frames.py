"""The protocol of the local socket: frames of a fixed header and a body, little-endian.

    magic "RAG1" | kind: uint8 | 3 bytes of zero | request: uint32 | body bytes: uint32 | body

The server sends HELLO first, with the JSON body of /info. A client sends OBSERVE with float32 observations, row by row. It
receives ACTIONS (float32, or int64 for discrete actions) or ERROR (text) with the same request number. It may send several
requests before it reads; answers arrive in any order.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct("<4sB3xII")
MAGIC = b"RAG1"


class Kind(IntEnum):
    """Type of a frame."""

    HELLO = 1
    OBSERVE = 2
    ACTIONS = 3
    ERROR = 4


class FrameError(Exception):
    """The received bytes are not a frame."""


class Header(NamedTuple):
    """Header of one frame."""

    kind: Kind
    request: int
    body_bytes: int


def frame(kind: Kind, request: int, body: bytes) -> bytes:
    """Encode one frame."""
    return HEADER.pack(MAGIC, kind, request, len(body)) + body


def header(data: bytes) -> Header:
    """Decode a frame's header.

    Raises:
        FrameError: the bytes are not a header.
    """
    magic, kind, request, body_bytes = HEADER.unpack(data)
    if magic != MAGIC or kind not in Kind._value2member_map_:
        raise FrameError(
            f"expected a frame that begins with {MAGIC!r} and a kind from 1 to {len(Kind)}, got {data!r}"
        )
    return Header(Kind(kind), request, body_bytes)
