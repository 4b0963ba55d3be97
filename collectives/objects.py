"""All-gather of Python values, pickled into one vector of words each."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from collectives.communicator import Communicator

_WORD_BYTES = 8


def all_gather_objects(value: Any, communicator: Communicator) -> list[Any]:
    """Every member's value, in rank order. Two all_gathers: of the sizes, then of the bytes, padded to the largest.

    Raises:
        CommunicatorError: another member is missing or too late.
    """
    if communicator.world_size == 1:
        return [value]
    packed = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    sizes = communicator.all_gather(torch.tensor([len(packed)], dtype=torch.int64)).reshape(-1).tolist()
    words = np.zeros(-(-max(sizes) // _WORD_BYTES), np.int64)
    words.view(np.uint8)[: len(packed)] = np.frombuffer(packed, np.uint8)
    gathered = communicator.all_gather(torch.from_numpy(words)).numpy().view(np.uint8)
    return [pickle.loads(row[:size].data) for row, size in zip(gathered, sizes, strict=True)]
