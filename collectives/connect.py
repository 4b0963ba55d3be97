"""From a rendezvous to a communicator: one door for all transports."""

from __future__ import annotations

from typing import Literal

from collectives.communicator import Communicator
from collectives.errors import CommunicatorError
from collectives.rendezvous import Member, Rendezvous, await_endpoint, meet
from collectives.solo import SoloCommunicator
from collectives.transports import shm
from collectives.transports.gloo import GlooCommunicator, GlooStore
from collectives.transports.shm import Segment, SharedMemoryTransport

Transport = Literal["auto", "shm", "gloo"]


def connect(
    rendezvous: Rendezvous,
    me: Member,
    *,
    world_size: int,
    timeout_s: float,
    transport: Transport = "auto",
    generation: int = 0,
) -> Communicator:
    """Meet the other members and connect to them; every member calls this with the same arguments but its own ``me``.

    ``timeout_s`` limits each wait of the meeting and every later operation. ``transport`` auto: shared memory
    when all members share a host on which it works, else Gloo.

    Raises:
        RendezvousError: members are missing, duplicate or out of range.
        CommunicatorError: they met but could not connect.
    """
    if world_size == 1:
        return SoloCommunicator()
    members = meet(rendezvous, me, world_size=world_size, generation=generation, timeout_s=timeout_s)
    chosen = _chosen(transport, members, me.rank)
    if chosen == "shm":
        return _connect_shared(rendezvous, members, me.rank, generation, timeout_s)
    return _connect_gloo(rendezvous, members, me.rank, generation, timeout_s)


def _chosen(transport: Transport, members: tuple[Member, ...], rank: int) -> Transport:
    """The transport that every member derives alike from the list of members."""
    one_host = len({member.host_id for member in members}) == 1
    if transport == "auto":
        return "shm" if one_host and shm.is_supported() else "gloo"
    if transport == "shm" and not (one_host and shm.is_supported()):
        hosts = ", ".join(sorted({member.hostname for member in members}))
        raise CommunicatorError(
            "connect",
            rank,
            "nobody",
            0.0,
            f"shm needs one x86-64 Linux host that all members share, and they are on {hosts}; "
            "use transport='gloo' or 'auto'",
        )
    return transport


def _connect_gloo(
    rendezvous: Rendezvous, members: tuple[Member, ...], rank: int, generation: int, timeout_s: float
) -> GlooCommunicator:
    if rank == 0:
        store = GlooStore.host(members, timeout_s)
        rendezvous.publish(generation, store.endpoint)
    else:
        endpoint = await_endpoint(rendezvous, host=members[0], generation=generation, timeout_s=timeout_s)
        store = GlooStore.connect(endpoint, rank, timeout_s)
    return GlooCommunicator(store, members, rank, timeout_s)


def _connect_shared(
    rendezvous: Rendezvous, members: tuple[Member, ...], rank: int, generation: int, timeout_s: float
) -> SharedMemoryTransport:
    if rank == 0:
        segment = Segment.host(len(members))
        rendezvous.publish(generation, segment.endpoint)
    else:
        endpoint = await_endpoint(rendezvous, host=members[0], generation=generation, timeout_s=timeout_s)
        segment = Segment.attach(endpoint, len(members), rank)
    return SharedMemoryTransport(segment, members, rank, timeout_s)
