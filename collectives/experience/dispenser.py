"""Dispenser: gives an agent tensors to write its experience into, and sends all groups of it under one number."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from collectives.experience.errors import ChannelTimeoutError, SchemaError
from collectives.experience.packer import ROW_FIELD, ChannelPlan
from collectives.experience.producer_ring import ProducerRing, ReservedSlot
from collectives.experience.routes import Route, Router, SharedMemoryRoute

_LOOK_S = 0.05
"""After which a dispenser that waits for a slot looks at consumers and ways again."""

Ragged = Mapping[str, Mapping[str, Tensor]]
"""Rows of ragged groups: by group, by field."""


class Dispenser:
    """One agent's experience on its way: an outbox per group, and one decision where each sequence number goes.

    Not for several threads at once. ::

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
        """Give it its memory.

        Args:
            plan: what travels in which channel
            rows: of the full groups that are sent at a time
            producer: its number among the channel set's producers, from 0
            slots: transfers that can be under way
            ragged_rows: of a ragged group that are sent at a time, at most; None: ``rows``
            credit: transfers that one consumer may have and not have released; None: all slots

        Raises:
            ChannelError: there is no memory for it.
            ValueError: a number is out of its range.
        """
        self.plan, self.rows, self.producer, self.slots = plan, rows, producer, slots
        self._credit = credit or slots
        origin = secrets.randbits(63) | 1
        self.origin = origin
        """Tells this dispenser from another that had its number before."""
        self.rings: tuple[ProducerRing, ...] = tuple(
            ProducerRing(
                group,
                rows=plan.batch * ((ragged_rows or rows) if group.name in plan.ragged else rows),
                slots=slots,
                producer=producer,
                origin=origin,
                routed=True,
            )
            for group in plan.groups
        )
        self._full = [ring for ring in self.rings if ring.schema.name not in plan.ragged]
        self._reservations: dict[str, ReservedSlot] = {}
        self._kept: dict[str, list[dict[str, Tensor]]] = {name: [] for name in plan.ragged}
        """Ragged rows of groups whose transfer is not full yet."""
        self._filled = self._sequence = self._version = self._newest = 0
        self._is_closed = False
        self._routes: dict[int, Route] = {}
        self._carried: dict[int, int] = {}
        """Of sequences whose slots stay here until a way says that they were released: the consumer."""
        self.router: Router = _LeastBacklog(self)
        self.incomplete = 0
        """Sequences of which a consumer that died had released some parts: it was done with them, the rest is dropped."""
        self.rerouted = 0
        """Sequences that were handed over again, since the consumer that had them was gone."""

    def open(self, timeout_s: float = 60.0) -> dict[str, Tensor]:
        """Fields of the full groups, (rows, *shape), to be written in place; what stood there before still does.

        Raises:
            ChannelTimeoutError: no consumer released a slot within the time limit. May be called again.
        """
        begin = time.monotonic()
        for ring in self._full:
            if ring.schema.name not in self._reservations:
                self._reservations[ring.schema.name] = self._reserve(ring, ring.rows, begin, timeout_s)
        rows = slice(self._filled * self.rows, (self._filled + 1) * self.rows)
        reservations = [self._reservations[ring.schema.name] for ring in self._full]
        return {
            name: tensor[rows] for reservation in reservations for name, tensor in reservation.tensors.items()
        }

    def send(self, version: int, ragged: Ragged | None = None, timeout_s: float = 60.0) -> int:
        """Send what was opened, and the rows of ragged groups (a group that is not given has none).

        With several groups per transfer, the last of them sends all, under the oldest version among them.

        Returns:
            the sequence number under which it travels, from 1; the same in all channels.

        Raises:
            SchemaError: ragged rows with other fields, types or shapes, or more of them than a slot holds.
            ChannelTimeoutError: no slot for the ragged rows within the time limit. May be called again.
            ValueError: nothing is open.
        """
        if len(self._reservations) < len(self._full):
            raise ValueError("nothing is open: call open() and write into its tensors first")
        pieces = self._checked(ragged or {})
        if self._filled + 1 < self.plan.batch:
            for name, piece in pieces.items():
                self._kept[name].append({field: tensor.clone() for field, tensor in piece.items()})
        else:
            self._fill_ragged(pieces, timeout_s)
        self._version = version if self._filled == 0 else min(version, self._version)
        self._filled += 1
        if self._filled < self.plan.batch:
            return self._sequence + 1
        for ring in self.rings:
            self._sequence = self._reservations.pop(ring.schema.name).commit(self._version)
        self._begin_anew()
        self.progress()
        return self._sequence

    def cancel(self) -> None:
        """Give what was opened back unsent, with all groups that wait for the same transfer."""
        while self._reservations:
            self._reservations.popitem()[1].cancel()
        self._begin_anew()

    def attach(self, index: int, endpoints: Sequence[str]) -> None:
        """Connect all groups to a consumer of this host: its number, and its inboxes in the plan's order.

        Raises:
            ChannelError: an inbox is not there any more.
            SchemaError: one expects something else, or there are not as many as groups.
        """
        self.attach_route(index, SharedMemoryRoute(self.rings, endpoints))
        self.progress()

    def attach_route(self, index: int, route: Route) -> None:
        """Connect to a consumer by any way. Who had its number before is let go of."""
        if index in self._routes:
            self._detach(index)
        self._routes[index] = route

    def consumers(self) -> dict[int, int]:
        """The backlog of each consumer that is attached and alive, by number."""
        return {index: route.backlog for index, route in self._routes.items() if route.alive}

    def has_credit(self, index: int) -> bool:
        """Whether a consumer is there and may have one more."""
        route = self._routes.get(index)
        return route is not None and route.alive and route.backlog < self._credit

    def progress(self) -> None:
        """Take in what was released and who is gone, and hand over what waits. ``open`` and ``send`` do so too."""
        for ring in self.rings:
            ring.update()
        for index, route in list(self._routes.items()):
            for sequence in route.released():
                del self._carried[sequence]
                self._drop(sequence)
            if not route.alive:
                self._detach(index)
        self.router.discover_consumers()
        self._hand_over_waiting()

    def drain(self, timeout_s: float) -> int:
        """Wait until consumers have released everything; returns how many transfers they have not when time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.progress()
            left = set[int]().union(*(ring.unreleased() for ring in self.rings))
            if not left or time.monotonic() >= deadline:
                return len(left)
            for ring in self.rings:
                ring.drain(max(0.0, min(_LOOK_S, deadline - time.monotonic())))

    def close(self, timeout_s: float = 1.0) -> None:
        """Say goodbye, once what was sent has found a consumer or time is up: no time, and none is looked for.

        Safe to call twice.
        """
        if self._is_closed:
            return
        deadline = time.monotonic() + timeout_s
        self.cancel()
        for ring in self.rings:
            ring.update()
        while any(ring.waiting() for ring in self.rings) and time.monotonic() < deadline:
            self.progress()
            self.rings[0].drain(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
        for ring in self.rings:
            ring.close(timeout_s=max(0.0, deadline - time.monotonic()))
        for index in list(self._routes):
            self._detach(index)
        self._is_closed = True

    def _reserve(self, ring: ProducerRing, rows: int, begin: float, timeout_s: float) -> ReservedSlot:
        """Of a slot; whoever waits for one sees to it that what a dead consumer had goes to another."""
        while True:
            self.progress()
            left_s = begin + timeout_s - time.monotonic()
            try:
                return ring.reserve(rows, timeout_s=max(0.0, min(_LOOK_S, left_s)))
            except ChannelTimeoutError as error:
                if left_s <= _LOOK_S:
                    waited_s = time.monotonic() - begin
                    raise ChannelTimeoutError(error.channel, error.detail, waited_s) from None

    def _checked(self, ragged: Ragged) -> dict[str, dict[str, Tensor]]:
        """By group; their rows refer to those of the whole transfer."""
        unknown = ragged.keys() - self.plan.ragged
        if unknown:
            raise SchemaError(
                self.plan.groups[0].name,
                f"ragged rows of {sorted(unknown)} came: the plan has {sorted(self.plan.ragged)}",
            )
        pieces = {}
        for ring in self.rings:
            name = ring.schema.name
            if name in ragged and ring.schema.refuse_tensors(ragged[name]):
                pieces[name] = dict(ragged[name])
                pieces[name][ROW_FIELD] = pieces[name][ROW_FIELD] + self._filled * self.rows
        return pieces

    def _fill_ragged(self, last: Mapping[str, Mapping[str, Tensor]], timeout_s: float) -> None:
        """Claim slots for the ragged rows of this transfer, and copy them there."""
        begin = time.monotonic()
        reservations: dict[str, ReservedSlot] = {}
        try:
            for ring in self.rings:
                name = ring.schema.name
                if name not in self.plan.ragged:
                    continue
                pieces = [*self._kept[name], *([last[name]] if name in last else [])]
                rows = sum(len(piece[ROW_FIELD]) for piece in pieces)
                reservations[name] = reservation = self._reserve(ring, rows, begin, timeout_s)
                for field in reservation.tensors if pieces else ():
                    torch.cat([piece[field] for piece in pieces], out=reservation[field])
        except Exception:
            for reservation in reservations.values():
                reservation.cancel()
            raise
        self._reservations.update(reservations)

    def _begin_anew(self) -> None:
        self._filled = 0
        for pieces in self._kept.values():
            pieces.clear()

    def _hand_over_waiting(self) -> None:
        waiting = [set(ring.waiting()) for ring in self.rings]
        for sequence in sorted(set[int]().union(*waiting) - self._carried.keys()):
            if not all(sequence in numbers for numbers in waiting):
                self._resolve_partial(sequence)
                continue
            index = self.router.route(sequence)
            if index is None:
                return
            route = self._routes[index]
            route.hand_over(sequence)
            if route.copies_batches:
                self._carried[sequence] = index
            self.rerouted += sequence <= self._newest
            self._newest = max(self._newest, sequence)

    def _resolve_partial(self, sequence: int) -> None:
        """A sequence of which not all parts wait: its consumer is being given up, or was done with it."""
        if all(sequence in ring.unreleased() for ring in self.rings):
            return  # its other parts will come back too, or be released
        self._drop(sequence)
        self.incomplete += 1

    def _drop(self, sequence: int) -> None:
        for ring in self.rings:
            if sequence in ring.waiting():
                ring.drop(sequence)

    def _detach(self, index: int) -> None:
        """What a way carried and did not bring waits again."""
        self._routes.pop(index).close()
        self._carried = {sequence: whose for sequence, whose in self._carried.items() if whose != index}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LeastBacklog(Router):
    """Any consumer that has room; of several the one that has least to do."""

    def __init__(self, dispenser: Dispenser) -> None:
        self._dispenser = dispenser

    def discover_consumers(self) -> None:
        """Consumers are attached by hand."""

    def route(self, sequence: int) -> int | None:
        """The index of the consumer with the least backlog."""
        return least_backlog(self._dispenser)


def least_backlog(dispenser: Dispenser) -> int | None:
    """Index of the consumer that has least to do, of those that may have one more."""
    backlogs = {
        index: backlog for index, backlog in dispenser.consumers().items() if dispenser.has_credit(index)
    }
    return min(backlogs, key=lambda index: (backlogs[index], index), default=None)
