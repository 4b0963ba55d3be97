"""Batches that are selected and copied ahead of the trainer, in a thread beside it."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Self

from actors.replay.errors import ReplayError
from actors.replay.hindsight import Hindsight, HindsightGatherer
from actors.replay.rows import Selection
from actors.replay.selection import Selector, select
from actors.replay.shards import ReplayShards
from actors.replay.store import ReplayStore
from actors.replay.subscriptions import Gathered, Gatherer, Subscription
from collectives.closing import ClosesOnExit

Ready = tuple[Selection, Gathered]
_Batch = Gatherer | HindsightGatherer


class BatchStream(ClosesOnExit, Iterator[Ready]):
    """Iterates over batches, of which a thread prepares up to ``ahead`` while the trainer works on another.

    Copies release the GIL. Batch d is ``select(..., draw=first_draw + d)``; it may be selected before the priorities of the
    last ``ahead`` + 1 batches are set. Rows that others overwrite meanwhile are False in ``current``.
    """

    def __init__(
        self,
        store: ReplayStore | ReplayShards,
        selector: Selector,
        subscriptions: Sequence[Subscription],
        batch: int,
        *,
        seed: int,
        first_draw: int = 0,
        ahead: int = 2,
        make_out: Callable[[], Mapping[str, Any]] | None = None,
        hindsight: Hindsight | None = None,
    ) -> None:
        """Start the thread.

        Args:
            store, selector, subscriptions: as of ``select`` and ``Gatherer``
            batch: rows
            seed, first_draw: of the batches
            ahead: batches that may be ready, at least 1
            make_out: makes the arrays or tensors of one batch (pinned ones, e.g.); called ahead + 1 times
            hindsight: how goals are replaced; None: they are not

        Raises:
            ReplayError: an argument is outside its range, or as of ``Gatherer``.
        """
        if ahead < 1:
            raise ReplayError(f"{ahead} batches ahead: use a positive number")
        self._free: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[Ready, _Batch] | Exception] = queue.SimpleQueue()
        self._used: _Batch | None = None
        self._store, self._closed, self._pid = store, False, os.getpid()
        for _ in range(ahead + 1):
            out = make_out() if make_out else None
            if hindsight is None:
                self._free.put(Gatherer(store, subscriptions, batch, out=out))
            else:
                self._free.put(HindsightGatherer(store, subscriptions, batch, hindsight, out=out))

        def prepare() -> None:
            try:
                for draw in count(first_draw):
                    gatherer = self._free.get()
                    if gatherer is None:
                        return
                    selection = select(
                        store, selector, batch, seed=seed, draw=draw, keep_waiting=lambda: not self._closed
                    )
                    if isinstance(gatherer, HindsightGatherer):
                        copied = gatherer(selection, seed=seed, draw=draw)
                    else:
                        copied = gatherer(selection)
                    self._ready.put(((selection, copied), gatherer))
            except Exception as error:  # of a closed stream too: nobody asks for it
                self._ready.put(error)

        self._thread = threading.Thread(target=prepare, name="replay-stream", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Ready:
        """The next batch. The arrays of the one before may be overwritten from now on.

        Raises:
            ReplayError: a batch could not be made; the stream has ended, so that later calls stop the iteration. Or this is
                a forked child, where no thread prepares batches.
        """
        if os.getpid() != self._pid:
            raise ReplayError(
                "this stream's thread is in the process that forked this one: open a stream here"
            )
        if self._closed:
            raise StopIteration
        if self._used is not None:
            self._free.put(self._used)
        found = self._ready.get()
        if isinstance(found, Exception):
            self.close()
            raise found
        ready, self._used = found
        return ready

    def close(self) -> None:
        """End the thread, after the batch that it is preparing. Batches that are ready count as never selected.

        Safe to call twice.
        """
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            with suppress(queue.Empty):
                while True:  # so that None is what the thread takes next
                    self._free.get_nowait()
            self._free.put(None)
            self._thread.join()
            with suppress(queue.Empty, ReplayError):  # the store may be closed
                while True:
                    found = self._ready.get_nowait()
                    if not isinstance(found, Exception):
                        (selection, _), _ = found
                        self._store.unmark(selection.keys)
