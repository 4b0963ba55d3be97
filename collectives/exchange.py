"""All-gather of byte strings of any length, over a transport that moves tensors only."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_WORD_BYTES = 8


class SupportsAllGather(Protocol):
    """The part of a ``Transport`` or ``Communicator`` that an exchange needs."""

    rank: int
    world_size: int

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        ...


def exchange(group: SupportsAllGather, message: bytes) -> list[bytes]:
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
