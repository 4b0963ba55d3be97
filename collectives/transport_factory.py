"""Connects the members of a group: transports by primitive and ranks, subgroups, and the root cause of an error."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from collectives.choice import choose_schedule
from collectives.communicator import Communicator
from collectives.composed import ComposedCommunicator
from collectives.errors import CommunicatorError, MemberLostError, MismatchedCallError, RendezvousError
from collectives.failure_detector import FailureDetector
from collectives.rendezvous import Member, Rendezvous, await_endpoint, other_members, poll
from collectives.schedule import Primitive, ranks_text
from collectives.solo import SoloCommunicator
from collectives.transports.base import Transport, TransportGroup
from collectives.transports.registry import candidates, unusable

TransportName = str
"""auto: as the composition says; shared memory inside a host if it works, TCP across hosts. shm: shared memory only, so all
members must share a host. tcp, gloo: only these, for every primitive. Others: collectives/transports/registry.py."""

_logger = logging.getLogger(__name__)
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

    ``name``: unique among the groups of the rendezvous; empty for the group of all members.
    """
    if len(members) == 1:
        return SoloCommunicator(context.generation)
    transport_factory = GroupTransportFactory(context, members, rank, name)
    composition = context.composition
    if composition == "auto" and context.transport != "auto":
        composition = "ip_only"  # with a single transport there is no choice
    schedule, reason, tuner = choose_schedule(
        transport_factory, members, rank, composition, context.device, context.timeout_s
    )
    return ComposedCommunicator(rank, schedule, transport_factory, context.generation, reason, tuner)


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
        """The first candidate of the registry that connects these ranks, which include this member.

        Raises:
            CommunicatorError: none does; or a member is lost or did not come.
        """
        context, key = self._context, f"{self._name}{primitive} {ranks_text(ranks)}"
        group = self._group_of(ranks, key)
        reasons: list[str] = []
        for definition in candidates(primitive, context.transport, context.device.type):
            transport = definition.connect(group)
            if not isinstance(transport, str):
                if reasons and group.rank == 0:
                    _logger.warning(
                        "members reduce by %s, a slower transport: %s", definition.name, "; ".join(reasons)
                    )
                return transport
            reasons.append(transport)
            group = replace(group, key=f"{key} without {definition.name}")
        raise unusable(context.transport, self._members[self._rank].rank, "; ".join(reasons))

    def channel(self, direction: tuple[int, int]) -> Transport:
        """The transport for messages from one rank to another: shared memory inside a host, TCP between hosts."""
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

    def _group_of(self, ranks: tuple[int, ...], key: str) -> TransportGroup:
        context = self._context
        return TransportGroup(
            members=[self._members[rank] for rank in ranks],
            rank=ranks.index(self._rank),
            key=key,
            device=context.device,
            timeout_s=context.timeout_s,
            check=self._check,
            publish=partial(context.rendezvous.publish, context.generation),
            published=lambda host, key: await_endpoint(
                context.rendezvous,
                context.failure_detector,
                host=host,
                generation=context.generation,
                key=key,
                timeout_s=context.timeout_s,
            ),
        )

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
