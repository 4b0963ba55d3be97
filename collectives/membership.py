"""Who belongs to the next generation: after a death the survivors, with a replacement if one comes in time.

::

    roster = join(rendezvous, this_member(rank), timeout_s=60)
    while True:
        me = roster.place_of(this_member(0))
        try:
            with connect(rendezvous, me, world_size=len(roster.members), generation=roster.generation, ...) as group:
                return train(group)
        except CommunicatorError as error:
            roster = rejoin(rendezvous, me, roster, lost=getattr(error, "lost", ()), ...)
"""

from __future__ import annotations

import time

from collectives.errors import RendezvousError
from collectives.liveness import Liveness
from collectives.rendezvous import Candidacy, Member, Rendezvous, Roster, poll

_ANSWER_S = 30.0
"""For the next generation to be told once it is due."""


def join(rendezvous: Rendezvous, me: Member, *, timeout_s: float) -> Roster:
    """Become a member: of the first generation, which forms when it is full, or of the one that follows a loss.

    ``me.rank`` is the wanted rank; it is given if it is free. A newcomer that the present generation has no room for waits.

    Raises:
        RendezvousError: no generation with this process in it was formed within ``timeout_s``.
    """
    candidacy = Candidacy(member=me, previous=None, lost=(), survivor_wait_s=0.0, replacement_wait_s=0.0)
    return _enlist(rendezvous, candidacy, timeout_s)


def rejoin(
    rendezvous: Rendezvous,
    me: Member,
    previous: Roster,
    *,
    lost: tuple[Member, ...] = (),
    replacement_wait_s: float,
    timeout_s: float,
) -> Roster:
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
    candidacy = Candidacy(
        member=me,
        previous=previous,
        lost=lost,
        survivor_wait_s=timeout_s,
        replacement_wait_s=replacement_wait_s,
    )
    return _enlist(rendezvous, candidacy, max(timeout_s, replacement_wait_s) + _ANSWER_S)


def _enlist(rendezvous: Rendezvous, candidacy: Candidacy, timeout_s: float) -> Roster:
    """Say it until there is a roster. Meanwhile candidates look after each other, and after those who are awaited."""
    begin = time.monotonic()
    waiting_for = ""
    with Liveness(candidacy.member) as liveness:

        def formed() -> Roster | None:
            nonlocal waiting_for
            lost = {member.process: member for member in (*candidacy.lost, *liveness.lost())}
            answer = rendezvous.enlist(
                Candidacy(
                    member=liveness.me,
                    previous=candidacy.previous,
                    lost=tuple(lost.values()),
                    survivor_wait_s=candidacy.survivor_wait_s,
                    replacement_wait_s=candidacy.replacement_wait_s,
                )
            )
            if isinstance(answer, Roster):
                return answer
            liveness.watch((*answer.present, *answer.expected))
            here = ", ".join(map(str, answer.present))
            awaited = ", ".join(map(str, answer.expected)) or "newcomers"
            waiting_for = f"here are {here}; awaited are {awaited}"
            return None

        roster = None
        try:
            roster = poll(formed, timeout_s)
        finally:
            if roster is None:
                rendezvous.withdraw(candidacy.member)
    if roster is None:
        generation = 0 if candidacy.previous is None else candidacy.previous.generation + 1
        waited_s = time.monotonic() - begin
        raise RendezvousError(
            generation, f"{candidacy.member} waited {waited_s:.1f} s for it to form; {waiting_for}"
        )
    return roster
