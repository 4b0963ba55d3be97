"""Membership changes: forms the next generation of a group after a loss, of survivors and replacements.

::

    view = join(rendezvous, this_member(rank), timeout_s=60)
    while True:
        me = view.find_member(this_member(0))
        try:
            with connect(rendezvous, me, world_size=len(view.members), generation=view.generation, ...) as group:
                return train(group)
        except CommunicatorError as error:
            view = rejoin(rendezvous, me, view, lost=getattr(error, "lost", ()), ...)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from actors.rendezvous_actor import Process, RendezvousActor, _GenerationState
from collectives.errors import RendezvousError
from collectives.failure_detector import FailureDetector
from collectives.rendezvous import Member, RendezvousStatus, poll

_ANSWER_S = 30.0
"""How long the rendezvous may take to answer after the longest wait of a generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipView:
    """The members of a generation, by rank."""

    generation: int
    members: tuple[Member, ...]

    def find_member(self, process: Member) -> Member | None:
        """The entry of this process, whatever its rank; None if it is no member."""
        return next((member for member in self.members if member.process == process.process), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """Request of a process to join the next generation. Each repetition is complete, so the rendezvous keeps no state."""

    member: Member
    """A newcomer prefers its rank; a survivor keeps it."""
    previous: MembershipView | None
    """The generation that it survived; None for a newcomer."""
    lost: tuple[Member, ...]
    """Members that it knows to be lost."""
    survivor_wait_s: float
    """How long to wait for members that neither rejoin nor are known to be lost."""
    replacement_wait_s: float
    """How long to wait for newcomers while the group is not full."""


class ElasticRendezvous(RendezvousActor):
    """A rendezvous whose members agree on the next generation. A group that re-forms takes that.

    All its state is restored by its callers after a restart; only wait times start again from zero.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._latest: MembershipView | None = None
        self._ranks: dict[Process, int] = {}
        """Ranks in the latest generation."""
        self._join_requests: dict[Process, JoinRequest] = {}
        """In order of arrival."""
        self._lost: dict[Process, Member] = {}
        self._forming_since: float | None = None

    def register(self, generation: int, member: Member) -> RendezvousStatus:
        """Register a member of a generation that was formed, or of any if none was."""
        self._generation_state(generation)  # it is not over
        is_formed = self._latest is not None and self._latest.generation == generation
        members = self._latest.members if self._latest is not None and is_formed else ()
        if members and (
            not 0 <= member.rank < len(members) or members[member.rank].process != member.process
        ):
            raise RendezvousError(
                generation, f"{member} does not belong: it was formed of {', '.join(map(str, members))}"
            )
        status = super().register(generation, member)
        present = {other.rank for other in status.present}
        return replace(status, expected=tuple(other for other in members if other.rank not in present))

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
        return super()._generation_state(generation)

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


def join(rendezvous: ElasticRendezvous, me: Member, *, timeout_s: float) -> MembershipView:
    """Join as a newcomer: the first generation, which forms when it is full, or the one after a loss.

    ``me.rank`` is the preferred rank, granted if it is free. While the current generation is full, a newcomer waits.

    Raises:
        RendezvousError: no generation with this process in it was formed within ``timeout_s``.
    """
    join_request = JoinRequest(member=me, previous=None, lost=(), survivor_wait_s=0.0, replacement_wait_s=0.0)
    return _request_until_formed(rendezvous, join_request, timeout_s)


def rejoin(
    rendezvous: ElasticRendezvous,
    me: Member,
    previous: MembershipView,
    *,
    lost: tuple[Member, ...] = (),
    replacement_wait_s: float,
    timeout_s: float,
) -> MembershipView:
    """Form the next generation with the other survivors of ``previous``, whose communicator is closed.

    Survivors keep their order. A newcomer takes the rank of a lost member; without newcomers ranks are made dense.

    Args:
        rendezvous: that of the previous generation
        me: this process as a member of ``previous``
        previous: the generation that lost a member
        lost: members known to be lost; those of this host are detected anyway
        replacement_wait_s: how long to wait for newcomers while the group is not full
        timeout_s: how long to wait for members that neither rejoin nor are known to be lost; they are then left out, and
            join later as newcomers

    Raises:
        RendezvousError: the rendezvous formed none in these times.
    """
    join_request = JoinRequest(
        member=me,
        previous=previous,
        lost=lost,
        survivor_wait_s=timeout_s,
        replacement_wait_s=replacement_wait_s,
    )
    return _request_until_formed(rendezvous, join_request, max(timeout_s, replacement_wait_s) + _ANSWER_S)


def _request_until_formed(
    rendezvous: ElasticRendezvous, join_request: JoinRequest, timeout_s: float
) -> MembershipView:
    """Repeat the request until a generation is formed. Meanwhile watch the other applicants and the expected members."""
    begin = time.monotonic()
    waiting_for = ""
    with FailureDetector(join_request.member) as failure_detector:

        def formed() -> MembershipView | None:
            nonlocal waiting_for
            lost = {member.process: member for member in (*join_request.lost, *failure_detector.lost())}
            answer = rendezvous.request_join(
                JoinRequest(
                    member=failure_detector.me,
                    previous=join_request.previous,
                    lost=tuple(lost.values()),
                    survivor_wait_s=join_request.survivor_wait_s,
                    replacement_wait_s=join_request.replacement_wait_s,
                )
            )
            if isinstance(answer, MembershipView):
                return answer
            failure_detector.watch((*answer.present, *answer.expected))
            present = ", ".join(map(str, answer.present))
            expected = ", ".join(map(str, answer.expected)) or "newcomers"
            waiting_for = f"present: {present}; expected: {expected}"
            return None

        membership = None
        try:
            membership = poll(formed, timeout_s)
        finally:
            if membership is None:
                rendezvous.cancel_join(join_request.member)
    if membership is None:
        generation = 0 if join_request.previous is None else join_request.previous.generation + 1
        waited_s = time.monotonic() - begin
        raise RendezvousError(
            generation, f"{join_request.member} waited {waited_s:.1f} s for it to form; {waiting_for}"
        )
    return membership
