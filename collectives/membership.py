"""Who belongs to the next generation: after a death the survivors, with a replacement if one comes in time.

::

    roster = join(rendezvous, this_member(rank), timeout_s=60)
    while True:
        me = roster.find_member(this_member(0))
        try:
            with connect(rendezvous, me, world_size=len(roster.members), generation=roster.generation, ...) as group:
                return train(group)
        except CommunicatorError as error:
            roster = rejoin(rendezvous, me, roster, lost=getattr(error, "lost", ()), ...)
"""

from __future__ import annotations

import time

from collectives.errors import RendezvousError
from collectives.failure_detector import FailureDetector
from collectives.rendezvous import JoinRequest, Member, MembershipView, Rendezvous, poll

_ANSWER_S = 30.0
"""For the next generation to be told once it is due."""


def join(rendezvous: Rendezvous, me: Member, *, timeout_s: float) -> MembershipView:
    """Become a member: of the first generation, which forms when it is full, or of the one that follows a loss.

    ``me.rank`` is the wanted rank; it is given if it is free. A newcomer that the present generation has no room for waits.

    Raises:
        RendezvousError: no generation with this process in it was formed within ``timeout_s``.
    """
    join_request = JoinRequest(member=me, previous=None, lost=(), survivor_wait_s=0.0, replacement_wait_s=0.0)
    return _request_until_formed(rendezvous, join_request, timeout_s)


def rejoin(
    rendezvous: Rendezvous,
    me: Member,
    previous: MembershipView,
    *,
    lost: tuple[Member, ...] = (),
    replacement_wait_s: float,
    timeout_s: float,
) -> MembershipView:
    """Form the next generation with the other survivors of ``previous``, whose communicator is closed.

    Survivors keep their order. A newcomer takes a lost one's rank; without, ranks are made dense.

    Args:
        rendezvous: where the previous generation met
        me: this process as a member of ``previous``
        previous: the generation that lost someone
        lost: who is known to be gone; members of this host are looked after anyway
        replacement_wait_s: how long to wait while the group is not full
        timeout_s: how long to wait for survivors that neither come nor are known to be gone; those are left out then,
            and become newcomers when they come

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
    rendezvous: Rendezvous, join_request: JoinRequest, timeout_s: float
) -> MembershipView:
    """Say it until there is a roster. Meanwhile candidates look after each other, and after those who are awaited."""
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
            here = ", ".join(map(str, answer.present))
            awaited = ", ".join(map(str, answer.expected)) or "newcomers"
            waiting_for = f"here are {here}; awaited are {awaited}"
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
