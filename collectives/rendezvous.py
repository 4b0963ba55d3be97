"""Rendezvous: members of a group find each other and exchange endpoints, before any data flows."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from collectives.errors import MemberLostError, RendezvousError

if TYPE_CHECKING:  # it imports Member from here
    from collectives.failure_detector import FailureDetector

PROTOCOL = 4
"""Version of the words in shared memory and of messages between members. Increment it with every change of those."""
_FIRST_POLL_S = 0.002
_LAST_POLL_S = 0.1

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One process of a group."""

    rank: int
    hostname: str
    host_id: str
    """Equal for processes that share kernel, process ids and network: see ``host_identity``."""
    pid: int
    address: str
    """IP address at which members on other hosts reach this one."""
    device: str | None = None
    """UUID of its GPU, or another name that is unique on the host; None for a member on the CPU."""
    port: int = 0
    """TCP port of its process's ``FailureDetectorServer`` at ``address``; 0 while it is unknown."""
    protocol: int = PROTOCOL
    """Protocol version of its rayagi."""

    @property
    def process(self) -> tuple[str, int]:
        """Identifies its process across ranks and generations."""
        return self.host_id, self.pid

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.hostname})"


def other_members(members: Sequence[Member], index: int) -> tuple[Member, ...]:
    """All members but the one at this index."""
    return tuple(member for place, member in enumerate(members) if place != index)


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousStatus:
    """Current state of a rendezvous."""

    present: tuple[Member, ...]
    """Members that have registered, by rank."""
    lost: tuple[Member, ...]
    """Members reported as lost."""
    expected: tuple[Member, ...] = ()
    """Members that belong to the generation and have not registered, as far as they are known."""


class Rendezvous(Protocol):
    """Rendezvous service, such as ``actors.rendezvous_actor.RendezvousActor``, directly or as a Ray actor.

    Every call is idempotent. Callers repeat calls after the service may have restarted.
    """

    def register(self, generation: int, member: Member) -> RendezvousStatus:
        """Register a member; returns the current status.

        Raises:
            RendezvousError: its rank is taken or out of range, or the generation is over.
        """

    def report(self, generation: int, lost: tuple[Member, ...]) -> None:
        """Report lost members: all present and later members of the generation learn it."""

    def publish(self, generation: int, key: str, endpoint: str) -> None:
        """Publish the endpoint of a transport. ``key`` is unique in a generation, e.g. one per step and group.

        Raises:
            RendezvousError: another endpoint was published under this key before.
        """

    def endpoint(self, generation: int, key: str) -> str | None:
        """What was published under ``key``; None until then."""


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
    """Register ``failure_detector.me`` and wait until all ``world_size`` members have. They are watched from then on.

    Raises:
        RendezvousError: wrong or duplicate rank, members of different versions, or a member did not come within
            ``timeout_s``.
        MemberLostError: a present or expected member is lost while others are awaited.
    """
    begin = time.monotonic()
    status = RendezvousStatus(present=(), lost=())

    def all_present() -> tuple[Member, ...] | None:
        nonlocal status
        status = rendezvous.register(generation, failure_detector.me)
        _refuse_versions(generation, status.present)
        failure_detector.watch((*status.present, *status.expected))
        if len(status.present) == world_size:
            return status.present
        waited_s, step = time.monotonic() - begin, f"generation {generation}"
        if failure_detector.lost():
            rendezvous.report(generation, failure_detector.lost())
        failure_detector.check("rendezvous", step, waited_s)
        if status.lost:
            raise MemberLostError("rendezvous", failure_detector.me.rank, status.lost, waited_s, step)
        return None

    members = poll(all_present, timeout_s)
    if members is None:
        missing = sorted(set(range(world_size)) - {member.rank for member in status.present})
        raise RendezvousError(
            generation,
            f"ranks {missing} of {world_size} did not come within {timeout_s:.1f} s; "
            f"present: {', '.join(map(str, status.present))}",
        )
    return members


def _refuse_versions(generation: int, members: Sequence[Member]) -> None:
    """Raise if protocol versions differ: members would misread each other's words. All present members raise."""
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
    """Wait for the endpoint that ``host`` publishes under ``key``.

    Raises:
        RendezvousError: nothing was published within ``timeout_s``.
        MemberLostError: a member is lost, so the generation cannot form.
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
    """Call ``ask`` at growing intervals until it returns something; None after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_POLL_S
    while True:
        found = ask()
        if found is not None or time.monotonic() >= deadline:
            return found
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_POLL_S)
