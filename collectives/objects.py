"""All-gather of bytes and of Python values."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from collectives.communicator import Communicator
from collectives.transports.base import Transport

_WORD_BYTES = 8


def exchange(group: Transport | Communicator, message: bytes) -> list[bytes]:
    """Every member's message, by rank. All members call it; messages may differ in length and be empty.

    Raises:
        CommunicatorError: as the group's ``all_gather``.
    """
    lengths = group.all_gather(torch.tensor([len(message)], dtype=torch.int64)).view(-1).tolist()
    words = -(-max(lengths) // _WORD_BYTES)
    if words == 0:
        return [b""] * group.world_size
    # int64 and not uint8: the one integer dtype that every transport supports.
    padded = torch.frombuffer(bytearray(message.ljust(words * _WORD_BYTES, b"\0")), dtype=torch.int64)
    rows = group.all_gather(padded)
    return [row.numpy().tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]


def all_gather_objects(value: Any, group: Transport | Communicator) -> list[Any]:
    """Every member's value, in rank order. Raises CommunicatorError where another member is missing or too late."""
    packed = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return [pickle.loads(message) for message in exchange(group, packed)]
