"""A group whose members are threads of this process: the reference for groups of processes, easy to debug."""

from __future__ import annotations

import threading

from collectives.communicator import Communicator
from collectives.composed import ComposedCommunicator
from collectives.compositions import compose
from collectives.errors import CommunicatorError
from collectives.layout import Layout
from collectives.schedule import Primitive
from collectives.solo import SoloCommunicator
from collectives.transports.base import Transport
from tests.unit.collectives.thread_transport import InProcessGroup


class ThreadGroup:
    """Create one; then create the communicator of each rank in that rank's thread."""

    def __init__(self, layout: Layout, composition: str = "ip_only", timeout_s: float = 60.0) -> None:
        """Raises CompositionError where the composition does not apply to the layout."""
        self.layout, self.timeout_s = layout, timeout_s
        self.schedule = compose(composition, layout)
        self._transports: dict[tuple[Primitive, tuple[int, ...]], InProcessGroup] = {}
        self._channels: dict[tuple[int, int], InProcessGroup] = {}
        self._groups: dict[tuple[int, tuple[int, ...]], ThreadGroup] = {}
        self._lock = threading.Lock()

    @classmethod
    def on_one_device(cls, world_size: int, timeout_s: float = 60.0) -> ThreadGroup:
        """Members of one device."""
        return cls(Layout.from_counts([[world_size]]), timeout_s=timeout_s)

    def communicator(self, rank: int) -> Communicator:
        """One member's view."""
        if self.layout.world_size == 1:
            return SoloCommunicator()
        return ComposedCommunicator(rank, self.schedule, _ThreadTransportFactory(self, rank))

    def transport(self, primitive: Primitive, ranks: tuple[int, ...]) -> InProcessGroup:
        """The shared state of the members of a step's group."""
        with self._lock:
            new = InProcessGroup(len(ranks), self.timeout_s)
            return self._transports.setdefault((primitive, ranks), new)

    def channel(self, direction: tuple[int, int]) -> InProcessGroup:
        """The shared state of a sender and its receiver."""
        with self._lock:
            return self._channels.setdefault(direction, InProcessGroup(2, self.timeout_s))

    def group(self, number: int, ranks: tuple[int, ...]) -> ThreadGroup:
        """The ``number``-th subgroup; members of one node stay on one node in its layout."""
        nodes: dict[int, list[int]] = {}
        for index, rank in enumerate(ranks):
            nodes.setdefault(self.layout.places()[rank][0], []).append(index)
        with self._lock:
            new = ThreadGroup(
                Layout(tuple((tuple(node),) for node in nodes.values())), timeout_s=self.timeout_s
            )
            return self._groups.setdefault((number, ranks), new)


class _ThreadTransportFactory:
    """Connects one member to the others."""

    def __init__(self, owner: ThreadGroup, rank: int) -> None:
        self._owner, self._rank = owner, rank
        self._num_groups = 0

    def transport(self, primitive: Primitive, ranks: tuple[int, ...]) -> Transport:
        return self._owner.transport(primitive, ranks).transport(ranks.index(self._rank))

    def channel(self, direction: tuple[int, int]) -> Transport:
        return self._owner.channel(direction).transport(direction.index(self._rank))

    def group(self, ranks: tuple[int, ...]) -> Communicator | None:
        self._num_groups += 1
        if self._rank not in ranks:
            return None
        return self._owner.group(self._num_groups, ranks).communicator(ranks.index(self._rank))

    def with_root_cause(self, error: CommunicatorError) -> CommunicatorError:
        return error

    def close(self) -> None:
        """Nothing is left open."""
