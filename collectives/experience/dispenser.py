"""Dispenser (GMI-DRL §3.2.2): an agent writes experience into channel slots; all groups share one sequence number."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from collectives.closing import ClosesOnExit
from collectives.experience.errors import ChannelTimeoutError, SchemaError
from collectives.experience.packer import ROW_FIELD, ChannelPlan
from collectives.experience.producer_ring import ProducerRing, ReservedSlot
from collectives.experience.routes import Route, SharedMemoryRoute

if TYPE_CHECKING:  # it imports this module
    from collectives.experience.migrator import Migrator

_POLL_S = 0.05
"""Longest wait for a slot before consumers and routes are checked again."""

Ragged = Mapping[str, Mapping[str, Tensor]]
"""Rows of ragged groups: by group, by field."""


class Dispenser(ClosesOnExit):
    """Sends the experience of one agent: a producer ring per group, and one consumer per sequence number.

    Not thread-safe. ::

        dispenser = Dispenser(plan, rows=64, producer=0)
        dispenser.attach(0, batcher_endpoints)        # or a Migrator does
        rollout = dispenser.open()
        rollout["obs"][:, step].copy_(obs)
        dispenser.send(version=3, ragged={"finals": {"env": ..., "obs": ...}})
    """

    def __init__(
        self,
        plan: ChannelPlan,
        *,
        rows: int,
        producer: int,
        slots: int = 4,
        ragged_rows: int | None = None,
        credit: int | None = None,
    ) -> None:
        """Allocate the producer rings.

        Args:
            plan: which field is in which channel
            rows: of the full groups, per ``send``
            producer: its number in the channel set, from 0
            slots: transfers in flight
            ragged_rows: of a ragged group, per ``send``, at most; None: ``rows``
            credit: unreleased transfers that one consumer may have; None: all slots

        Raises:
            ChannelError: there is not enough memory.
            ValueError: a number is out of range.
        """
        self.plan, self.rows, self.producer, self.slots = plan, rows, producer, slots
        self._credit = credit or slots
        origin = secrets.randbits(63) | 1
        self.origin = origin
        """Random number that distinguishes this dispenser from former ones with its producer number."""
        self.rings: tuple[ProducerRing, ...] = tuple(
            ProducerRing(
                group,
                rows=(ragged_rows or rows) if group.name in plan.ragged else rows,
                slots=slots,
                producer=producer,
                origin=origin,
                routed=True,
            )
            for group in plan.groups
        )
        self._full = [ring for ring in self.rings if ring.schema.name not in plan.ragged]
        self._reservations: dict[str, ReservedSlot] = {}
        self._sequence = self._newest = 0
        self._is_closed = False
        self._routes: dict[int, Route] = {}
        self._carried: dict[int, int] = {}
        """Consumer by sequence number, of transfers whose slots are kept until their route reports the release."""
        self.router: Migrator | None = None
        """Chooses the consumers, and attaches them; None: the one with the least backlog of those that are attached."""
        self.incomplete = 0
        """Transfers that a dead consumer had released in part. They count as consumed; the other parts are dropped."""
        self.rerouted = 0
        """Transfers that were handed over again because their consumer was gone."""

    def open(self, timeout_s: float = 60.0) -> dict[str, Tensor]:
        """Fields of the full groups, (rows, *shape), to be written in place. They hold old values until overwritten.

        Raises:
            ChannelTimeoutError: no consumer released a slot within the time limit. May be called again.
        """
        begin = time.monotonic()
        for ring in self._full:
            if ring.schema.name not in self._reservations:
                self._reservations[ring.schema.name] = self._reserve(ring, ring.rows, begin, timeout_s)
        reservations = [self._reservations[ring.schema.name] for ring in self._full]
        return {name: tensor for reservation in reservations for name, tensor in reservation.tensors.items()}

    def send(self, version: int, ragged: Ragged | None = None, timeout_s: float = 60.0) -> int:
        """Send the opened tensors, and rows of ragged groups (none for a group that is not given).

        Returns:
            the sequence number, from 1; the same in all channels.

        Raises:
            SchemaError: ragged rows with wrong fields, types or shapes, or more of them than a slot holds.
            ChannelTimeoutError: no slot for the ragged rows within the time limit. May be called again.
            ValueError: nothing is open.
        """
        if len(self._reservations) < len(self._full):
            raise ValueError("nothing is open: call open() and write into its tensors first")
        self._check(ragged or {})
        self._fill_ragged(ragged or {}, timeout_s)
        # Commit every group under the same number, the first group last: its commit is the transfer's. Nothing is
        # posted before ``progress`` chooses the consumer.
        for ring in reversed(self.rings):
            self._sequence = self._reservations.pop(ring.schema.name).commit(version)
        self.progress()
        return self._sequence

    def cancel(self) -> None:
        """Discard the transfer that is not sent yet, with all its groups."""
        while self._reservations:
            self._reservations.popitem()[1].cancel()

    def attach(self, index: int, endpoints: Sequence[str]) -> None:
        """Connect all groups to a consumer of this host: its number, and its endpoints in the plan's order.

        Raises:
            ChannelError: an endpoint no longer exists.
            SchemaError: an endpoint expects another schema, or the numbers of endpoints and groups differ.
        """
        self.attach_route(index, SharedMemoryRoute(self.rings, endpoints))
        self.progress()

    def attach_route(self, index: int, route: Route) -> None:
        """Connect to a consumer by any route. A former consumer of this number is detached."""
        if index in self._routes:
            self._detach(index)
        self._routes[index] = route

    def consumers(self) -> dict[int, int]:
        """Backlog of each consumer that is attached and alive, by number."""
        return {index: route.backlog for index, route in self._routes.items() if route.alive}

    def has_credit(self, index: int) -> bool:
        """Whether a consumer is attached, alive, and may take one more transfer."""
        route = self._routes.get(index)
        return route is not None and route.alive and route.backlog < self._credit

    def progress(self) -> None:
        """Process releases and lost consumers, and hand over waiting transfers. ``open`` and ``send`` do so too."""
        # 1. Rings: free released slots, take batches back from dead consumers.
        for ring in self.rings:
            ring.update()
        # 2. Routes that copy: free the slots of released transfers; detach dead routes, whose transfers wait again.
        for index, route in list(self._routes.items()):
            for sequence in route.released():
                del self._carried[sequence]
                self._drop(sequence)
            if not route.alive:
                self._detach(index)
        # 3. Attach new consumers, and give them what waits.
        if self.router is not None:
            self.router.discover_consumers()
        self._hand_over_waiting()

    def drain(self, timeout_s: float) -> int:
        """Wait until consumers have released everything. Returns how many transfers are not released at the time limit."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.progress()
            left = set[int]().union(*(ring.unreleased() for ring in self.rings))
            if not left or time.monotonic() >= deadline:
                return len(left)
            for ring in self.rings:
                ring.drain(max(0.0, min(_POLL_S, deadline - time.monotonic())))

    def close(self, timeout_s: float = 1.0) -> None:
        """Wait until every transfer was handed to a consumer or time is up, then close the rings. Safe to call twice.

        With ``timeout_s=0`` waiting transfers are not handed over.
        """
        if self._is_closed:
            return
        deadline = time.monotonic() + timeout_s
        self.cancel()
        for ring in self.rings:
            ring.update()
        while any(ring.waiting() for ring in self.rings) and time.monotonic() < deadline:
            self.progress()
            self.rings[0].drain(max(0.0, min(_POLL_S, deadline - time.monotonic())))
        for ring in self.rings:
            ring.close(timeout_s=max(0.0, deadline - time.monotonic()))
        for index in list(self._routes):
            self._detach(index)
        self._is_closed = True

    def _reserve(self, ring: ProducerRing, rows: int, begin: float, timeout_s: float) -> ReservedSlot:
        """Reserve a slot. While it waits, transfers of dead consumers are handed to others."""
        while True:
            self.progress()
            left_s = begin + timeout_s - time.monotonic()
            try:
                return ring.reserve(rows, timeout_s=max(0.0, min(_POLL_S, left_s)))
            except ChannelTimeoutError as error:
                if left_s <= _POLL_S:
                    waited_s = time.monotonic() - begin
                    raise ChannelTimeoutError(error.channel, error.detail, waited_s) from None

    def _check(self, ragged: Ragged) -> None:
        """Raise SchemaError for ragged rows that do not fit."""
        unknown = ragged.keys() - self.plan.ragged
        if unknown:
            raise SchemaError(
                self.plan.groups[0].name,
                f"ragged rows of {sorted(unknown)} were given: the plan has {sorted(self.plan.ragged)}",
            )
        for ring in self.rings:
            if ring.schema.name in ragged:
                ring.schema.refuse_tensors(ragged[ring.schema.name])

    def _fill_ragged(self, ragged: Ragged, timeout_s: float) -> None:
        """Reserve slots for the ragged rows of this transfer, and copy them there."""
        begin = time.monotonic()
        reservations: dict[str, ReservedSlot] = {}
        try:
            for ring in self.rings:
                name = ring.schema.name
                if name not in self.plan.ragged:
                    continue
                part = ragged.get(name, {})
                rows = len(part[ROW_FIELD]) if part else 0
                reservations[name] = reservation = self._reserve(ring, rows, begin, timeout_s)
                for field, values in part.items():
                    reservation[field].copy_(values)
        except Exception:
            for reservation in reservations.values():
                reservation.cancel()
            raise
        self._reservations.update(reservations)

    def _hand_over_waiting(self) -> None:
        # A transfer moves as a whole: only when all its parts wait, and all of them to the same consumer.
        waiting = [set(ring.waiting()) for ring in self.rings]
        for sequence in sorted(set[int]().union(*waiting) - self._carried.keys()):
            if not all(sequence in numbers for numbers in waiting):
                self._resolve_partial(sequence)
                continue
            index = least_backlog(self) if self.router is None else self.router.route(sequence)
            if index is None:
                return
            if self._routes[index].hand_over(sequence):
                self._carried[sequence] = index
            self.rerouted += sequence <= self._newest
            self._newest = max(self._newest, sequence)

    def _resolve_partial(self, sequence: int) -> None:
        """Handle a transfer of which only some parts wait, because its consumer is gone."""
        if all(sequence in ring.unreleased() for ring in self.rings):
            return  # no part is released so far: the others come back too, or are released
        # The consumer had released a part, so it had consumed the transfer: it releases all parts at once.
        self._drop(sequence)
        self.incomplete += 1

    def _drop(self, sequence: int) -> None:
        for ring in self.rings:
            if sequence in ring.waiting():
                ring.drop(sequence)

    def _detach(self, index: int) -> None:
        """Close a route. Transfers that it copied and did not deliver wait again."""
        self._routes.pop(index).close()
        self._carried = {sequence: whose for sequence, whose in self._carried.items() if whose != index}


def least_backlog(dispenser: Dispenser) -> int | None:
    """Index of the consumer with the least backlog, of those with credit left; None if there is none.

    Of equal ones that of the producer's number, modulo how many there are, then the next: each consumer is the first choice
    of some producer, so that none is without rows while the others, which wait for it, hold all slots.
    """
    found = dispenser.consumers()
    backlogs = {index: backlog for index, backlog in found.items() if dispenser.has_credit(index)}
    count = max(found, default=0) + 1
    return min(
        backlogs, key=lambda index: (backlogs[index], (index - dispenser.producer) % count), default=None
    )
