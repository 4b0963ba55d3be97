"""Relay: sends experience to consumers on another host, and reads parameters there, through Ray's object store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.raylet_watch import end_with_raylet
from actors.remote_parameter_store import ParameterSnapshot, RelayParameterReader, RemoteParameterStore
from collectives.experience.directory import ConsumerAnnouncement
from collectives.experience.dispenser import Dispenser
from collectives.experience.errors import ChannelError, ChannelTimeoutError, SchemaError
from collectives.experience.migrator import RemoteTransport
from collectives.experience.producer_ring import ProducerRing, ReservedSlot
from collectives.experience.routes import Route, SharedMemoryRoute
from collectives.experience.schema import ExperienceSchema

_POLL_S = 0.005
"""Polling interval for released slots."""
_ORDER_S = 1.0
"""Longest wait of a delivery for its predecessor, which may arrive later, or was delivered by a relay that died."""
_LEAVE_S = 5.0
"""Longest wait for a relay to process the last calls before it is killed."""
_NONE = 0
"""Sequence number of no delivery: the predecessor of the first."""


@dataclass(frozen=True, slots=True)
class RelayAddress:
    """A sender and its consumer. Part of every call, because a restarted relay has no state."""

    producer: int
    origin: int
    """Of the sender's rings. A consumer detects duplicates by origin and sequence number."""
    schemas: tuple[ExperienceSchema, ...]
    rows: tuple[int, ...]
    """Of a batch at most, per channel."""
    slots: int
    endpoints: tuple[str, ...]
    """Consumer endpoints, one per channel."""


@dataclass(slots=True)
class _RelayConnection:
    """Rings and route of a relay for one sender and one consumer."""

    rings: tuple[ProducerRing, ...]
    route: SharedMemoryRoute
    handed: deque[int]
    """The latest sequence numbers that were handed over."""


class Relay:
    """Ray actor on the consumer's host: puts transfers into rings of its own, under the sender's numbers.

    An asyncio actor: its methods interleave at ``await`` and never run in parallel. ``deliver`` returns when the
    consumer has released the transfer. Until then the sender keeps its slot, and can send it again or elsewhere.
    """

    def __init__(self) -> None:
        end_with_raylet()
        self._connections: dict[RelayAddress, _RelayConnection] = {}
        self._parameter_reader = RelayParameterReader()

    async def read_parameters(self, endpoint: str, known: int) -> ParameterSnapshot:
        """Parameters of a store on this host: see ``RelayParameterReader.read_parameters``."""
        return self._parameter_reader.read_parameters(endpoint, known)

    async def deliver(
        self,
        address: RelayAddress,
        after: int,
        sequence: int,
        version: int,
        rows: Sequence[int],
        *messages: Any,
    ) -> bool:
        """Hand over one transfer, and wait until its consumer has released it. False if the consumer is gone.

        ``after``: sequence number of the delivery before, which Ray may deliver later; ``rows`` and ``messages``
        (Arrow): of each channel's batch.

        Raises:
            SchemaError: the consumer expects another schema.
            ChannelError: there is not enough memory for the rings.
        """
        try:
            connection = self._connection_to(address)
        except SchemaError:
            raise
        except ChannelError:
            return False
        rings, begin = connection.rings, time.monotonic()
        # Restore the sender's order: Ray may start calls out of order.
        while after not in connection.handed and time.monotonic() - begin < _ORDER_S:
            await asyncio.sleep(_POLL_S)
        reservations = [await self._reserve(ring, count) for ring, count in zip(rings, rows, strict=True)]
        connection.handed.append(sequence)
        # ``await`` may have taken long: check the consumer again before anything is committed.
        if not connection.route.alive:
            for reservation in reservations:
                reservation.cancel()
            return False
        for reservation, message in zip(reservations, messages, strict=True):
            reservation.message[:] = memoryview(message)
            reservation.commit(version, sequence=sequence)
        connection.route.hand_over(sequence)
        # Wait until each part is either released, or back in the ring because the consumer is gone.
        while True:
            held = [sequence in ring.unreleased() for ring in rings]
            back = [sequence in ring.waiting() for ring in rings]
            if held == back:
                break
            await asyncio.sleep(_POLL_S)
            for ring in rings:
                ring.update()
        for ring, is_back in zip(rings, back, strict=True):
            if is_back:
                ring.drop(sequence)
        return not all(back)  # a consumer that released one part has consumed them all

    async def disconnect(self, address: RelayAddress) -> None:
        """Close the rings of a connection."""
        connection = self._connections.pop(address, None)
        for ring in connection.rings if connection else ():
            ring.close(timeout_s=0.0)

    async def process_id(self) -> int:
        """Its process id."""
        return os.getpid()

    def _connection_to(self, address: RelayAddress) -> _RelayConnection:
        if address in self._connections:
            return self._connections[address]
        rings = tuple(
            ProducerRing(
                schema,
                rows=rows,
                slots=address.slots,
                producer=address.producer,
                origin=address.origin,
                routed=True,
            )
            for schema, rows in zip(address.schemas, address.rows, strict=True)
        )
        try:
            route = SharedMemoryRoute(rings, address.endpoints)
        except ChannelError:
            for ring in rings:
                ring.close(timeout_s=0.0)
            raise
        connection = self._connections[address] = _RelayConnection(
            rings, route, deque([_NONE], maxlen=2 * address.slots)
        )
        return connection

    async def _reserve(self, ring: ProducerRing, rows: int) -> ReservedSlot:
        """Reserve a slot. Senders have no more deliveries in flight than slots, so one is free or becomes free."""
        while True:
            with contextlib.suppress(ChannelTimeoutError):
                return ring.reserve(rows, timeout_s=0.0)
            await asyncio.sleep(_POLL_S)


class RelayRoute(Route):
    """Route of a dispenser to one consumer on another host. Its credits are the dispenser's slots."""

    def __init__(self, relay: Any, dispenser: Dispenser, endpoints: Sequence[str]) -> None:
        """Use a relay on that host. If it dies, Ray restarts it and repeats its unfinished calls."""
        self._relay, self._rings = relay, dispenser.rings
        self._address = RelayAddress(
            producer=dispenser.producer,
            origin=dispenser.origin,
            schemas=dispenser.plan.groups,
            rows=tuple(ring.rows for ring in dispenser.rings),
            slots=dispenser.slots,
            endpoints=tuple(endpoints),
        )
        self._in_flight: dict[Any, int] = {}
        self._alive = True
        self._newest = _NONE

    @property
    def alive(self) -> bool:
        """Whether consumer and host were alive at the last result."""
        return self._alive

    @property
    def backlog(self) -> int:
        """Deliveries in flight."""
        return len(self._in_flight)

    def hand_over(self, sequence: int) -> bool:
        """Put a copy of every part into Ray's object store, as arguments of a call of the relay."""
        encoded_batches = [ring.encoded_batch(sequence) for ring in self._rings]
        messages = [np.frombuffer(encoded_batch.message, dtype=np.uint8) for encoded_batch in encoded_batches]
        rows = tuple(encoded_batch.rows for encoded_batch in encoded_batches)
        answer = self._relay.deliver.remote(
            self._address, self._newest, sequence, encoded_batches[0].version, rows, *messages
        )
        self._in_flight[answer] = self._newest = sequence
        return True

    def released(self) -> Iterator[int]:
        """Sequence numbers that the consumer has released since the last call.

        Raises:
            SchemaError: the consumer expects another schema.
        """
        if not self._in_flight:
            return
        answers, _ = ray.wait(list(self._in_flight), num_returns=len(self._in_flight), timeout=0)
        for answer in answers:
            sequence = self._in_flight.pop(answer)
            try:
                is_released = ray.get(answer)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError:  # the host is gone, and its consumer too
                is_released = False
            if is_released:
                yield sequence
            else:
                self._alive = False

    def close(self) -> None:
        """Disconnect from the consumer."""
        self._relay.disconnect.remote(self._address)  # not awaited here; ``Relays.close`` waits for it


class Relays(RemoteTransport):
    """The relays of one producer's process, one per host: what a ``Migrator`` takes as ``remote_route``."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    def __call__(self, dispenser: Dispenser, consumer: ConsumerAnnouncement) -> RelayRoute:
        """Route to a consumer that announced its Ray node id."""
        if not consumer.node:
            raise SchemaError(
                dispenser.plan.groups[0].name,
                "a consumer on another host did not announce its node: pass node= to Batcher.announce",
            )
        return RelayRoute(self._relay(consumer.node), dispenser, consumer.endpoints)

    def parameter_store(self, node: str, endpoint: str) -> RemoteParameterStore:
        """Parameter store of a learner on another host."""
        return RemoteParameterStore(self._relay(node), endpoint)

    def _relay(self, node: str) -> Any:
        if node not in self._handles:
            options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._handles[node] = ray.remote(Relay).options(scheduling_strategy=there, **options).remote()
        return self._handles[node]

    def close(self) -> None:
        """Kill the relays. Consumers can still read what was delivered. Safe to call twice."""
        while self._handles:
            relay = self._handles.popitem()[1]
            with contextlib.suppress(ray.exceptions.RayError):
                # Any call: it runs after the pending disconnect calls.
                ray.get(relay.process_id.remote(), timeout=_LEAVE_S)
            ray.kill(relay)
