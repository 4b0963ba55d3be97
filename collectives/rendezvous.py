"""How members of a group find each other, before any data flows."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from collectives.errors import MemberLostError, RendezvousError

if TYPE_CHECKING:  # which watches members
    from collectives.failure_detector import FailureDetector

PROTOCOL = 3
"""Version of what members of a group share: words in shared memory, messages. Raise it with every change of those."""
_FIRST_POLL_S = 0.002
_LAST_POLL_S = 0.1

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One process of a group."""

    rank: int
    hostname: str
    host_id: str
    """Equal for processes that share memory, process ids and network: see ``host_identity``."""
    pid: int
    address: str
    """IP address at which members on other hosts reach this one."""
    device: str | None = None
    """UUID of its GPU, or another name that is its own on the host; None for a member that works on the CPU."""
    port: int = 0
    """There, the TCP port of its process's ``FailureDetectorServer``; 0 where it is not known yet."""
    protocol: int = PROTOCOL
    """Version of what its rayagi shares with other members."""

    @property
    def process(self) -> tuple[str, int]:
        """What tells its process from all others, in whatever rank and generation."""
        return self.host_id, self.pid

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.hostname})"


def other_members(members: Sequence[Member], index: int) -> tuple[Member, ...]:
    """All but the one at this place."""
    return tuple(member for place, member in enumerate(members) if place != index)


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousStatus:
    """A gathering of members as it stands."""

    present: tuple[Member, ...]
    """Who is here, by rank."""
    expected: tuple[Member, ...]
    """Who belongs to it and has not come, as far as that is known."""
    lost: tuple[Member, ...]
    """Who was found to be gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipView:
    """Who belongs to a generation, by rank."""

    generation: int
    members: tuple[Member, ...]

    def find_member(self, process: Member) -> Member | None:
        """The member that a process is in this generation, in whatever rank it comes; None if it does not belong."""
        return next((member for member in self.members if member.process == process.process), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """All that a process says which wants to belong to the next generation. Said each time: nobody has to remember it."""

    member: Member
    """Its rank is the one that a newcomer would like; a survivor keeps its own."""
    previous: MembershipView | None
    """What it survived; None for a newcomer."""
    lost: tuple[Member, ...]
    """Who it knows to be gone."""
    survivor_wait_s: float
    """How long to wait for survivors that do not come and are not known to be gone."""
    replacement_wait_s: float
    """How long to wait for newcomers while the group is not full."""


class Rendezvous(Protocol):
    """Where members meet. ``actors.rendezvous_actor.RendezvousActor`` is one; a Ray actor may stand between.

    Every call may be repeated, and is where it may have been forgotten.
    """

    def register(self, generation: int, member: Member) -> RendezvousStatus:
        """Say that a member is here, and see who else is.

        Raises:
            RendezvousError: its rank is taken or out of range, or the generation is over.
        """
        ...

    def report(self, generation: int, lost: tuple[Member, ...]) -> None:
        """Say that members of a meeting are gone: whoever is or comes here learns it."""
        ...

    def publish(self, generation: int, key: str, endpoint: str) -> None:
        """Say where a data path begins. ``key`` tells it from a generation's others, e.g. one per step and group.

        Raises:
            RendezvousError: another endpoint was published under this key before.
        """
        ...

    def endpoint(self, generation: int, key: str) -> str | None:
        """What was published under ``key``; None until then."""
        ...

    def request_join(self, join_request: JoinRequest) -> MembershipView | RendezvousStatus:
        """Want to belong to the next generation: its roster once it is formed, else who is here and who is awaited."""
        ...

    def cancel_join(self, member: Member) -> None:
        """No longer want to."""
        ...


def host_identity() -> str:
    """Equal in two processes exactly when they share a kernel, process ids and a network.

    A host name alone is not enough: containers of one host may share none of these, and names repeat.
    """
    parts = [socket.gethostname()]
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    parts.append(boot_id.read_text().strip() if boot_id.exists() else "")
    for namespace in ("pid", "net"):
        link = Path("/proc/self/ns") / namespace
        parts.append(os.readlink(link) if link.is_symlink() else "")
    return "/".join(parts)


def this_member(rank: int, address: str = "127.0.0.1", device: str | None = None) -> Member:
    """The calling process as a member."""
    return Member(
        rank=rank,
        hostname=socket.gethostname(),
        host_id=host_identity(),
        pid=os.getpid(),
        address=address,
        device=device,
    )


def gather_members(
    rendezvous: Rendezvous,
    failure_detector: FailureDetector,
    *,
    world_size: int,
    generation: int,
    timeout_s: float,
) -> tuple[Member, ...]:
    """Register ``failure_detector.me`` and wait until all ``world_size`` members have come. From then on they are watched.

    Raises:
        RendezvousError: wrong or duplicate rank, members of different versions, or someone did not come within
            ``timeout_s``.
        CommunicatorError: someone came, or was to come, and is gone (MemberLostError) or left, while others are awaited.
    """
    begin = time.monotonic()
    status = RendezvousStatus(present=(), expected=(), lost=())

    def all_here() -> tuple[Member, ...] | None:
        nonlocal status
        status = rendezvous.register(generation, failure_detector.me)
        _refuse_versions(generation, status.present)
        failure_detector.watch((*status.present, *status.expected))
        if len(status.present) == world_size:
            return status.present
        waited_s, step = time.monotonic() - begin, f"generation {generation}"
        if failure_detector.lost():
            rendezvous.report(generation, failure_detector.lost())
        failure_detector.check("meeting", step, waited_s)
        if status.lost:
            raise MemberLostError("meeting", failure_detector.me.rank, status.lost, waited_s, step)
        return None

    members = poll(all_here, timeout_s)
    if members is None:
        missing = sorted(set(range(world_size)) - {member.rank for member in status.present})
        raise RendezvousError(
            generation,
            f"ranks {missing} of {world_size} did not come within {timeout_s:.1f} s; "
            f"here are {', '.join(map(str, status.present))}",
        )
    return members


def _refuse_versions(generation: int, members: Sequence[Member]) -> None:
    """Members of different protocols would misread each other's words. Whoever is here sees it, on either side."""
    for member in members:
        if member.protocol != members[0].protocol:
            raise RendezvousError(
                generation,
                f"{members[0]} has version {members[0].protocol} of rayagi's protocol, and {member} has "
                f"version {member.protocol}; install the same rayagi for all members",
            )


def await_endpoint(
    rendezvous: Rendezvous,
    failure_detector: FailureDetector,
    *,
    host: Member,
    generation: int,
    key: str,
    timeout_s: float,
) -> str:
    """What ``host`` published under ``key``.

    Raises:
        RendezvousError: nothing within ``timeout_s``.
        MemberLostError: someone is gone: the generation will not come about.
    """
    begin = time.monotonic()

    def published() -> str | None:
        endpoint = rendezvous.endpoint(generation, key)
        if endpoint is None:
            failure_detector.check(
                "connect", f"waiting for endpoint {key!r} of {host}", time.monotonic() - begin
            )
        return endpoint

    endpoint = poll(published, timeout_s)
    if endpoint is None:
        raise RendezvousError(generation, f"{host} published no endpoint {key!r} within {timeout_s:.1f} s")
    return endpoint


def poll(ask: Callable[[], Found | None], timeout_s: float) -> Found | None:
    """Call ``ask`` at growing intervals until it finds something; None after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_POLL_S
    while True:
        found = ask()
        if found is not None or time.monotonic() >= deadline:
            return found
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_POLL_S)
