"""One selection for all ranks that train together, over their communicator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from actors.replay import Keys, Selection, wire
from actors.replay.table import Exchange
from collectives.communicator import Communicator
from collectives.objects import exchange


def exchange_over(communicator: Communicator) -> Exchange:
    """All-gather of values, for ``select(exchange=)``: each rank has the shard of its number, and all call it alike."""

    def all_gather(value: Any) -> list[Any]:
        messages = exchange(communicator, b"".join(wire.encode(value)))
        return [wire.decode(memoryview(message)) for message in messages]

    return all_gather


def broadcast_selection(
    communicator: Communicator, selection: Selection | None, source: int = 0
) -> Selection:
    """Give all ranks the selection that one has made (GEAR, section 3.3, last step of both modes).

    All ranks call this alike; only the ``selection`` of rank ``source`` is used.
    """
    count = torch.tensor([0 if selection is None else len(selection)])
    communicator.broadcast(count, source)
    words = np.zeros((6, int(count[0])), np.int64)
    if communicator.rank == source and selection is not None:
        columns = (*selection.keys, selection.steps, selection.probabilities, selection.weights.astype(float))
        for row, column in zip(words[:5], columns, strict=True):
            row[:] = column.view(np.int64)
        words[5] = 0 if selection.lengths is None else selection.lengths  # a trajectory has at least 1
    communicator.broadcast(torch.from_numpy(words), source)
    indices, generations, steps, probabilities, weights, lengths = words
    return Selection(
        Keys(indices, generations.view(np.uint64)),
        steps,
        probabilities.view(np.float64),
        weights.view(np.float64).astype(np.float32),
        lengths if lengths.all() else None,
    )
