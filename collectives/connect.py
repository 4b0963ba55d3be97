"""From a rendezvous to a communicator: who is where, which schedule, and one transport for each of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from collectives.communicator import Communicator
from collectives.composed import ComposedCommunicator
from collectives.compositions import compose
from collectives.errors import CommunicatorError, MemberLostError
from collectives.layout import Layout
from collectives.liveness import Liveness
from collectives.rendezvous import Member, Rendezvous, await_endpoint, meet, poll
from collectives.schedule import Primitive, Schedule, ranks_text
from collectives.solo import SoloCommunicator
from collectives.transports import shm
from collectives.transports.base import Transport
from collectives.transports.gloo import GlooStore, GlooTransport

TransportName = Literal["auto", "shm", "gloo"]
"""auto: shared memory inside a host where it works, Gloo across hosts. shm: shared memory only. gloo: Gloo only."""

_LOSS_NEWS_S = 0.7
"""How long after an error the news of a loss behind it may take: of a process that ended it is there already, and of a
host that fell silent one member hears at most a heartbeat and its way before another, which then leaves."""


def connect(
    rendezvous: Rendezvous,
    me: Member,
    *,
    world_size: int,
    timeout_s: float,
    transport: TransportName = "auto",
    composition: str = "auto",
    generation: int = 0,
) -> Communicator:
    """Meet the other members and connect to them; every member calls this with the same arguments but its own ``me``.

    Args:
        rendezvous: where all meet
        me: this process, and which device it uses
        world_size: how many members there are
        timeout_s: limits each wait of the meeting and of every later operation
        transport: what data may travel by
        composition: name of a composition in ``collectives.compositions``; auto chooses for the layout
        generation: which forming of the group this is

    Raises:
        RendezvousError: members are missing, duplicate or out of range.
        CompositionError: the composition does not exist or does not apply to where the members are.
        CommunicatorError: they met but could not connect; MemberLostError where one is gone.
    """
    if world_size == 1:
        return SoloCommunicator(generation)
    liveness = Liveness(me)
    try:
        members = meet(
            rendezvous, liveness, world_size=world_size, generation=generation, timeout_s=timeout_s
        )
        _refuse_transport(transport, members, me.rank)
        meeting = _Meeting(rendezvous, generation, timeout_s, transport, composition, liveness)
        return _communicator(meeting, members, me.rank, "")
    except CommunicatorError as error:
        explained = _explained(error, liveness)
        liveness.close()
        raise explained from error.__cause__
    except BaseException:
        liveness.close()
        raise


def schedule_for(members: Sequence[Member], composition: str) -> Schedule:
    """What these members run. auto: shared memory inside each host, then across; on one host that is one step.

    Raises:
        CompositionError: there is no such composition, or it does not apply.
    """
    layout = Layout.placed([(member.host_id, member.device) for member in members])
    return compose("ip_only" if composition == "auto" else composition, layout)


@dataclass(frozen=True, slots=True)
class _Meeting:
    """What all groups that come of one meeting have in common."""

    rendezvous: Rendezvous
    generation: int
    timeout_s: float
    transport: TransportName
    composition: str
    liveness: Liveness


def _communicator(meeting: _Meeting, members: Sequence[Member], rank: int, name: str) -> Communicator:
    if len(members) == 1:
        return SoloCommunicator(meeting.generation)
    schedule = schedule_for(members, meeting.composition)
    return ComposedCommunicator(rank, schedule, _Wires(meeting, members, rank, name), meeting.generation)


class _Wires:
    """Connects this member to others of one group. The first member of a transport publishes where it begins."""

    def __init__(self, meeting: _Meeting, members: Sequence[Member], rank: int, name: str) -> None:
        self._meeting, self._members, self._rank, self._name = meeting, members, rank, name
        self._num_groups = 0

    def transport(self, primitive: Primitive, ranks: tuple[int, ...]) -> Transport:
        """The primitive among these ranks, of which this member is one."""
        members = [self._members[rank] for rank in ranks]
        key = f"{self._name}{primitive} {ranks_text(ranks)}"
        if primitive == "ip" and self._meeting.transport != "gloo" and shm.is_supported():
            return self._shared_memory(members, ranks.index(self._rank), key)
        return self._gloo(members, ranks.index(self._rank), key)

    def group(self, ranks: tuple[int, ...]) -> Communicator | None:
        """A communicator among these ranks; None where this member is not one of them."""
        self._num_groups += 1  # on every member, so that all name it alike
        if self._rank not in ranks:
            return None
        name = f"{self._name}group {self._num_groups}: "
        members = [self._members[rank] for rank in ranks]
        return _communicator(self._meeting, members, ranks.index(self._rank), name)

    def explained(self, error: CommunicatorError) -> CommunicatorError:
        """A loss, if there was one."""
        return _explained(error, self._meeting.liveness)

    def close(self) -> None:
        """Stop watching the others, once the whole group is left."""
        if not self._name:
            self._meeting.liveness.close()

    def _shared_memory(self, members: Sequence[Member], index: int, key: str) -> Transport:
        if index == 0:
            segment = shm.Segment.host(len(members))
            self._publish(key, segment.endpoint)
        else:
            segment = shm.Segment.attach(self._endpoint(members[0], key), len(members), index)
        return shm.SharedMemoryTransport(segment, members, index, self._meeting.timeout_s)

    def _gloo(self, members: Sequence[Member], index: int, key: str) -> Transport:
        timeout_s = self._meeting.timeout_s
        if index == 0:
            store = GlooStore.host(members, timeout_s)
            self._publish(key, store.endpoint)
        else:
            store = GlooStore.connect(self._endpoint(members[0], key), members[index].rank, timeout_s)
        return GlooTransport(store, members, index, timeout_s, self._check)

    def _check(self) -> None:
        """Called during waits; the communicator adds what it was waiting for."""
        self._meeting.liveness.check("an operation")

    def _publish(self, key: str, endpoint: str) -> None:
        self._meeting.rendezvous.publish(self._meeting.generation, key, endpoint)

    def _endpoint(self, host: Member, key: str) -> str:
        meeting = self._meeting
        return await_endpoint(
            meeting.rendezvous,
            meeting.liveness,
            host=host,
            generation=meeting.generation,
            key=key,
            timeout_s=meeting.timeout_s,
        )


def _explained(error: CommunicatorError, liveness: Liveness) -> CommunicatorError:
    """The loss behind an error, if there was one: broken connections and missing answers follow from it."""
    if isinstance(error, MemberLostError):
        return error
    poll(lambda: liveness.lost() or None, _LOSS_NEWS_S)
    try:
        liveness.check(error.operation, error.step, error.waited_s)
    except MemberLostError as loss:
        return loss
    except CommunicatorError:
        pass
    return error


def _refuse_transport(transport: TransportName, members: Sequence[Member], rank: int) -> None:
    """Say before anything is built that shared memory alone will not do."""
    one_host = len({member.host_id for member in members}) == 1
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
