"""The collective actor: where members meet and agree on the next generation. No gradient ever passes through it.

It is also the directory: where each GMI takes experience and shows parameters. It can die and come back: what it knows,
its callers say again (``collectives.rendezvous``). Only waits begin anew.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from collectives.errors import RendezvousError
from collectives.rendezvous import JoinRequest, Member, MembershipView, RendezvousStatus

Process = tuple[str, int]


@dataclass(slots=True)
class _GenerationState:
    """Of one generation."""

    membership: MembershipView | None = None
    """Who belongs to it, where it was formed here; without, who comes first to a rank has it."""
    present: dict[int, Member] = field(default_factory=dict)
    lost: dict[Process, Member] = field(default_factory=dict)
    endpoints: dict[str, str] = field(default_factory=dict)


class RendezvousActor:
    """Rendezvous of up to ``world_size`` members, once per generation: a group that forms anew takes the next number."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._generations: dict[int, _GenerationState] = {}
        self._latest: MembershipView | None = None
        self._ranks: dict[Process, int] = {}
        """In the latest generation."""
        self._join_requests: dict[Process, JoinRequest] = {}
        """By when they came."""
        self._lost: dict[Process, Member] = {}
        self._forming_since: float | None = None
        self._announced: dict[str, tuple[int, str]] = {}
        """By key: the incarnation, and what it said."""

    def announce(self, key: str, value: str, incarnation: int = 0) -> None:
        """Say ``value`` under ``key``, until a later incarnation of who says it says something else."""
        if incarnation >= self._announced.get(key, (incarnation, ""))[0]:
            self._announced[key] = incarnation, value

    def announced(self, prefix: str) -> dict[str, str]:
        """What was said last under each key that begins with ``prefix``."""
        return {key: value for key, (_, value) in sorted(self._announced.items()) if key.startswith(prefix)}

    def register(self, generation: int, member: Member) -> RendezvousStatus:
        """Say that a member is here; a member may repeat itself.

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
            earlier = " when it met here before" if present.process == member.process else ""
            raise RendezvousError(
                generation, f"{member} came, but this rank is already taken by {present}{earlier}"
            )
        return RendezvousStatus(
            present=tuple(state.present[rank] for rank in sorted(state.present)),
            expected=tuple(other for other in members if other.rank not in state.present),
            lost=tuple(state.lost.values()),
        )

    def report(self, generation: int, lost: tuple[Member, ...]) -> None:
        """Say that members of a meeting are gone."""
        self._generation_state(generation).lost.update((member.process, member) for member in lost)

    def publish(self, generation: int, key: str, endpoint: str) -> None:
        """Say where a data path begins, or any other text that a generation shares: its plan, say.

        Raises:
            RendezvousError: something else was published under this key before, or the generation is over.
        """
        present = self._generation_state(generation).endpoints.setdefault(key, endpoint)
        if present != endpoint:
            raise RendezvousError(
                generation, f"endpoint {key!r} {endpoint} came, but {present} was published before"
            )

    def endpoint(self, generation: int, key: str) -> str | None:
        """What was published under ``key``; None until then.

        Raises:
            RendezvousError: the generation is over.
        """
        return self._generation_state(generation).endpoints.get(key)

    def adopt_membership(self, membership: MembershipView) -> None:
        """Hear of a generation that was formed: here, or before this actor died and came back."""
        if self._latest is None or membership.generation > self._latest.generation:
            self._latest = membership
            self._ranks = {member.process: member.rank for member in membership.members}
            self._generations = {
                generation: state
                for generation, state in self._generations.items()
                if generation >= membership.generation
            }
            self._generation_state(membership.generation).membership = membership
            for process in self._ranks:  # they wanted it before they were told
                self._join_requests.pop(process, None)

    def request_join(self, join_request: JoinRequest) -> MembershipView | RendezvousStatus:
        """Want to belong to the next generation. Repeated until it is formed; each repetition may form it.

        It is formed when all survivors are here and newcomers fill the group, or when as many seconds as the
        survivors are willing to wait for either have passed. Without a survivor only a full group is formed. An actor
        that came back does not know of survivors that have not called yet: where newcomers alone would fill the
        group, they are to be started after the survivors called.
        """
        if join_request.previous is not None:
            self.adopt_membership(join_request.previous)
        own = join_request.member
        if self._latest is not None and own.process in self._ranks and not self._survivors():
            survived = -1 if join_request.previous is None else join_request.previous.generation
            if survived < self._latest.generation:  # formed with it, and nobody left it since
                return self._latest
        self._join_requests[own.process] = join_request
        self._lost.update((member.process, member) for member in join_request.lost)
        for process in self._lost.keys() & self._join_requests.keys():
            del self._join_requests[
                process
            ]  # the caller too: those to whom it is lost could not connect to it
        if not self._survivors():
            self._forming_since = None
        elif self._forming_since is None:
            self._forming_since = time.monotonic()
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
        """No longer want to belong to the next generation."""
        self._join_requests.pop(member.process, None)

    def _generation_state(self, generation: int) -> _GenerationState:
        if self._latest is not None and generation < self._latest.generation:
            raise RendezvousError(generation, f"it is over: generation {self._latest.generation} was formed")
        return self._generations.setdefault(generation, _GenerationState())

    def _survivors(self) -> dict[int, JoinRequest]:
        """Candidates of the latest generation, by their rank in it."""
        return {
            self._ranks[process]: join_request
            for process, join_request in self._join_requests.items()
            if process in self._ranks
        }

    def _missing(self) -> tuple[Member, ...]:
        """Members of the latest generation that neither came nor are known to be gone."""
        members = self._latest.members if self._latest else ()
        return tuple(
            member
            for member in members
            if member.process not in self._join_requests and member.process not in self._lost
        )

    def _ready(self) -> bool:
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
