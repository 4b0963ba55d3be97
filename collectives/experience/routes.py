"""Routes from a dispenser to one consumer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from collectives.errors import counted
from collectives.experience.errors import SchemaError
from collectives.experience.producer_ring import ProducerRing


class Route(Protocol):
    """Route to one consumer. Each call delivers all parts of one sequence number, one from each producer ring."""

    @property
    def alive(self) -> bool:
        """Whether it can be used. Once False, always False."""

    @property
    def backlog(self) -> int:
        """Transfers that were handed over and not released."""

    def hand_over(self, sequence: int) -> bool:
        """Deliver the waiting batches of this sequence number to the consumer.

        Returns whether these are copies. The dispenser then keeps the slots until ``released`` yields the number.
        """

    def released(self) -> Iterable[int]:
        """Sequence numbers that were released since the last call, and whose slots the dispenser must free."""

    def close(self) -> None:
        """Disconnect. Safe to call twice."""


class SharedMemoryRoute(Route):
    """Route to a consumer on this host, which reads the slots in place."""

    def __init__(self, rings: Sequence[ProducerRing], endpoints: Sequence[str]) -> None:
        """Attach every producer ring to its consumer endpoint.

        Raises:
            ChannelError: an endpoint no longer exists.
            SchemaError: an endpoint expects another schema, or the numbers of rings and endpoints differ.
        """
        if len(rings) != len(endpoints):
            raise SchemaError(
                rings[0].schema.name,
                f"the consumer has {counted(len(endpoints), 'endpoint')} where "
                f"{counted(len(rings), 'channel')} are planned: give both one plan",
            )
        self._queues = [
            (ring, ring.attach(endpoint), endpoint) for ring, endpoint in zip(rings, endpoints, strict=True)
        ]

    @property
    def alive(self) -> bool:
        """Whether it is still attached to every ring; its queues may belong to another consumer by now."""
        return all(ring.is_attached_to(queue, endpoint) for ring, queue, endpoint in self._queues)

    @property
    def backlog(self) -> int:
        """Posted transfers that are not released."""
        return max(ring.backlog(queue) for ring, queue, _ in self._queues)

    def hand_over(self, sequence: int) -> bool:
        """Post every part to the consumer's queue, which reads the slots in place."""
        for ring, queue, _ in self._queues:
            ring.post(sequence, queue)
        return False

    def released(self) -> Iterable[int]:
        """Nothing: the rings free these slots themselves."""
        return ()

    def close(self) -> None:
        """Nothing to do: the rings detach consumers that are gone."""
