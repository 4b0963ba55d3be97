"""Messages between a shard and processes of other hosts: a JSON text, and the bytes of the arrays that it refers to.

    magic "RRS1" | text bytes: uint32 | text | bytes of each array, one after the other

An array is {"array": [dtype, shape]} in the text. Little-endian. Nothing is unpickled: there are numbers, texts and arrays.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.replay.errors import ReplayError

_HEADER = struct.Struct("<4sI")
_MAGIC = b"RRS1"
_KINDS = "biuf"
"""NumPy's kinds of types that an array may have."""
_MOST_TEXT = 2**24
_MOST_BYTES = 2**36
"""Of one array."""
_MOST_PARTS = 512
"""Buffers of one system call: Linux takes 1024."""


class WireError(ConnectionError):
    """The received bytes are no message, or the connection is closed."""


def prepare(connection: socket.socket) -> None:
    """Send small messages at once, and notice a host that is gone within about 20 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def send(connection: socket.socket, message: Any) -> None:
    """Send a message.

    Raises:
        OSError, ReplayError: as of ``send_parts`` and ``encode``.
    """
    send_parts(connection, encode(message))


def send_parts(connection: socket.socket, parts: list[memoryview]) -> None:
    """Send a message that ``encode`` has made.

    Raises:
        OSError: the connection is closed, or the other side takes nothing for the connection's time limit.
    """
    left = deque(parts)
    while left:
        _advance(left, connection.sendmsg(list(islice(left, _MOST_PARTS))))


def encode(message: Any) -> list[memoryview]:
    """A message's bytes, in parts; those of arrays are the arrays' own.

    Raises:
        ReplayError: an array does not hold numbers.
    """
    arrays: list[NDArray[Any]] = []
    text = json.dumps(_encoded(message, arrays)).encode()
    return [memoryview(_HEADER.pack(_MAGIC, len(text)) + text), *_views(arrays)]


def decode(data: memoryview) -> Any:
    """The message that begins these bytes, which ``encode`` has made."""
    arrays = list[NDArray[Any]]()
    _, size = _HEADER.unpack(data[: _HEADER.size])
    end = _HEADER.size + size
    message = _decoded(json.loads(bytes(data[_HEADER.size : end])), arrays, _MOST_BYTES)
    for view in _views(arrays):
        view[:] = data[end : end + len(view)]
        end += len(view)
    return message


def receive(connection: socket.socket, most_text: int = _MOST_TEXT, most_bytes: int = _MOST_BYTES) -> Any:
    """Receive a message of a peer that sends with ``send``.

    ``most_text`` and ``most_bytes`` limit the text and each array: small for a peer that is not known yet.

    Raises:
        WireError: the connection was closed, or the bytes are no message.
        OSError: nothing came for the connection's time limit.
    """
    header, arrays = bytearray(_HEADER.size), list[NDArray[Any]]()
    _fill(connection, [memoryview(header)])
    magic, size = _HEADER.unpack(header)
    if magic != _MAGIC or size > most_text:
        raise WireError(f"expected a message of at most {most_text} bytes of text, got {bytes(header)!r}")
    text = bytearray(size)
    _fill(connection, [memoryview(text)])
    try:
        message = _decoded(json.loads(text), arrays, most_bytes)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, MemoryError) as error:
        raise WireError(f"the text of a message cannot be read: {error}") from error
    _fill(connection, _views(arrays))
    return message


def _encoded(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """As values of JSON; arrays are appended to ``arrays``."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _KINDS:
            raise ReplayError(
                f"an array of {value.dtype}{list(value.shape)} was given: use bool, integers or floats"
            )
        arrays.append(np.ascontiguousarray(value))
        return {"array": [value.dtype.str, list(value.shape)]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {"map": [[key, _encoded(item, arrays)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_encoded(item, arrays) for item in value]
    return value


def _decoded(value: Any, arrays: list[NDArray[Any]], most_bytes: int) -> Any:
    """Inverse of ``_encoded``; the arrays are still to be filled."""
    if isinstance(value, list):
        return [_decoded(item, arrays, most_bytes) for item in value]
    if not isinstance(value, dict):
        return value
    if "map" in value:
        return {key: _decoded(item, arrays, most_bytes) for key, item in value["map"]}
    name, shape = value["array"]
    dtype, sizes = np.dtype(name), tuple(map(int, shape))
    if dtype.kind not in _KINDS or min(sizes, default=0) < 0:
        raise ValueError(f"an array of {name}{list(sizes)}")
    if math.prod(sizes) * dtype.itemsize > most_bytes:
        raise ValueError(f"an array of {name}{list(sizes)} is larger than {most_bytes} bytes")
    arrays.append(np.empty(sizes, dtype))
    return arrays[-1]


def _views(arrays: Iterable[NDArray[Any]]) -> list[memoryview]:
    return [array.reshape(-1).view(np.uint8).data for array in arrays if array.size]


def _fill(connection: socket.socket, buffers: list[memoryview]) -> None:
    left = deque(buffers)
    while left and not left[0]:  # an empty text
        left.popleft()
    while left:
        got = connection.recvmsg_into(list(islice(left, _MOST_PARTS)))[0]
        if not got:
            raise WireError("the connection was closed")
        _advance(left, got)


def _advance(left: deque[memoryview], count: int) -> None:
    """Drop ``count`` bytes at the front."""
    while count:
        first = left.popleft()
        if len(first) > count:
            left.appendleft(first[count:])
        count -= min(count, len(first))
