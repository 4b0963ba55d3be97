"""How the members of a meeting are connected: transports by primitive and group, and groups of some of them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from collectives.choice import choose_schedule
from collectives.communicator import Communicator
from collectives.composed import ComposedCommunicator
from collectives.errors import CommunicatorError, MemberLostError, MismatchedCallError, RendezvousError
from collectives.failure_detector import FailureDetector
from collectives.rendezvous import Member, Rendezvous, await_endpoint, other_members, poll
from collectives.schedule import Primitive, ranks_text
from collectives.solo import SoloCommunicator
from collectives.transports import shm
from collectives.transports.base import Transport
from collectives.transports.device import DeviceTransport
from collectives.transports.gloo import GlooStore, GlooTransport
from collectives.transports.nccl import NcclTransport

TransportName = Literal["auto", "shm", "gloo"]
"""auto: what the composition names, shared memory inside a host where it works, Gloo across hosts. shm: all members
share a host, and its memory. gloo: Gloo only, whatever the composition names."""

_logger = logging.getLogger(__name__)
_MAPPED = "mapped"
"""What a member publishes that mapped the first one's memory; another one publishes why it could not."""
_MISMATCH = "mismatched call"
"""Under this key members that compared their calls publish what differed, for those that did not get to comparing."""
_GAVE_UP = "gave up"
"""What a member publishes that gives up, for itself and for all who wait."""
_GAVE_UP_POLL_S = 0.5
"""How long a member waits before it asks whether another gave up, and between two questions."""
_GAVE_UP_WAIT_S = 4 * _GAVE_UP_POLL_S
"""How long those who wait have for giving up, too, before they are named."""
_LOSS_NOTICE_WAIT_S = 0.7
"""How long after an error the news of a loss behind it may take: of a process that ended it is there already, and of a
host that fell silent one member hears at most a heartbeat and its way before another, which then leaves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupContext:
    """What all groups that come of one meeting have in common."""

    rendezvous: Rendezvous
    generation: int
    timeout_s: float
    transport: TransportName
    composition: str
    device: torch.device
    failure_detector: FailureDetector

    def with_root_cause(self, error: CommunicatorError, group: str = "") -> CommunicatorError:
        """What is behind an error: a member's loss, or a mismatched call that another member saw; else who did not come.

        Broken connections and missing answers follow from all of them. Who sees a mismatch publishes it before it leaves,
        and whoever gives up says so to its ``group``: of those that were waited for, only the others are named then.
        """
        with suppress(RendezvousError):
            for member in (self.failure_detector.me, None):
                self.rendezvous.publish(self.generation, _gave_up_key(group, member), _GAVE_UP)
        if isinstance(error, MemberLostError):
            return error
        if isinstance(error, MismatchedCallError):
            with suppress(RendezvousError):  # another member published its own view
                self.rendezvous.publish(self.generation, _MISMATCH, error.detail)
            return error
        with suppress(RendezvousError):
            mismatch = self.rendezvous.endpoint(self.generation, _MISMATCH)
            if mismatch is not None:
                return MismatchedCallError(
                    error.operation, error.rank, error.waiting_for, error.waited_s, mismatch, error.step
                )
        poll(lambda: self.failure_detector.lost() or None, _LOSS_NOTICE_WAIT_S)
        try:
            self.failure_detector.check(error.operation, error.step, error.waited_s)
        except MemberLostError as loss:
            reason = f"{loss.reason}; {error.detail}"  # who called something else may be gone by now, too
            return MemberLostError(error.operation, error.rank, loss.lost, error.waited_s, error.step, reason)
        except CommunicatorError:
            pass
        return self._naming_unresponsive_members(error, group)

    def _naming_unresponsive_members(self, error: CommunicatorError, group: str) -> CommunicatorError:
        """The error, naming only those of the awaited members who do not give up themselves; itself where all do."""
        if len(error.awaited) < 2:
            return error

        def silent() -> list[Member]:
            return [
                member
                for member in error.awaited
                if self.rendezvous.endpoint(self.generation, _gave_up_key(group, member)) is None
            ]

        with suppress(RendezvousError):
            poll(lambda: None if silent() else True, _GAVE_UP_WAIT_S)
            found = silent()
            if 0 < len(found) < len(error.awaited):
                named = ", ".join(map(str, found))
                detail = f"{error.detail}; the others gave up, too"
                return CommunicatorError(
                    error.operation, error.rank, named, error.waited_s, detail, error.step
                )
        return error


def _gave_up_key(group: str, member: Member | None = None) -> str:
    """Under this key a member of a group publishes that an operation of its failed; or that any member's did."""
    return f"{group}{_GAVE_UP}" if member is None else f"{group}{_GAVE_UP}: rank {member.rank}"


def communicator_among(
    context: GroupContext, members: Sequence[Member], rank: int, name: str = ""
) -> Communicator:
    """This member's communicator with ``members``, among which it has this rank. All of them call it.

    Args:
        context: where they met
        members: by rank
        rank: of this process among them
        name: tells the group from others of the same meeting; empty for that of all members
    """
    if len(members) == 1:
        return SoloCommunicator(context.generation)
    transport_factory = GroupTransportFactory(context, members, rank, name)
    composition = context.composition
    if composition == "auto" and context.transport != "auto":
        composition = "ip_only"  # what it says may be used leaves nothing to choose from
    choice = choose_schedule(transport_factory, members, rank, composition, context.device, context.timeout_s)
    return ComposedCommunicator(
        rank, choice.schedule, transport_factory, context.generation, choice.reason, choice.tuner
    )


class GroupTransportFactory:
    """Connects this member to others of one group. The first member of a transport publishes where it begins."""

    def __init__(
        self, context: GroupContext, members: Sequence[Member], rank: int, name: str, group: str | None = None
    ) -> None:
        """``name``: tells these transports from other_members; ``group``: the same of the group that they are of."""
        self._context, self._members, self._rank, self._name = context, members, rank, name
        self._group = name if group is None else group
        self._num_groups = 0
        self._next_gave_up_poll_s = 0.0
        """Not before then this member asks again whether another gave up."""

    def transport(self, primitive: Primitive, ranks: tuple[int, ...]) -> Transport:
        """The primitive among these ranks, of which this member is one. On a CPU, Gloo stands in for NCCL's rings."""
        members, index = [self._members[rank] for rank in ranks], ranks.index(self._rank)
        key = f"{self._name}{primitive} {ranks_text(ranks)}"
        if self._context.transport == "gloo":
            return self._gloo(members, index, key)
        on_gpu = self._context.device.type == "cuda"
        if primitive == "device" and on_gpu:
            return self._device(members, index, key)
        if primitive == "rp" and on_gpu:
            return self._nccl(members, index, key)
        if primitive in ("ip", "device") and shm.is_supported():
            return self._shared_memory_or_gloo(members, index, key)
        return self._gloo(members, index, key)

    def channel(self, direction: tuple[int, int]) -> Transport:
        """What messages from one rank to another travel by: shared memory inside a host, Gloo between hosts."""
        source, to = direction
        one_host = self._members[source].host_id == self._members[to].host_id
        return self.scoped(f"{source} to {to}").transport("ip" if one_host else "net", direction)

    def scoped(self, name: str) -> GroupTransportFactory:
        """Wires of the same members whose transports are others, such as to try them."""
        return GroupTransportFactory(
            self._context, self._members, self._rank, f"{self._name}{name}: ", self._group
        )

    def group(self, ranks: tuple[int, ...]) -> Communicator | None:
        """A communicator among these ranks; None where this member is not one of them."""
        self._num_groups += 1  # on every member, so that all name it alike
        if self._rank not in ranks:
            return None
        name = f"{self._name}group {self._num_groups}: "
        members = [self._members[rank] for rank in ranks]
        return communicator_among(self._context, members, ranks.index(self._rank), name)

    def with_root_cause(self, error: CommunicatorError) -> CommunicatorError:
        """A loss, if there was one."""
        return self._context.with_root_cause(error, self._group)

    def close(self) -> None:
        """Stop watching the others, once the whole group is left."""
        if not self._name:
            self._context.failure_detector.close()

    def _shared_memory_or_gloo(self, members: Sequence[Member], index: int, key: str) -> Transport:
        """Shared memory if all members can map it; else Gloo for all of them, unless shared memory was asked for.

        A process may open another's memory only if the kernel lets it trace that process: not of another user, nor from
        another namespace of processes.
        """
        segment, refusals = self._map_first_members_segment(members, index, key)
        if segment is not None and not refusals:
            return shm.SharedMemoryTransport(segment, members, index, self._context.timeout_s, self._check)
        if segment is not None:
            segment.close()
        reason = "; ".join(refusals)
        if self._context.transport == "shm":
            raise CommunicatorError(
                "connect",
                members[index].rank,
                "nobody",
                0.0,
                f"members cannot share memory: {reason}; run them as one user in one namespace of processes, or use "
                "transport='gloo' or 'auto'",
            )
        if index == 0:
            _logger.warning(
                "members of one host reduce by Gloo, which is slower than shared memory: %s", reason
            )
        return self._gloo(members, index, f"{key} without shared memory")

    def _map_first_members_segment(
        self, members: Sequence[Member], index: int, key: str
    ) -> tuple[shm.Segment | None, list[str]]:
        """The memory of the first member, where this one can map it, and why others cannot, the same on all members."""
        segment: shm.Segment | None
        if index == 0:
            segment = shm.Segment.host(len(members))
            said = key, segment.endpoint
        else:
            segment, refusal = self._attach_segment(members, index, key)
            said = f"{key} mapped by {index}", refusal or _MAPPED
        try:
            self._publish(*said)
            answers = [
                self._endpoint(member, f"{key} mapped by {other}")
                for other, member in enumerate(members)
                if other > 0
            ]
        except BaseException:
            if segment is not None:
                segment.close()
            raise
        return segment, [answer for answer in answers if answer != _MAPPED]

    def _attach_segment(
        self, members: Sequence[Member], index: int, key: str
    ) -> tuple[shm.Segment | None, str]:
        """The first member's memory; or None, and why this process cannot map it."""
        endpoint = self._endpoint(members[0], key)
        try:
            return shm.Segment.attach(endpoint, len(members), index), ""
        except CommunicatorError as error:
            if not isinstance(error.__cause__, OSError):  # of another version or size
                raise
            who = f"rank {members[index].rank} (pid {os.getpid()}, user {os.geteuid()})"
            return None, f"{who} {error.detail}"

    def _device(self, members: Sequence[Member], index: int, key: str) -> Transport:
        """[unverified on GPU]."""
        segment, refusals = self._map_first_members_segment(members, index, key)
        if segment is None or refusals:
            raise CommunicatorError("connect", members[index].rank, "nobody", 0.0, "; ".join(refusals))
        timeout_s = self._context.timeout_s
        control = shm.SharedMemoryTransport(segment, members, index, timeout_s, self._check)
        return DeviceTransport(control, members, self._context.device, timeout_s)

    def _nccl(self, members: Sequence[Member], index: int, key: str) -> Transport:
        """[unverified on GPU]."""
        return NcclTransport(
            self._store(members, index, key),
            members,
            index,
            device=self._context.device,
            timeout_s=self._context.timeout_s,
            check=self._check,
        )

    def _gloo(self, members: Sequence[Member], index: int, key: str) -> Transport:
        store = self._store(members, index, key)
        return GlooTransport(store, members, index, self._context.timeout_s, self._check)

    def _store(self, members: Sequence[Member], index: int, key: str) -> GlooStore:
        timeout_s = self._context.timeout_s
        if index > 0:
            endpoint = self._endpoint(members[0], key)
            return GlooStore.connect(endpoint, members[index].rank, timeout_s, self._check)
        store = GlooStore.host(members, timeout_s)
        self._publish(key, store.endpoint)
        return store

    def _check(self, waited_s: float) -> None:
        """Called during waits, with their seconds so far; and after long ones, in which this process may have been stopped.

        An operation that it interrupts is named by the communicator.
        """
        self._context.failure_detector.check("connect")
        now_s = time.monotonic()
        if waited_s < _GAVE_UP_POLL_S or now_s < self._next_gave_up_poll_s:
            return
        self._next_gave_up_poll_s = now_s + _GAVE_UP_POLL_S
        context = self._context
        with suppress(RendezvousError):
            if context.rendezvous.endpoint(context.generation, _gave_up_key(self._group)) is not None:
                awaited = other_members(self._members, self._rank)
                failed = CommunicatorError(
                    "connect",
                    context.failure_detector.me.rank,
                    ", ".join(map(str, awaited)),
                    0.0,
                    "another gave up first",
                )
                failed.awaited = awaited
                raise failed

    def _publish(self, key: str, endpoint: str) -> None:
        self._context.rendezvous.publish(self._context.generation, key, endpoint)

    def _endpoint(self, host: Member, key: str) -> str:
        context = self._context
        return await_endpoint(
            context.rendezvous,
            context.failure_detector,
            host=host,
            generation=context.generation,
            key=key,
            timeout_s=context.timeout_s,
        )
