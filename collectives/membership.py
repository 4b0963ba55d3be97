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

from collectives.errors import RendezvousError
from collectives.failure_detector import FailureDetector
from collectives.rendezvous import JoinRequest, Member, MembershipView, Rendezvous, poll

_ANSWER_S = 30.0
"""How long the rendezvous may take to answer after the longest wait of a generation."""


def join(rendezvous: Rendezvous, me: Member, *, timeout_s: float) -> MembershipView:
    """Join as a newcomer: the first generation, which forms when it is full, or the one after a loss.

    ``me.rank`` is the preferred rank, granted if it is free. While the current generation is full, a newcomer waits.

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
    rendezvous: Rendezvous, join_request: JoinRequest, timeout_s: float
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
