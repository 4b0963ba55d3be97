"""Reassembly: joins the parts of a transfer, which arrive through one channel per group."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from collectives.experience.consumer_endpoint import Batch, ConsumerEndpoint
from collectives.experience.errors import ChannelTimeoutError
from collectives.experience.file_layout import MAX_PRODUCERS

_SLEEP_S = 0.05
"""Longest wait for one part before all channels are polled again."""
_REORDER_WINDOW = 8
"""Transfers of a producer that may complete before an earlier one; after that its missing parts count as lost."""
_REMEMBERED = 256
"""Sequence numbers kept per producer, to detect duplicates."""
_REMEMBERED_PRODUCERS = 4 * MAX_PRODUCERS

Key = tuple[int, int, int]
"""Producer, origin, sequence."""


class Transfer:
    """All parts of one sequence number of one producer, until its rows are used and released."""

    def __init__(self, parts: Sequence[Batch], released: Counter[int]) -> None:
        """``released`` counts released rows by origin."""
        self._parts, self._released = tuple(parts), released
        first = parts[0]
        self.origin = first.origin
        self.producer, self.sequence, self.version = first.producer, first.sequence, first.version
        self.num_rows, self.slots = first.num_rows, first.slots
        self.used_rows = 0
        """Rows handed out so far, from the first; the rest is for later batches."""
        self.users = 0
        """Objects that still use its rows; it is released when there are none."""
        self.is_released = False

    @property
    def rows_left(self) -> int:
        """Rows that were not handed out."""
        return self.num_rows - self.used_rows

    def tensors(self, group: int) -> dict[str, Tensor]:
        """The fields of a group, in place."""
        return self._parts[group].tensors

    def remove_user(self) -> None:
        """Decrement the number of users."""
        self.users -= 1
        self.release_if_done()

    def release_if_done(self) -> None:
        """Release if it has neither users nor unused rows."""
        if self.users <= 0 and not self.rows_left:
            self.release()

    def release(self) -> None:
        """Release all parts at once. Safe to call twice."""
        if not self.is_released:
            self._released[self.origin] += self.num_rows
        self.is_released = True
        for part in self._parts:
            part.release()


class Reassembler:
    """Takes batches from one consumer endpoint per group, and returns complete transfers."""

    def __init__(self, consumer_endpoints: Sequence[ConsumerEndpoint]) -> None:
        self._consumer_endpoints = consumer_endpoints
        self._parts: dict[Key, dict[int, Batch]] = {}
        """Parts of incomplete transfers, by group."""
        self._since: dict[Key, int] = {}
        """Value of ``_completed`` when the first part of an incomplete transfer came."""
        self._completed: Counter[int] = Counter()
        """Complete transfers by producer number, over all processes that had it."""
        self._recent: dict[tuple[int, int], deque[int]] = {}
        """Sequence numbers of complete transfers, by producer and origin."""
        self._lost_before: dict[int, int] = {}
        """Length of ``lost`` when a producer's last part came: a later entry in ``lost`` has no successor yet."""
        self._complete: deque[Transfer] = deque()
        self.incomplete = 0
        """Transfers of which some parts never come: a trainer that died had released them, or the producer died."""
        self.repeated = 0
        """Duplicate parts, delivered by another route, that were dropped."""
        self.received: Counter[int] = Counter()
        """Rows of complete transfers, by origin."""
        self.released: Counter[int] = Counter()
        """Released rows, by origin."""

    def next(self, timeout_s: float) -> Transfer | None:
        """The next complete transfer. None once producers have connected, all have closed, and everything is taken.

        A producer that ended without closing is waited for: a successor may connect, or another relay may take over.

        Raises:
            ChannelTimeoutError: none within the time limit.
        """
        begin = time.monotonic()
        while not self._complete:
            if self._take_from_each():
                continue
            left_s = max(0.0, begin + timeout_s - time.monotonic())
            try:
                if not self._await_part(min(_SLEEP_S, left_s) if self._parts else left_s):
                    return None
            except ChannelTimeoutError as error:
                self._drop_orphans()
                waited_s = time.monotonic() - begin
                if waited_s >= timeout_s:
                    raise ChannelTimeoutError(error.channel, error.detail, waited_s) from None
        return self._complete.popleft()

    def close(self) -> int:
        """Release what was taken and not returned by ``next``. Returns the rows of complete transfers among it."""
        self._drop(list(self._parts))
        rows = sum(transfer.num_rows for transfer in self._complete)
        while self._complete:
            self._complete.popleft().release()
        return rows

    def _take_from_each(self) -> bool:
        """Take at most one batch of each channel: batches that were taken are lost if this process dies."""
        took = self._claim_parts()
        for group in range(len(self._consumer_endpoints)):
            with suppress(ChannelTimeoutError):
                took = self._take(group, 0.0) or took
        return took

    def _await_part(self, limit_s: float) -> bool:
        """Wait for the part that is missing longest, or for any. False once all producers have closed.

        Raises:
            ChannelTimeoutError: no batch came.
        """
        group = self._awaited()
        if self._take(group, limit_s):
            return True
        self._drop(list(self._parts))  # no producer is left that could complete them
        if group != 0:
            return True
        missed = self._missed()
        if not missed:
            return False
        time.sleep(min(_SLEEP_S, limit_s))
        detail = f"producers {missed} ended without closing, and no successor has connected"
        raise ChannelTimeoutError(self._consumer_endpoints[0].schema.name, detail, limit_s)

    def _take(self, group: int, timeout_s: float) -> bool:
        batch = self._consumer_endpoints[group].take(timeout_s)
        if batch is None:
            return False
        self._add(group, batch)
        return True

    def _claim_parts(self) -> bool:
        """Take what killed producers had committed and not posted: parts of transfers whose first part is here."""
        took = False
        for key, parts in list(self._parts.items()):
            for group, consumer_endpoint in enumerate(self._consumer_endpoints):
                batch = consumer_endpoint.claim(*key) if 0 in parts and group not in parts else None
                if batch is not None:
                    self._add(group, batch)
                    took = True
        return took

    def _add(self, group: int, batch: Batch) -> None:
        key = (batch.producer, batch.origin, batch.sequence)
        parts = self._parts.get(key, {})
        # A relay that was restarted delivers again: drop duplicates by producer, origin and sequence number.
        if group in parts or batch.sequence in self._recent_of(batch):
            self.repeated += 1
            batch.release()
            return
        parts[group] = batch
        self._parts[key] = parts
        if group == 0:
            self._lost_before[batch.producer] = len(self._consumer_endpoints[0].lost)
        self._since.setdefault(key, self._completed[batch.producer])
        if len(parts) == len(self._consumer_endpoints):
            self._complete_with(key)

    def _complete_with(self, key: Key) -> None:
        parts = self._parts.pop(key)
        del self._since[key]
        self._recent_of(parts[0]).append(parts[0].sequence)
        self._completed[parts[0].producer] += 1
        transfer = Transfer([parts[group] for group in range(len(parts))], self.released)
        self.received[transfer.origin] += transfer.num_rows
        self._complete.append(transfer)
        # Transfers of one producer complete nearly in order: what is overtaken by too many has lost its other parts.
        self._drop(
            [late for late in self._parts if self._completed[late[0]] - self._since[late] > _REORDER_WINDOW]
        )

    def _recent_of(self, batch: Batch) -> deque[int]:
        who = (batch.producer, batch.origin)
        if who not in self._recent:
            if len(self._recent) == _REMEMBERED_PRODUCERS:
                del self._recent[next(iter(self._recent))]
            self._recent[who] = deque(maxlen=_REMEMBERED)
        return self._recent[who]

    def _missed(self) -> list[int]:
        """Producers that were lost, and whose successors have sent nothing."""
        lost = enumerate(self._consumer_endpoints[0].lost)
        return sorted({producer for place, producer in lost if place >= self._lost_before.get(producer, 0)})

    def _awaited(self) -> int:
        """The first missing group of the oldest incomplete transfer; group 0 if there is none."""
        oldest = next(iter(self._parts.values()), {})
        return next(group for group in itertools.count() if group not in oldest)

    def _drop_orphans(self) -> None:
        """Drop transfers whose producer is no longer connected to a channel from which a part is missing."""
        self._claim_parts()
        here = [consumer_endpoint.sending for consumer_endpoint in self._consumer_endpoints]
        self._drop(
            [
                key
                for key, parts in self._parts.items()
                if any(key[0] not in here[group] for group in range(len(here)) if group not in parts)
            ]
        )

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.incomplete += 1
            self._since.pop(key, None)
            for batch in self._parts.pop(key).values():
                batch.release()
