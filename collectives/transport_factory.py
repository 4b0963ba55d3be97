"""Connects the members of a group: transports by primitive and ranks, subgroups, and the root cause of an error."""

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
"""auto: as the composition says; shared memory inside a host if it works, Gloo across hosts. shm: shared memory only, so
all members must share a host. gloo: Gloo only, for every primitive."""

_logger = logging.getLogger(__name__)
_MAPPED = "mapped"
"""Published by a member that mapped the first member's memory; otherwise it publishes the reason."""
_MISMATCH = "mismatched call"
"""Key under which a member publishes a mismatch, for members that failed before they could compare."""
_GAVE_UP = "gave up"
"""Published by a member whose operation failed, under its own key and the group's."""
_GAVE_UP_POLL_S = 0.5
"""Wait before a member first asks whether another gave up, and between two requests."""
_GAVE_UP_WAIT_S = 4 * _GAVE_UP_POLL_S
"""How long awaited members have to give up too, before an error names them as unresponsive."""
_LOSS_NOTICE_WAIT_S = 0.7
"""How long a loss may be reported after the error that it caused. The end of a process is known at once; a silent host is
detected by members up to one heartbeat interval apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupContext:
    """Shared by all groups that come of one rendezvous."""

    rendezvous: Rendezvous
    generation: int
    timeout_s: float
    transport: TransportName
    composition: str
    device: torch.device
    failure_detector: FailureDetector

    def with_root_cause(self, error: CommunicatorError, group: str = "") -> CommunicatorError:
        """The cause of an error: a member's loss, a mismatched call that another member found, or unresponsive members.

        Each of them makes other members' connections break. A member publishes a mismatch before it leaves, and a failed
        operation to its ``group``: of the awaited members, the error then names only those that have published nothing.
        """
        # 1. Publish that this member gave up, so that the group need not wait for it.
        with suppress(RendezvousError):
            for member in (self.failure_detector.me, None):
                self.rendezvous.publish(self.generation, _gave_up_key(group, member), _GAVE_UP)
        # 2. The cause is known already.
        if isinstance(error, MemberLostError):
            return error
        if isinstance(error, MismatchedCallError):
            with suppress(RendezvousError):  # another member published its own view
                self.rendezvous.publish(self.generation, _MISMATCH, error.detail)
            return error
        # 3. A mismatch that another member published.
        with suppress(RendezvousError):
            mismatch = self.rendezvous.endpoint(self.generation, _MISMATCH)
            if mismatch is not None:
                return MismatchedCallError(
                    error.operation, error.rank, error.waiting_for, error.waited_s, mismatch, error.step
                )
        # 4. A loss that the failure detector reports soon after.
        poll(lambda: self.failure_detector.lost() or None, _LOSS_NOTICE_WAIT_S)
        try:
            self.failure_detector.check(error.operation, error.step, error.waited_s)
        except MemberLostError as loss:
            reason = f"{loss.reason}; {error.detail}"  # a member that left because of a mismatch may have ended too
            return MemberLostError(error.operation, error.rank, loss.lost, error.waited_s, error.step, reason)
        except CommunicatorError:
            pass
        # 5. Otherwise the members that did not come.
        return self._naming_unresponsive_members(error, group)

    def _naming_unresponsive_members(self, error: CommunicatorError, group: str) -> CommunicatorError:
        """The error, naming only the awaited members that have not given up themselves; unchanged if all have."""
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
    """Key for a failed operation of this member of a group; without a member, of any of them."""
    return f"{group}{_GAVE_UP}" if member is None else f"{group}{_GAVE_UP}: rank {member.rank}"


def communicator_among(
    context: GroupContext, members: Sequence[Member], rank: int, name: str = ""
) -> Communicator:
    """This member's communicator with ``members``. All of them call it.

    Args:
        context: of their rendezvous
        members: by rank
        rank: of this process among them
        name: unique among the groups of the rendezvous; empty for the group of all members
    """
    if len(members) == 1:
        return SoloCommunicator(context.generation)
    transport_factory = GroupTransportFactory(context, members, rank, name)
    composition = context.composition
    if composition == "auto" and context.transport != "auto":
        composition = "ip_only"  # with a single transport there is no choice
    choice = choose_schedule(transport_factory, members, rank, composition, context.device, context.timeout_s)
    return ComposedCommunicator(
        rank, choice.schedule, transport_factory, context.generation, choice.reason, choice.tuner
    )


class GroupTransportFactory:
    """Connects this member to others of one group. The first member of a transport publishes its endpoint."""

    def __init__(
        self, context: GroupContext, members: Sequence[Member], rank: int, name: str, group: str | None = None
    ) -> None:
        """``name``: prefix of the transports' keys; ``group``: prefix of their group's keys, by default the same."""
        self._context, self._members, self._rank, self._name = context, members, rank, name
        self._group = name if group is None else group
        self._num_groups = 0
        self._next_gave_up_poll_s = 0.0
        """Time of the next request whether another member gave up."""

    def transport(self, primitive: Primitive, ranks: tuple[int, ...]) -> Transport:
        """A transport of the primitive among these ranks, which include this member. On a CPU, Gloo replaces NCCL."""
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
        """The transport for messages from one rank to another: shared memory inside a host, Gloo between hosts."""
        source, to = direction
        one_host = self._members[source].host_id == self._members[to].host_id
        return self.scoped(f"{source} to {to}").transport("ip" if one_host else "net", direction)

    def scoped(self, name: str) -> GroupTransportFactory:
        """A factory for the same members with separate transports, for example to probe or time them."""
        return GroupTransportFactory(
            self._context, self._members, self._rank, f"{self._name}{name}: ", self._group
        )

    def group(self, ranks: tuple[int, ...]) -> Communicator | None:
        """A communicator among these ranks; None on other members."""
        self._num_groups += 1  # on every member, so that all use the same name
        if self._rank not in ranks:
            return None
        name = f"{self._name}group {self._num_groups}: "
        members = [self._members[rank] for rank in ranks]
        return communicator_among(self._context, members, ranks.index(self._rank), name)

    def with_root_cause(self, error: CommunicatorError) -> CommunicatorError:
        """The cause of an error, as ``GroupContext.with_root_cause``."""
        return self._context.with_root_cause(error, self._group)

    def close(self) -> None:
        """Close the failure detector, if this is the group of all members."""
        if not self._name:
            self._context.failure_detector.close()

    def _shared_memory_or_gloo(self, members: Sequence[Member], index: int, key: str) -> Transport:
        """Shared memory if all members can map it; else Gloo for all, or an error with ``transport: shm``.

        A process may open another's memory only if the kernel lets it trace that process: not if it belongs to another user,
        or to another PID namespace.
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
                f"members cannot share memory: {reason}; run them as one user in one PID namespace, or use "
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
        """The first member's memory (None if this member cannot map it), and all members' refusals, equal on all."""
        segment: shm.Segment | None
        if index == 0:
            segment = shm.Segment.host(len(members))
            published = key, segment.endpoint
        else:
            segment, refusal = self._attach_segment(members, index, key)
            published = f"{key} mapped by {index}", refusal or _MAPPED
        try:
            self._publish(*published)
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
        """The first member's memory; or None and the reason why this process cannot map it."""
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
        """Raise if a member is lost or another one gave up.

        Called during waits with their seconds so far, and after long ones, in which this process may have been suspended.
        The communicator fills in the name of the interrupted operation.
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
                    "another member gave up first",
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
