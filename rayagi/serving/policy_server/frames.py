"""The protocol of the local socket: frames of a fixed header and a body, little-endian.

    magic "RAG1" | kind: uint8 | 3 bytes of zero | request: uint32 | body bytes: uint32 | body

The server says HELLO first, with a JSON body as of /info. A client sends OBSERVE with float32 observations, row after row,
and gets ACTIONS (float32, or int64 where they are choices) or ERROR (text) with the same request number. It may send several
before it reads; answers come in any order.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct("<4sB3xII")
MAGIC = b"RAG1"


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    OBSERVE = 2
    ACTIONS = 3
    ERROR = 4


class FrameError(Exception):
    """What came is no frame."""


class Header(NamedTuple):
    """Of one frame."""

    kind: Kind
    request: int
    body_bytes: int


def frame(kind: Kind, request: int, body: bytes) -> bytes:
    """One frame."""
    return HEADER.pack(MAGIC, kind, request, len(body)) + body


def header(data: bytes) -> Header:
    """The first bytes of a frame.

    Raises:
        FrameError: they are none.
    """
    magic, kind, request, body_bytes = HEADER.unpack(data)
    if magic != MAGIC or kind not in Kind._value2member_map_:
        raise FrameError(
            f"expected a frame that begins with {MAGIC!r} and a kind from 1 to {len(Kind)}, {data!r} came"
        )
    return Header(Kind(kind), request, body_bytes)
