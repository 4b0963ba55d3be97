"""A member that is killed, or that survives and says how: one process of the chaos experiment."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from collectives.communicator import Communicator
from collectives.connect import connect
from collectives.errors import CommunicatorError, MemberLostError, RendezvousError
from collectives.failure_detector_server import get_failure_detector_server
from collectives.rendezvous import Member, poll, this_member
from collectives.transport_factory import TransportName
from collectives.transports.gloo import GlooStore
from experiments.allreduce.membership import MembershipView, join, rejoin

NUMEL = 100_003
"""Elements of a reduction: odd, and several chunks of shared memory."""
COMPUTE_S = 0.3
_ADDRESS = "127.0.0.1"
_SETTLE_S = 8.0
"""For threads of a closed communicator to end, and a constructor of Gloo's that was given up while it connected."""

Action = Literal["reduce", "compute", "group"]


@dataclass(frozen=True)
class Settings:
    """What a member is started with."""

    rank: int
    world_size: int
    host: int
    """Members of different numbers take each other for processes of different hosts."""
    transport: TransportName
    timeout_s: float
    """Of operations and meetings: far more than a loss may take to be noticed."""


@dataclass(frozen=True)
class Order:
    """What a member does until something is lost, and how long it then waits for a replacement."""

    action: Action
    replacement_wait_s: float


@dataclass(frozen=True)
class Connected:
    """It belongs to a generation in which a reduction gave the right result."""

    came: float
    """When it asked for the generation."""
    at: float
    generation: int
    rank: int
    pids: tuple[int, ...]
    """Of all members, by rank."""


@dataclass(frozen=True)
class Noticed:
    """An operation or a meeting, begun at ``began``, raised."""

    began: float
    at: float
    closed: float
    """When the communicator was closed afterwards."""
    text: str
    lost_pids: tuple[int, ...]
    left_behind: str
    """What remained after closing: mappings, descriptors, threads; empty when all is as it was."""


def live(rendezvous: Any, settings: Settings, pipe: Any) -> None:
    """Belong to one generation after the other: say each event, take an order when connected, until that is None."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)  # asked where it is, when it does not get on
    _ChaosMember(rendezvous, settings, pipe).live()


class _ChaosMember:
    def __init__(self, rendezvous: Any, settings: Settings, pipe: Any) -> None:
        self._rendezvous, self._settings, self._pipe = rendezvous, settings, pipe
        member = this_member(settings.rank, _ADDRESS)
        self._me = replace(member, host_id=f"{member.host_id}/{settings.host}")
        self._order: Order | None = Order("reduce", settings.timeout_s)
        self._came = self._began = time.monotonic()
        self._clean: Counter[str] = Counter()

    def live(self) -> None:
        timeout_s = self._settings.timeout_s
        membership = join(self._rendezvous, self._me, timeout_s=timeout_s)
        GlooStore.host([self._me], timeout_s)  # the first of a process opens a pipe for good
        self._clean = _resources()  # with that, and the connection to the rendezvous
        while self._order is not None:
            lost = self._belong(membership)
            if self._order is not None:
                self._came = time.monotonic()
                membership = rejoin(
                    self._rendezvous,
                    _place(membership, self._me),
                    membership,
                    lost=lost,
                    replacement_wait_s=self._order.replacement_wait_s,
                    timeout_s=timeout_s,
                )

    def _belong(self, membership: MembershipView) -> tuple[Member, ...]:
        """One generation from its meeting to its end; who was lost."""
        communicator = None
        try:
            self._began = time.monotonic()
            communicator = connect(
                self._rendezvous,
                _place(membership, self._me),
                world_size=len(membership.members),
                timeout_s=self._settings.timeout_s,
                transport=self._settings.transport,
                generation=membership.generation,
            )
            self._take_part(communicator, membership)
            communicator.close()
            return ()
        except (CommunicatorError, RendezvousError) as error:
            at, text = time.monotonic(), f"{type(error).__name__}: {error}"
            lost = error.lost if isinstance(error, MemberLostError) else ()
        # Here, where the error is gone: its traceback held the communicator.
        if communicator is not None:
            communicator.close()
        closed = time.monotonic()
        del communicator
        pids = tuple(member.pid for member in lost)
        self._pipe.send(Noticed(self._began, at, closed, text, pids, _left_behind(self._clean)))
        return lost

    def _take_part(self, communicator: Communicator, membership: MembershipView) -> None:
        """Reduce, say so, and do as ordered; returns when that is to end."""
        self._check(communicator)
        self._pipe.send(
            Connected(
                came=self._came,
                at=time.monotonic(),
                generation=membership.generation,
                rank=communicator.rank,
                pids=tuple(member.pid for member in membership.members),
            )
        )
        self._order = self._pipe.recv()
        if self._order is not None:
            self._work(communicator, self._order.action)

    def _work(self, communicator: Communicator, action: Action) -> None:
        """Until an operation raises."""
        tensor = torch.zeros(NUMEL)
        if action == "compute":
            for _ in range(3):
                communicator.all_reduce(tensor)
            begin = time.monotonic()
            while time.monotonic() - begin < COMPUTE_S:  # as a simulator: without a look at the others
                pass
        parts = [communicator] if action != "group" else [*self._groups(communicator), communicator]
        while True:  # the last is always the whole: who shares no group with the victim notices there
            for part in parts:
                self._began = time.monotonic()
                part.all_reduce(tensor)

    def _groups(self, communicator: Communicator) -> list[Communicator]:
        """Those of neighbours, last first, and of every other one that this member belongs to, several times each."""
        ranks = range(communicator.world_size)
        middle = len(ranks) // 2
        listed = (ranks[middle - 1 :: -1], ranks[: middle - 1 : -1], ranks[::2], ranks[1::2])
        made = [communicator.group(some) for some in listed if some]
        return [group for group in made if group is not None] * 3

    def _check(self, communicator: Communicator) -> None:
        """A reduction whose sums are exact in float32.

        Raises:
            ValueError: it did not give them.
        """
        pattern = torch.arange(NUMEL, dtype=torch.float32) % 1000
        tensor = pattern * (communicator.rank + 1)
        communicator.all_reduce(tensor)
        if not torch.equal(tensor, pattern * sum(range(1, communicator.world_size + 1))):
            raise ValueError(f"{communicator} reduced to wrong sums")


def _place(membership: MembershipView, me: Member) -> Member:
    place = membership.find_member(me)
    if place is None:
        raise ValueError(f"{me} does not belong to generation {membership.generation}")
    return place


def _resources() -> Counter[str]:
    """How many shared mappings, descriptors of each kind, and threads this process has."""
    gc.collect()
    found = Counter(
        "mapping" for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line
    )
    found += _descriptors()
    found["thread"] = len(os.listdir("/proc/self/task"))
    return found


def _descriptors() -> Counter[str]:
    """Descriptors of each kind, without the connections of others, who watch this process."""
    server = get_failure_detector_server(_ADDRESS)
    while True:
        watching = server.num_subscribers
        found: Counter[str] = Counter()
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:  # the one that listed them
                continue
            found[f"descriptor {target.split(':')[0]}"] += 1
        # If their number changed, one that came meanwhile would be subtracted, but was not counted.
        if server.num_subscribers == watching:
            found["descriptor socket"] -= watching
            return found


def _left_behind(clean: Counter[str]) -> str:
    """What there is more than at the beginning, once threads have had the time to end."""
    if poll(lambda: _resources() <= clean or None, _SETTLE_S):
        return ""  # not looked at again: others come to and leave the door meanwhile
    return ", ".join(f"{count} {kind}" for kind, count in (_resources() - clean).items())
