"""A store's windows in shuffled batches, for torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from actors.replay import Keys, ReplayError, ReplayStore, Selection, Subscription, gather, kernel
from placement.errors import counted


class ShuffledWindows(IterableDataset[dict[str, Tensor]]):
    """Every sub-sequence of a store once an epoch, in an order that the seed and the epoch decide.

    ::

        batches = ShuffledWindows(store, subscriptions, batch=256, seed=0, length=16)
        for epoch in range(10):
            batches.set_epoch(epoch)
            for batch in DataLoader(batches, batch_size=None, num_workers=2):
                ...

    Worker w of n makes batches w, w + n, w + 2 n, ... DataLoader takes from its workers in turn, so the batches and their
    order are the same for any number of workers. Workers attach to the store: this process must have it open.
    The rows are those that the store has when this object is made. Values of rows that were overwritten since are left out.
    """

    def __init__(
        self,
        store: ReplayStore,
        subscriptions: Sequence[Subscription],
        *,
        batch: int,
        seed: int,
        length: int = 1,
        stride: int = 1,
    ) -> None:
        """Note the rows.

        Args:
            store: table of one shard
            subscriptions: windows about the first step of each sub-sequence
            batch: sub-sequences of a batch; the last of an epoch may have fewer
            seed: of the order
            length, stride: sub-sequences of so many steps, from steps 0, stride, 2 stride, ...

        Raises:
            ReplayError: no trajectory is so long, a number is not positive, or the seed is negative.
        """
        if min(batch, length, stride) < 1:
            raise ReplayError(f"batch {batch}, length {length} and stride {stride}: use positive numbers")
        if seed < 0:
            raise ReplayError(f"seed {seed}: use 0 or a positive number")
        self._store, self._subscriptions, self._batch = store, tuple(subscriptions), batch
        self._seed, self._epoch, self._stride = seed, 0, stride
        status = store.status()
        rows = status[(status["state"] == kernel.COMMITTED) & (status["length"] >= length)]
        self._keys = Keys(rows["index"].copy(), rows["generation"].copy())
        self._ends = np.cumsum((rows["length"] - length) // stride + 1)
        """Windows of each row and of all before it."""
        if not len(rows):
            raise ReplayError(f"no trajectory of the store has {counted(length, 'step')}")

    def __len__(self) -> int:
        """Batches of an epoch."""
        return (int(self._ends[-1]) + self._batch - 1) // self._batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass. Workers that persist between passes keep the order that they began with."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Batches by the subscriptions' names; NAME_mask says which steps exist. Raises ReplayError: as of ``gather``."""
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = np.random.Generator(np.random.Philox([self._seed, self._epoch])).permutation(
            int(self._ends[-1])
        )
        for number in range(first, len(self), step):
            yield self._made(order[number * self._batch : (number + 1) * self._batch])

    def _made(self, windows: np.ndarray) -> dict[str, Tensor]:
        places = np.searchsorted(self._ends, windows, side="right")
        before = np.append(0, self._ends)[places]
        steps = (windows - before) * self._stride
        keys = Keys(self._keys.indices[places], self._keys.generations[places])
        ones = np.ones(len(windows))
        selection = Selection(keys, steps, ones / self._ends[-1], ones.astype(np.float32))
        found = gather(self._store, selection, self._subscriptions)
        values = {**found.values, **{f"{name}_mask": mask for name, mask in found.masks.items()}}
        return {name: torch.from_numpy(array[found.current]) for name, array in values.items()}
