"""The collective actor: where GMIs meet. Control only; no gradient ever passes through it."""

from __future__ import annotations

from collections import defaultdict

from collectives.errors import RendezvousError
from collectives.rendezvous import Member


class Collective:
    """Rendezvous of ``world_size`` members, once per generation: a group that forms anew takes the next number."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._members: defaultdict[int, dict[int, Member]] = defaultdict(dict)
        self._endpoints: defaultdict[int, dict[str, str]] = defaultdict(dict)

    def register(self, generation: int, member: Member) -> None:
        """Say that a member is here; a member may repeat itself.

        Raises:
            RendezvousError: its rank is taken by another process, or out of range.
        """
        if not 0 <= member.rank < self._world_size:
            raise RendezvousError(
                generation, f"{member} does not belong: ranks are 0 to {self._world_size - 1}"
            )
        present = self._members[generation].setdefault(member.rank, member)
        if present != member:
            raise RendezvousError(generation, f"{member} came, but this rank is already taken by {present}")

    def members(self, generation: int) -> tuple[Member, ...]:
        """Who is here, by rank; complete when it counts world_size."""
        present = self._members[generation]
        return tuple(present[rank] for rank in sorted(present))

    def publish(self, generation: int, key: str, endpoint: str) -> None:
        """Say where a data path begins; ``key`` tells it from the generation's others.

        Raises:
            RendezvousError: another endpoint was published under this key before.
        """
        present = self._endpoints[generation].setdefault(key, endpoint)
        if present != endpoint:
            raise RendezvousError(
                generation, f"endpoint {key!r} {endpoint} came, but {present} was published before"
            )

    def endpoint(self, generation: int, key: str) -> str | None:
        """What was published under ``key``; None until then."""
        return self._endpoints[generation].get(key)

    def __repr__(self) -> str:
        return f"Collective(world_size={self._world_size}, generations={sorted(self._members)})"
