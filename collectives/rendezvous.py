"""How members of a group find each other, before any data flows."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from collectives.errors import RendezvousError

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
    """There, the TCP port of its ``Liveness``; 0 where it has none yet."""

    @property
    def process(self) -> tuple[str, int]:
        """What tells its process from all others, in whatever rank and generation."""
        return self.host_id, self.pid

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.hostname})"


class Rendezvous(Protocol):
    """Where members meet. ``actors.collective.Collective`` is one; a Ray actor may stand between."""

    def register(self, generation: int, member: Member) -> None:
        """Say that a member is here.

        Raises:
            RendezvousError: its rank is taken or out of range.
        """
        ...

    def members(self, generation: int) -> tuple[Member, ...]:
        """Who is here, by rank; complete when it counts world_size."""
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


def meet(
    rendezvous: Rendezvous, me: Member, *, world_size: int, generation: int, timeout_s: float
) -> tuple[Member, ...]:
    """Register and wait until all ``world_size`` members are here.

    Raises:
        RendezvousError: wrong or duplicate rank, or someone did not come within ``timeout_s``.
    """
    rendezvous.register(generation, me)

    def all_here() -> tuple[Member, ...] | None:
        members = rendezvous.members(generation)
        return members if len(members) == world_size else None

    members = poll(all_here, timeout_s)
    if members is None:
        here = rendezvous.members(generation)
        missing = sorted(set(range(world_size)) - {member.rank for member in here})
        raise RendezvousError(
            generation,
            f"ranks {missing} of {world_size} did not come within {timeout_s:.1f} s; "
            f"here are {', '.join(map(str, here))}",
        )
    return members


def await_endpoint(
    rendezvous: Rendezvous, *, host: Member, generation: int, key: str, timeout_s: float
) -> str:
    """What ``host`` published under ``key``.

    Raises:
        RendezvousError: nothing within ``timeout_s``.
    """
    endpoint = poll(lambda: rendezvous.endpoint(generation, key), timeout_s)
    if endpoint is None:
        raise RendezvousError(generation, f"{host} published no endpoint {key!r} within {timeout_s:.1f} s")
    return endpoint


def poll(look: Callable[[], Found | None], timeout_s: float) -> Found | None:
    """Call ``look`` at growing intervals until it finds something; None after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_POLL_S
    while True:
        found = look()
        if found is not None or time.monotonic() >= deadline:
            return found
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_POLL_S)
