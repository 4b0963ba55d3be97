"""Connects to a group: rendezvous, layout, choice of the schedule, transports; returns the communicator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives.communicator import Communicator
from collectives.errors import CommunicatorError
from collectives.failure_detector import FailureDetector
from collectives.rendezvous import Member, Rendezvous, gather_members
from collectives.solo import SoloCommunicator
from collectives.transport_factory import GroupContext, TransportName, communicator_among
from collectives.transports.registry import candidates, transport_names, unusable

_CPU = torch.device("cpu")


def connect(
    rendezvous: Rendezvous,
    me: Member,
    *,
    world_size: int,
    timeout_s: float,
    transport: TransportName = "auto",
    composition: str = "auto",
    device: torch.device = _CPU,
    generation: int = 0,
) -> Communicator:
    """Find the other members and connect to them. Every member calls it with the same arguments, but its own ``me``.

    Args:
        rendezvous: the same for all members
        me: this process; members with the same ``device`` share one
        world_size: number of members
        timeout_s: limit of each wait, here and in every later operation
        transport: allowed transports
        composition: name of a composition in ``collectives.compositions``; auto: the cheapest for the layout
        device: of the tensors that will be reduced
        generation: of the group, counted up after each loss

    Raises:
        RendezvousError: members are missing, duplicate or out of range.
        CompositionError: the composition does not exist or does not apply to the layout.
        CommunicatorError: members could not connect; MemberLostError if one is lost.
    """
    if world_size == 1:
        return SoloCommunicator(generation)
    failure_detector = FailureDetector(me)
    context = GroupContext(
        rendezvous=rendezvous,
        generation=generation,
        timeout_s=timeout_s,
        transport=transport,
        composition=composition,
        device=device,
        failure_detector=failure_detector,
    )
    try:
        members = gather_members(
            rendezvous, failure_detector, world_size=world_size, generation=generation, timeout_s=timeout_s
        )
        _refuse_transport(context, members, me.rank)
        return communicator_among(context, members, me.rank)
    except CommunicatorError as error:
        explained_error = context.with_root_cause(error)
        failure_detector.close()
        raise explained_error from error.__cause__
    except BaseException:
        failure_detector.close()
        raise


def _refuse_transport(context: GroupContext, members: Sequence[Member], rank: int) -> None:
    """Raise early if the named transport does not exist, or does not reach all members."""
    named = context.transport
    if named not in transport_names():
        raise unusable(named, rank, f"there is no transport {named!r}")
    reached = [each.name for each in candidates("net", named, context.device.type)]
    if named not in ("auto", *reached) and len({member.host_id for member in members}) > 1:
        hosts = ", ".join(sorted({member.hostname for member in members}))
        reason = f"{named} needs one host that all members share, and they are on {hosts}"
        raise unusable(named, rank, reason)
