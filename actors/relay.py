"""Experience for consumers on another host: the same message bytes, through Ray's object store; parameters come back so."""

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

from actors.remote_parameter_store import ParameterSnapshot, RelayParameterReader, RemoteParameterStore
from collectives.experience.directory import ConsumerAnnouncement
from collectives.experience.dispenser import Dispenser
from collectives.experience.errors import ChannelError, ChannelTimeoutError, SchemaError
from collectives.experience.producer_ring import ProducerRing, ReservedSlot
from collectives.experience.remote_transport import RemoteTransport
from collectives.experience.routes import Route, SharedMemoryRoute
from collectives.experience.schema import ExperienceSchema

_LOOK_S = 0.005
"""Between looks whether the consumer has released what was delivered."""
_ORDER_S = 1.0
"""How long a delivery waits for the one before it, which overtook it or was answered by a relay that died."""
_LEAVE_S = 5.0
_NONE = 0
"""No delivery's number."""


@dataclass(frozen=True, slots=True)
class RelayAddress:
    """What a relay needs to know of a sender and its consumer. Said each time: one that was replaced knows nothing."""

    producer: int
    origin: int
    """Of the sender's outboxes: a consumer knows by it and the sequence number what comes a second time."""
    schemas: tuple[ExperienceSchema, ...]
    rows: tuple[int, ...]
    """That a batch has at most, per channel."""
    slots: int
    endpoints: tuple[str, ...]
    """Of the consumer's inboxes."""


@dataclass(slots=True)
class _RelayConnection:
    """From one sender to one consumer."""

    rings: tuple[ProducerRing, ...]
    route: SharedMemoryRoute
    handed: deque[int]
    """Sequences that were handed over, the latest of them."""


class Relay:
    """On the consumer's host: puts what is delivered into outboxes of its own, under the sender's numbers.

    An asynchronous actor, so that its methods take turns and never run at once. A delivery is answered when the
    consumer has released it: until then the sender keeps its slot, and can send it again or elsewhere.
    """

    def __init__(self) -> None:
        self._connections: dict[RelayAddress, _RelayConnection] = {}
        self._parameter_reader = RelayParameterReader()

    async def read_parameters(self, endpoint: str, known: int) -> ParameterSnapshot:
        """What a board of this host shows: see ``RelayParameterReader.read_parameters``."""
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

        Args:
            address: from whom, to whom
            after: the number of the delivery before, which Ray may bring later
            sequence: the sender's number
            version: of the policy
            rows: of each channel's batch
            messages: their bytes

        Raises:
            SchemaError: the consumer expects something else.
            ChannelError: there is no memory for the outboxes.
        """
        try:
            connection = self._connection_to(address)
        except SchemaError:
            raise
        except ChannelError:
            return False
        rings, begin = connection.rings, time.monotonic()
        while after not in connection.handed and time.monotonic() - begin < _ORDER_S:
            await asyncio.sleep(_LOOK_S)
        reservations = [await self._reserve(ring, count) for ring, count in zip(rings, rows, strict=True)]
        connection.handed.append(sequence)
        if not connection.route.alive:
            for reservation in reservations:
                reservation.cancel()
            return False
        for reservation, message in zip(reservations, messages, strict=True):
            reservation.message[:] = memoryview(message)
            reservation.commit(version, sequence=sequence)
        connection.route.hand_over(sequence)
        while True:
            held = [sequence in ring.unreleased() for ring in rings]
            back = [sequence in ring.waiting() for ring in rings]
            if held == back:  # all parts are released, or have come back from a consumer that is gone
                break
            await asyncio.sleep(_LOOK_S)
            for ring in rings:
                ring.update()
        for ring, is_back in zip(rings, back, strict=True):
            if is_back:
                ring.drop(sequence)
        return not all(back)  # a consumer that had released a part was done with all of it

    async def disconnect(self, address: RelayAddress) -> None:
        """Say goodbye to a consumer in the sender's name."""
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
        """Senders have no more under way than there are slots: it is free, or about to be."""
        while True:
            with contextlib.suppress(ChannelTimeoutError):
                return ring.reserve(rows, timeout_s=0.0)
            await asyncio.sleep(_LOOK_S)


class RelayRoute(Route):
    """A dispenser's way to one consumer on another host. Its credits are the dispenser's slots."""

    def __init__(self, relay: Any, dispenser: Dispenser, endpoints: Sequence[str]) -> None:
        """Use a relay there. Ray starts it anew wherever it can when it dies, and delivers again what was not answered."""
        self._relay, self._rings = relay, dispenser.rings
        self._address = RelayAddress(
            producer=dispenser.producer,
            origin=dispenser.origin,
            schemas=dispenser.plan.groups,
            rows=tuple(ring.rows for ring in dispenser.rings),
            slots=dispenser.slots,
            endpoints=tuple(endpoints),
        )
        self._under_way: dict[Any, int] = {}
        self._alive = True
        self._newest = _NONE

    @property
    def alive(self) -> bool:
        """Whether consumer and host were there at the last answer."""
        return self._alive

    @property
    def backlog(self) -> int:
        """Deliveries that were not answered."""
        return len(self._under_way)

    @property
    def copies_batches(self) -> bool:
        """Yes: slots stay with their owner until the consumer has released what was copied from them."""
        return True

    def hand_over(self, sequence: int) -> None:
        """Copy every part into the object store, and let the relay's host fetch it."""
        encoded_batches = [ring.encoded_batch(sequence) for ring in self._rings]
        messages = [np.frombuffer(encoded_batch.message, dtype=np.uint8) for encoded_batch in encoded_batches]
        rows = tuple(encoded_batch.rows for encoded_batch in encoded_batches)
        answer = self._relay.deliver.remote(
            self._address, self._newest, sequence, encoded_batches[0].version, rows, *messages
        )
        self._under_way[answer] = self._newest = sequence

    def released(self) -> Iterator[int]:
        """Sequences that the consumer has released since the last call.

        Raises:
            SchemaError: the consumer expects something else.
        """
        if not self._under_way:
            return
        answers, _ = ray.wait(list(self._under_way), num_returns=len(self._under_way), timeout=0)
        for answer in answers:
            sequence = self._under_way.pop(answer)
            try:
                is_released = ray.get(answer)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError:  # its host is gone, and the consumer with it
                is_released = False
            if is_released:
                yield sequence
            else:
                self._alive = False

    def close(self) -> None:
        """Say goodbye to the consumer."""
        self._relay.disconnect.remote(self._address)  # nobody waits for it but ``Relays.close``


class Relays(RemoteTransport):
    """The relays of one producer's process, one per host: what a ``Migrator`` takes as ``remote_route``."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    def __call__(self, dispenser: Dispenser, consumer: ConsumerAnnouncement) -> RelayRoute:
        """A way to a consumer that announced its Ray node's id."""
        if not consumer.node:
            raise SchemaError(
                dispenser.plan.groups[0].name,
                "a consumer on another host did not announce its node: pass node= to Batcher.announce",
            )
        return RelayRoute(self._relay(consumer.node), dispenser, consumer.endpoints)

    def parameter_store(self, node: str, endpoint: str) -> RemoteParameterStore:
        """A learner's board on another host."""
        return RemoteParameterStore(self._relay(node), endpoint)

    def _relay(self, node: str) -> Any:
        if node not in self._handles:
            options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._handles[node] = ray.remote(Relay).options(scheduling_strategy=there, **options).remote()
        return self._handles[node]

    def close(self) -> None:
        """End them; consumers read on what is there. Safe to call twice."""
        while self._handles:
            relay = self._handles.popitem()[1]
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(relay.process_id.remote(), timeout=_LEAVE_S)  # after all goodbyes
            ray.kill(relay)
