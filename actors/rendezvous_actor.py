"""Rendezvous actor: members register, exchange endpoints and agree on the next generation. It carries no gradients.

It is also the directory of the GMIs' experience channels and parameter stores. It may die and restart: its callers repeat
their calls (``collectives.rendezvous``), which restores its state. Only wait times start again from zero.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from actors.raylet_watch import end_with_raylet
from collectives.errors import RendezvousError
from collectives.rendezvous import JoinRequest, Member, MembershipView, RendezvousStatus

Process = tuple[str, int]


@dataclass(slots=True)
class _GenerationState:
    """State of one generation."""

    membership: MembershipView | None = None
    """Its members, if known; None: the first process to register a rank gets it."""
    present: dict[int, Member] = field(default_factory=dict)
    lost: dict[Process, Member] = field(default_factory=dict)
    endpoints: dict[str, str] = field(default_factory=dict)


class RendezvousActor:
    """Rendezvous of up to ``world_size`` members per generation. A group that re-forms takes the next generation."""

    def __init__(self, world_size: int) -> None:
        end_with_raylet()
        self._world_size = world_size
        self._generations: dict[int, _GenerationState] = {}
        self._latest: MembershipView | None = None
        self._ranks: dict[Process, int] = {}
        """Ranks in the latest generation."""
        self._join_requests: dict[Process, JoinRequest] = {}
        """In order of arrival."""
        self._lost: dict[Process, Member] = {}
        self._forming_since: float | None = None
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
            RendezvousError: its rank is taken by another process or out of range, or the generation is over.
        """
        state = self._generation_state(generation)
        if not 0 <= member.rank < self._world_size:
            raise RendezvousError(
                generation, f"{member} does not belong: ranks are 0 to {self._world_size - 1}"
            )
        members = state.membership.members if state.membership else ()
        if members and (member.rank >= len(members) or members[member.rank].process != member.process):
            raise RendezvousError(
                generation, f"{member} does not belong: it was formed of {', '.join(map(str, members))}"
            )
        present = state.present.setdefault(member.rank, member)
        if present != member:
            earlier = " of an earlier registration" if present.process == member.process else ""
            raise RendezvousError(
                generation, f"{member} cannot register: this rank is already taken by {present}{earlier}"
            )
        return RendezvousStatus(
            present=tuple(state.present[rank] for rank in sorted(state.present)),
            expected=tuple(other for other in members if other.rank not in state.present),
            lost=tuple(state.lost.values()),
        )

    def report(self, generation: int, lost: tuple[Member, ...]) -> None:
        """Report lost members."""
        self._generation_state(generation).lost.update((member.process, member) for member in lost)

    def publish(self, generation: int, key: str, endpoint: str) -> None:
        """Publish the endpoint of a transport, or another text that a generation shares, such as its plan.

        Raises:
            RendezvousError: something else was published under this key before, or the generation is over.
        """
        present = self._generation_state(generation).endpoints.setdefault(key, endpoint)
        if present != endpoint:
            raise RendezvousError(
                generation, f"endpoint {key!r} is {present} already, and cannot become {endpoint}"
            )

    def endpoint(self, generation: int, key: str) -> str | None:
        """What was published under ``key``; None until then. Raises RendezvousError where the generation is over."""
        return self._generation_state(generation).endpoints.get(key)

    def adopt_membership(self, membership: MembershipView) -> None:
        """Record a generation that was formed, here or before a restart of this actor."""
        if self._latest is None or membership.generation > self._latest.generation:
            self._latest = membership
            self._ranks = {member.process: member.rank for member in membership.members}
            self._generations = {
                generation: state
                for generation, state in self._generations.items()
                if generation >= membership.generation
            }
            self._generation_state(membership.generation).membership = membership
            for process in self._ranks:  # their requests are granted
                self._join_requests.pop(process, None)

    def request_join(self, join_request: JoinRequest) -> MembershipView | RendezvousStatus:
        """Ask to join the next generation. Callers repeat the request; each repetition may form the generation.

        It forms when all survivors have rejoined and the group is full, or when the survivors' limits on both waits have
        passed. Without survivors only a full group forms. A restarted actor does not know of survivors that have not
        called yet: if newcomers alone would fill the group, start them after the survivors have called.
        """
        # 1. A repeated request of a member of the latest generation: answer with it.
        if join_request.previous is not None:
            self.adopt_membership(join_request.previous)
        own = join_request.member
        if self._latest is not None and own.process in self._ranks and not self._survivors():
            survived = -1 if join_request.previous is None else join_request.previous.generation
            if survived < self._latest.generation:  # formed with it, and nobody left it since
                return self._latest
        # 2. Record the request. A member that others report as lost is excluded, even if it calls: they cannot reach it.
        self._join_requests[own.process] = join_request
        self._lost.update((member.process, member) for member in join_request.lost)
        for process in self._lost.keys() & self._join_requests.keys():
            del self._join_requests[process]
        # 3. Waits count from the first survivor's request.
        if not self._survivors():
            self._forming_since = None
        elif self._forming_since is None:
            self._forming_since = time.monotonic()
        # 4. Form the generation if it is complete or the waits are over.
        if self._ready():
            self._form()
            if self._latest is not None and own.process in self._ranks:
                return self._latest
        return RendezvousStatus(
            present=tuple(other.member for other in self._join_requests.values()),
            expected=self._missing(),
            lost=tuple(self._lost.values()),
        )

    def cancel_join(self, member: Member) -> None:
        """Withdraw a request to join the next generation."""
        self._join_requests.pop(member.process, None)

    def _generation_state(self, generation: int) -> _GenerationState:
        if self._latest is not None and generation < self._latest.generation:
            raise RendezvousError(generation, f"it is over: generation {self._latest.generation} was formed")
        return self._generations.setdefault(generation, _GenerationState())

    def _survivors(self) -> dict[int, JoinRequest]:
        """Join requests of members of the latest generation, by their rank in it."""
        return {
            self._ranks[process]: join_request
            for process, join_request in self._join_requests.items()
            if process in self._ranks
        }

    def _missing(self) -> tuple[Member, ...]:
        """Members of the latest generation that have not rejoined and are not known to be lost."""
        members = self._latest.members if self._latest else ()
        return tuple(
            member
            for member in members
            if member.process not in self._join_requests and member.process not in self._lost
        )

    def _ready(self) -> bool:
        """Whether survivors and newcomers are complete, or have been waited for long enough."""
        full = len(self._join_requests) >= self._world_size
        survivors = self._survivors().values()
        if not survivors or self._forming_since is None:
            return full and not self._missing()
        waited_s = time.monotonic() - self._forming_since
        return (not self._missing() or waited_s >= max(one.survivor_wait_s for one in survivors)) and (
            full or waited_s >= max(one.replacement_wait_s for one in survivors)
        )

    def _form(self) -> None:
        """Survivors keep their order, newcomers fill the gaps between; the ranks are then made dense."""
        taken = self._survivors()
        newcomers = [other for process, other in self._join_requests.items() if process not in self._ranks]
        for newcomer in newcomers[: self._world_size - len(taken)]:
            free = [rank for rank in range(self._world_size) if rank not in taken]
            wish = newcomer.member.rank
            taken[wish if wish in free else free[0]] = newcomer
        members = tuple(replace(taken[rank].member, rank=place) for place, rank in enumerate(sorted(taken)))
        generation = 0 if self._latest is None else self._latest.generation + 1
        self._lost.clear()
        self._forming_since = None
        self.adopt_membership(MembershipView(generation=generation, members=members))

    def __repr__(self) -> str:
        latest = (
            "none" if self._latest is None else f"{self._latest.generation} of {len(self._latest.members)}"
        )
        return (
            f"RendezvousActor(world_size={self._world_size}, latest generation={latest}, "
            f"join requests={len(self._join_requests)})"
        )
