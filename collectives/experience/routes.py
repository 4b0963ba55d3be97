"""Ways by which experience reaches a consumer, and who chooses among consumers: what the dispenser needs of the migrator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from collectives.experience.errors import SchemaError
from collectives.experience.producer_ring import ProducerRing


class Route(Protocol):
    """To one consumer. Each call hands over all parts of one sequence number, one from each outbox."""

    @property
    def alive(self) -> bool:
        """Whether it can be used; once not, never again."""
        ...

    @property
    def backlog(self) -> int:
        """Sequences on their way or there, and not released."""
        ...

    @property
    def copies_batches(self) -> bool:
        """Whether slots stay with their owner until ``released`` says that they are free."""
        ...

    def hand_over(self, sequence: int) -> None:
        """Bring what waits in the outboxes under this number to the consumer."""
        ...

    def released(self) -> Iterable[int]:
        """Sequences that the consumer has released since the last call and whose slots the owner is to free."""
        ...

    def close(self) -> None:
        """Let go of it. Safe to call twice."""
        ...


class SharedMemoryRoute(Route):
    """To a consumer of this host, which reads the slots themselves."""

    def __init__(self, rings: Sequence[ProducerRing], endpoints: Sequence[str]) -> None:
        """Attach every outbox to its inbox there.

        Raises:
            ChannelError: an inbox is not there any more.
            SchemaError: one expects something else, or there are not as many as outboxes.
        """
        if len(rings) != len(endpoints):
            raise SchemaError(
                rings[0].schema.name,
                f"the consumer has {len(endpoints)} inboxes where {len(rings)} channels are planned: give both one plan",
            )
        self._queues = [
            (ring, ring.attach(endpoint), endpoint) for ring, endpoint in zip(rings, endpoints, strict=True)
        ]

    @property
    def alive(self) -> bool:
        """Whether every outbox has it for a consumer still: its lines may be others' by now."""
        return all(ring.is_attached_to(queue, endpoint) for ring, queue, endpoint in self._queues)

    @property
    def backlog(self) -> int:
        """Sequences there and not released."""
        return max(ring.backlog(queue) for ring, queue, _ in self._queues)

    @property
    def copies_batches(self) -> bool:
        """No: the consumer frees them."""
        return False

    def hand_over(self, sequence: int) -> None:
        """Post every part."""
        for ring, queue, _ in self._queues:
            ring.post(sequence, queue)

    def released(self) -> Iterable[int]:
        """None: an outbox frees such slots itself."""
        return ()

    def close(self) -> None:
        """Nothing to do: the outboxes forget consumers that are gone."""


class Router(Protocol):
    """Chooses consumers for a dispenser."""

    def discover_consumers(self) -> None:
        """Called before each choice, and while there is nothing to do but wait: find consumers that have come."""
        ...

    def route(self, sequence: int) -> int | None:
        """Index of the consumer that is to have a sequence; None if nobody can have it now."""
        ...
