"""Connects members through shared memory, if all of them can map the first member's."""

from __future__ import annotations

import os

from collectives.errors import CommunicatorError
from collectives.shared_words import unsupported_reason
from collectives.transports.base import TransportGroup
from collectives.transports.shm.memory import Segment
from collectives.transports.shm.transport import SharedMemoryTransport

_MAPPED = "mapped"
"""Published by a member that mapped the first member's memory; otherwise it publishes the reason."""


def connect(group: TransportGroup) -> SharedMemoryTransport | str:
    """Map the first member's memory, or return which members cannot.

    A process may open another's memory only if the kernel lets it trace that process: not if it belongs to another user,
    or to another PID namespace.
    """
    if reason := unsupported_reason():
        return reason
    segment, refusals = map_first_members_segment(group)
    if segment is not None and not refusals:
        return SharedMemoryTransport(segment, group.members, group.rank, group.timeout_s, group.check)
    if segment is not None:
        segment.close()
    return f"members cannot share memory: {'; '.join(refusals)}; run them as one user in one PID namespace"


def map_first_members_segment(group: TransportGroup) -> tuple[Segment | None, list[str]]:
    """The first member's memory (None if this member cannot map it), and all members' refusals, equal on all."""
    members, rank, segment = group.members, group.rank, None
    try:
        if rank == 0:
            segment = Segment.host(len(members))
            group.publish(group.key, segment.endpoint)
        else:
            segment, refusal = _attach(group.published(members[0], group.key), group)
            group.publish(f"{group.key} mapped by {rank}", refusal or _MAPPED)
        answers = [
            group.published(member, f"{group.key} mapped by {other}")
            for other, member in enumerate(members)
            if other > 0
        ]
    except BaseException:
        if segment is not None:
            segment.close()
        raise
    return segment, [answer for answer in answers if answer != _MAPPED]


def _attach(endpoint: str, group: TransportGroup) -> tuple[Segment | None, str]:
    """The first member's memory; or None and the reason why this process cannot map it."""
    try:
        return Segment.attach(endpoint, len(group.members), group.rank), ""
    except CommunicatorError as error:
        if not isinstance(error.__cause__, OSError):  # of another version or size
            raise
        who = f"rank {group.members[group.rank].rank} (pid {os.getpid()}, user {os.geteuid()})"
        return None, f"{who} {error.detail}"
