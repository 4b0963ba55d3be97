"""Rendezvous actor: members register and exchange endpoints. It carries no gradients.

It is also the directory of the GMIs' experience channels and parameter stores. It may die and restart: its callers repeat
their calls (``collectives.rendezvous``), which restores its state.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from actors.raylet_watch import end_with_raylet
from collectives.errors import RendezvousError
from collectives.rendezvous import Member, RendezvousStatus

Process = tuple[str, int]


@dataclass(slots=True)
class _GenerationState:
    """State of one generation."""

    present: dict[int, Member] = field(default_factory=dict)
    lost: dict[Process, Member] = field(default_factory=dict)
    endpoints: dict[str, str] = field(default_factory=dict)


class RendezvousActor:
    """Rendezvous of up to ``world_size`` members per generation: one for each time that the group connects."""

    def __init__(self, world_size: int) -> None:
        end_with_raylet()
        self._world_size = world_size
        self._generations: dict[int, _GenerationState] = {}
        self._announced: dict[str, tuple[int, str]] = {}
        """Incarnation and value, by key."""

    def announce(self, key: str, value: str, incarnation: int | None = None) -> int:
        """Publish ``value`` under ``key``, until a later incarnation of the GMI replaces it.

        Returns the incarnation: the given one, with which a value is announced again after a restart of this actor, or a new
        one. It is later than all before, whatever clocks say, and later than those that this actor has forgotten.
        """
        latest = self._announced.get(key, (0, ""))[0]
        if incarnation is None:
            incarnation = max(latest + 1, time.time_ns())
        if incarnation >= latest:
            self._announced[key] = incarnation, value
        return incarnation

    def announced(self, prefix: str) -> dict[str, str]:
        """The latest values by key, for keys with this prefix."""
        return {key: value for key, (_, value) in sorted(self._announced.items()) if key.startswith(prefix)}

    def register(self, generation: int, member: Member) -> RendezvousStatus:
        """Register a member; idempotent.

        Raises:
            RendezvousError: its rank is taken by another process or out of range.
        """
        state = self._generation_state(generation)
        if not 0 <= member.rank < self._world_size:
            raise RendezvousError(
                generation, f"{member} does not belong: ranks are 0 to {self._world_size - 1}"
            )
        present = state.present.setdefault(member.rank, member)
        if present != member:
            earlier = " of an earlier registration" if present.process == member.process else ""
            raise RendezvousError(
                generation, f"{member} cannot register: this rank is already taken by {present}{earlier}"
            )
        return RendezvousStatus(
            present=tuple(state.present[rank] for rank in sorted(state.present)),
            lost=tuple(state.lost.values()),
        )

    def report(self, generation: int, lost: tuple[Member, ...]) -> None:
        """Report lost members."""
        self._generation_state(generation).lost.update((member.process, member) for member in lost)

    def publish(self, generation: int, key: str, endpoint: str) -> None:
        """Publish the endpoint of a transport, or another text that a generation shares, such as its plan.

        Raises:
            RendezvousError: something else was published under this key before.
        """
        present = self._generation_state(generation).endpoints.setdefault(key, endpoint)
        if present != endpoint:
            raise RendezvousError(
                generation, f"endpoint {key!r} is {present} already, and cannot become {endpoint}"
            )

    def endpoint(self, generation: int, key: str) -> str | None:
        """What was published under ``key``; None until then."""
        return self._generation_state(generation).endpoints.get(key)

    def _generation_state(self, generation: int) -> _GenerationState:
        return self._generations.setdefault(generation, _GenerationState())
