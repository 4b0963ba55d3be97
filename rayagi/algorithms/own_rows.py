"""The part of a selection that is in this GMI's shards, as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.replay import Gatherer, ReplayStore, Selection, Subscription

_MOST_GATHERERS = 128
"""Of different batch sizes; beyond, they are made anew."""


class OwnRows:
    """Copies what this GMI's shards have of a selection, into memory that is reused."""

    def __init__(self, stores: Sequence[ReplayStore], subscriptions: Sequence[Subscription]) -> None:
        """``stores``: this GMI's shards; ``subscriptions``: what is copied of a row."""
        self._stores, self._subscriptions = stores, subscriptions
        self._gatherers: dict[tuple[int, int], tuple[Gatherer, dict[str, Tensor]]] = {}

    def __call__(self, chosen: Selection) -> dict[str, Tensor]:
        """(n, ...) of each subscription, in the list's order within each shard. Valid until the next call.

        The mask of a window is named ``NAME mask``; ``step`` has the selected timesteps, ``position`` their places in the
        list.
        """
        owners = self._stores[0].owner(chosen.keys.indices)
        parts = []
        for number, store in enumerate(self._stores):
            mine = owners == store.base // store.capacity
            keys = type(chosen.keys)(chosen.keys.indices[mine], chosen.keys.generations[mine])
            own = Selection(keys, chosen.steps[mine], chosen.probabilities[mine], chosen.weights[mine])
            gatherer, tensors = self._gatherer(number, len(own))
            gatherer(own)
            parts.append(
                {
                    **tensors,
                    "step": torch.from_numpy(own.steps),
                    "position": torch.from_numpy(np.flatnonzero(mine)),
                }
            )
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _gatherer(self, store: int, n: int) -> tuple[Gatherer, dict[str, Tensor]]:
        if (store, n) not in self._gatherers:
            if len(self._gatherers) == _MOST_GATHERERS:
                self._gatherers.clear()
            gatherer = Gatherer(self._stores[store], self._subscriptions, n)
            tensors = {name: torch.from_numpy(values) for name, values in gatherer.values.items()}
            masks = {
                f"{name} mask": torch.from_numpy(mask)
                for name, mask in gatherer.masks.items()
                if mask.ndim == 2
            }
            self._gatherers[store, n] = gatherer, {**tensors, **masks}
        return self._gatherers[store, n]
