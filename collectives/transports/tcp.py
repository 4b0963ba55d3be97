"""Collectives over TCP connections between all members, on any hosts. Moves as many bytes as a ring in two hops.

An all-reduce of S bytes among n members:

1. Every member sends each other one its call (16 bytes) and that member's share of the tensor (S / n bytes).
2. It reduces its own share in rank order, once all have come and their calls are equal.
3. It sends the reduced share to each other member.

So each link carries 2 (n - 1) S / n bytes in each direction, as with a ring, in 2 hops instead of 2 (n - 1). An element's
sum has the same order wherever it is in the tensor, and comparing the calls costs no hop of its own.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

import torch
from torch import Tensor

from collectives.errors import CommunicatorError
from collectives.limits import WaitedTime
from collectives.rendezvous import Member, other_members
from collectives.transports import calls
from collectives.transports.base import (
    ReduceOp,
    ReusedMemory,
    TransportGroup,
    as_bytes,
    combine,
    family_of,
    listening_address,
    shares,
)

_CHECK_S = 0.05
"""Between two checks of the other members during a wait."""
_LONG_S = 0.5
"""After an operation that took longer the members are checked once more."""
_ATTEMPT_S = 1.0
"""Per attempt to connect."""
_TOKEN_BYTES = 16
_RANK_BYTES = 4


def connect(group: TransportGroup) -> TcpTransport:
    """Connect the members: each to those of lower rank.

    Raises:
        CommunicatorError: a member is lost or did not come within the limit, or this one's address cannot be listened on.
    """
    begin = time.monotonic()
    sockets: list[socket.socket | None] = [None] * len(group.members)
    try:
        with _listener(group) as listener:
            token = secrets.token_bytes(_TOKEN_BYTES)
            host, port = listener.getsockname()[:2]
            group.publish(_key(group, group.rank), f"{token.hex()} {port} {host}")
            for rank in range(group.rank):
                sockets[rank] = _reach(group, rank, begin)
            _accept(group, listener, token, sockets, begin)
    except OSError as error:
        _close(sockets)
        awaited = [member for member, found in zip(group.members, sockets, strict=True) if found is None]
        awaited = [member for member in awaited if member is not group.members[group.rank]]
        raise _failed("connect", group.members[group.rank], awaited, begin, str(error)) from error
    except BaseException:
        _close(sockets)
        raise
    return TcpTransport(sockets, group.members, group.rank, group.timeout_s, group.check)


def _key(group: TransportGroup, rank: int) -> str:
    return f"{group.key} at {rank}"


@contextmanager
def _listener(group: TransportGroup) -> Iterator[socket.socket]:
    """Listens on this member's address."""
    address, family = listening_address(group.members, group.rank)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(len(group.members))
        listener.setblocking(False)
        yield listener


def _reach(group: TransportGroup, rank: int, begin: float) -> socket.socket:
    """A connection to a member of lower rank, which knows by the token that this is a member, and by the rank which one."""
    token, port, host = group.published(group.members[rank], _key(group, rank)).split(maxsplit=2)
    hello = bytes.fromhex(token) + group.rank.to_bytes(_RANK_BYTES, "big")
    while True:
        _check(group, begin)
        found = socket.socket(family_of(host), socket.SOCK_STREAM)
        try:
            found.settimeout(_ATTEMPT_S)
            found.connect((host, int(port)))
            found.sendall(hello)
        except OSError:  # a network that is not up yet; a lost member is the check's to find
            found.close()
            if time.monotonic() - begin >= group.timeout_s:
                raise
            time.sleep(_CHECK_S)
        except BaseException:
            found.close()
            raise
        else:
            return found


def _accept(
    group: TransportGroup,
    listener: socket.socket,
    token: bytes,
    sockets: list[socket.socket | None],
    begin: float,
) -> None:
    """Accept the members of higher rank; whoever does not begin with the token is not one."""
    poller, strangers = select.poll(), dict[int, tuple[socket.socket, bytearray]]()
    poller.register(listener, select.POLLIN)
    try:
        while any(found is None for found in islice(sockets, group.rank + 1, None)):
            _check(group, begin)
            for number, _ in poller.poll(1e3 * _CHECK_S):
                if number == listener.fileno():
                    with suppress(OSError):  # it may have gone again
                        found, _ = listener.accept()
                        found.setblocking(False)
                        strangers[found.fileno()] = found, bytearray()
                        poller.register(found, select.POLLIN)
                    continue
                found, hello = strangers[number]
                try:
                    hello += (read := found.recv(_TOKEN_BYTES + _RANK_BYTES - len(hello)))
                except OSError:
                    read = b""
                if read and len(hello) < _TOKEN_BYTES + _RANK_BYTES:
                    continue
                poller.unregister(found)
                del strangers[number]
                rank = int.from_bytes(hello[_TOKEN_BYTES:], "big")
                is_member = bool(read) and secrets.compare_digest(bytes(hello[:_TOKEN_BYTES]), token)
                if is_member and group.rank < rank < len(sockets) and sockets[rank] is None:
                    sockets[rank] = found
                else:
                    found.close()
    finally:
        _close([found for found, _ in strangers.values()])


def _check(group: TransportGroup, begin: float) -> None:
    waited_s = time.monotonic() - begin
    group.check(waited_s)
    if waited_s >= group.timeout_s:
        raise TimeoutError(f"not all came within {group.timeout_s:.1f} s")


def _close(sockets: Sequence[socket.socket | None]) -> None:
    for each in sockets:
        if each is not None:
            each.close()


def _failed(
    operation: str, me: Member, awaited: Sequence[Member], begin: float, detail: str
) -> CommunicatorError:
    waited_for = ", ".join(map(str, awaited)) or "nobody"
    error = CommunicatorError(operation, me.rank, waited_for, time.monotonic() - begin, detail)
    error.awaited = tuple(awaited)
    return error


class _Peer:
    """The connection to another member, and what has still to be moved."""

    def __init__(self, member: Member, connection: socket.socket, signature: Tensor) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.member, self.socket = member, connection
        self.signature = signature
        """Of the member's operation, where it is received."""
        self.out: list[memoryview] = []
        """To be sent: a signature, if it is an operation's first move; data."""
        self.into: list[memoryview] = []
        """To be received next: a signature, or data."""
        self.after: list[memoryview] = []
        """To be received after a signature that is equal to this member's."""
        self.unheard = False
        """Whether a signature is awaited."""

    def begin(self, own: Tensor | None, sent: Tensor | None, received: Tensor | None) -> None:
        """Begin to move data, after signatures if the own one is given."""
        data = [_view(received)] if received is not None and received.numel() else []
        self.unheard = own is not None
        self.into, self.after = ([_view(self.signature)], data) if self.unheard else (data, [])
        self.out = [_view(each) for each in (own, sent) if each is not None and each.numel()]
        self._num_sent = len(self.out) - self.unheard
        self.send()

    def forget_data(self) -> None:
        """Move nothing more but signatures."""
        self.out, self._num_sent = self.out[: max(0, len(self.out) - self._num_sent)], 0
        self.after = []
        if not self.unheard:
            self.into = []

    def events(self) -> int:
        """What to wait for."""
        return (select.POLLIN if self.into else 0) | (select.POLLOUT if self.out else 0)

    def send(self) -> None:
        """As much as the connection takes now. Raises ConnectionError where the other end is closed."""
        while self.out:
            try:
                _drop(self.out, self.socket.sendmsg(self.out))
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise self._closed() from error

    def receive(self) -> None:
        """What has come, up to what is awaited: what follows belongs to the next move.

        Raises:
            ConnectionError: the other end is closed.
        """
        while self.into:
            try:
                count = self.socket.recv_into(self.into[0])
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise self._closed() from error
            if count == 0:
                raise self._closed()
            _drop(self.into, count)

    def _closed(self) -> ConnectionResetError:
        return ConnectionResetError(f"{self.member} closed its connection")


def _drop(views: list[memoryview], count: int) -> None:
    """Remove the first ``count`` bytes."""
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if count:
        views[0] = views[0][count:]


def _view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return memoryview(as_bytes(tensor.detach()).numpy().data)


class TcpTransport:
    """Connections to all other members."""

    def __init__(
        self,
        sockets: Sequence[socket.socket | None],
        members: Sequence[Member],
        rank: int,
        timeout_s: float,
        check: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        """Take over connected sockets, by rank; None for this member.

        ``check(waited_s)`` is called during waits and after long ones; it may raise CommunicatorError if a member is lost
        or gave up.
        """
        self.rank, self.world_size = rank, len(members)
        self._members, self._timeout_s, self._check = members, timeout_s, check
        self._signatures = torch.empty((self.world_size, len(calls.signature(0, 0))), dtype=torch.uint8)
        self._peers = {
            place: _Peer(member, connection, self._signatures[place])
            for place, (member, connection) in enumerate(zip(members, sockets, strict=True))
            if connection is not None
        }
        self._stage, self._scratch = ReusedMemory(), ReusedMemory()
        self._broken: str | None = None
        self._is_running = False
        self._num_operations = 0

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place: each member reduces its share and sends it to all."""
        with self._operation("all_reduce", tensor, calls.OPS.index(op), layout) as flat:
            self._reduce_share(flat, op)
            self._share_all(flat)

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place on rank 0: each member reduces its share and sends it there."""
        with self._operation("reduce", tensor, calls.OPS.index(op), layout) as flat:
            own = self._reduce_share(flat, op)
            pieces = self._pieces(flat)
            if self.rank == 0:
                self._move({}, {rank: pieces[rank] for rank in self._peers})
            else:
                self._move({0: own}, {})

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce in place this member's share; returns [begin, end)."""
        with self._operation("reduce_scatter", tensor, calls.OPS.index(op)) as flat:
            self._reduce_share(flat, op)
        return shares(tensor.numel(), self.world_size)[self.rank]

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        own = tensor.detach().to("cpu", copy=True).contiguous()
        gathered = torch.empty((self.world_size, *own.shape), dtype=own.dtype)
        with self._operation("all_gather", own) as flat:
            gathered[self.rank] = own
            self._move(dict.fromkeys(self._peers, flat), {rank: gathered[rank] for rank in self._peers})
        return gathered.to(tensor.device)

    def broadcast(self, tensor: Tensor, source: int = 0, layout: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place: shares of it by the source, then by all."""
        with self._operation("broadcast", tensor, source, layout) as flat:
            pieces = self._pieces(flat)
            if self.rank == source:
                self._move({rank: pieces[rank] for rank in self._peers}, {})
            else:
                self._move({}, {source: pieces[self.rank]})
            self._share_all(flat)

    def barrier(self) -> None:
        """Wait until every member has arrived: comparing the calls is a barrier."""
        with self._operation("barrier"):
            self._move({}, {})

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Plain memory: operations copy tensors anyway."""
        return torch.zeros(numel, dtype=dtype)

    def close(self) -> None:
        """Close the connections; a member that still waits for this one gets an error. Safe to call twice."""
        self._broken = self._broken or "this communicator is closed"
        for peer in self._peers.values():
            with suppress(OSError):  # either end may be closed
                peer.socket.shutdown(socket.SHUT_RDWR)  # wakes an operation in another thread
        if not self._is_running:  # else it closes them at its end: their numbers must not be reused before
            _close([peer.socket for peer in self._peers.values()])

    @contextmanager
    def _operation(
        self, call: str, tensor: Tensor | None = None, detail: int = 0, layout: int = 0
    ) -> Iterator[Tensor]:
        """One operation: its signature goes before the first data. Yields a copy on the host, which is copied back.

        Raises:
            CommunicatorError: it failed, took too long, a member was lost, or one called something else; the transport is
                closed then, and the tensor unchanged.
        """
        self._is_running = True
        begin = time.monotonic()
        try:
            if self._broken is not None:
                raise CommunicatorError(call, self._me.rank, "nobody", 0.0, self._broken)
            self._num_operations += 1
            kind = (torch.uint8, 0) if tensor is None else (tensor.dtype, tensor.numel())
            word = calls.encode_call(call, detail, *kind, layout=layout)
            self._signatures[self.rank] = calls.signature(word, self._num_operations)
            self._has_compared = False
            flat = self._staged(tensor)
            yield flat
            if time.monotonic() - begin >= _LONG_S:
                # This process may have been suspended, and the others may have given up what it completed.
                self._check(time.monotonic() - begin)
            if tensor is not None:
                tensor.detach().view(-1).copy_(flat)
        except BaseException as error:  # of Ctrl-C, too: the other members are in the middle of it
            awaited = [peer.member for peer in self._peers.values() if peer.into or peer.out]
            detail_text = self._broken or getattr(error, "detail", "") or str(error) or type(error).__name__
            detail_text = detail_text.splitlines()[0]
            self._broken = self._broken or f"an earlier {call} failed: {detail_text}"
            if not isinstance(error, OSError):
                raise
            awaited = awaited or list(other_members(self._members, self.rank))
            raise _failed(call, self._me, awaited, begin, detail_text) from error
        finally:
            self._is_running = False
            if self._broken is not None:
                # Closing the connections makes members that wait for this one fail now, not at their own time limit.
                self.close()

    @property
    def _me(self) -> Member:
        return self._members[self.rank]

    def _reduce_share(self, flat: Tensor, op: ReduceOp) -> Tensor:
        """Send each member its share, and reduce the own one in rank order; returns it, a view of ``flat``."""
        pieces = self._pieces(flat)
        own = pieces[self.rank]
        parts = self._scratch.view(self.world_size * own.numel(), flat.dtype).view(self.world_size, -1)
        parts[self.rank] = own
        self._move({rank: pieces[rank] for rank in self._peers}, {rank: parts[rank] for rank in self._peers})
        if own.numel():
            combine(parts.unbind(0), own, op)
        return own

    def _share_all(self, flat: Tensor) -> None:
        """Send the own share to all."""
        pieces = self._pieces(flat)
        self._move(
            dict.fromkeys(self._peers, pieces[self.rank]), {rank: pieces[rank] for rank in self._peers}
        )

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        return [flat[begin:end] for begin, end in shares(flat.numel(), self.world_size)]

    def _move(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> None:
        """Send and receive tensors, by rank, all at the same time. The first move of an operation compares signatures.

        Raises:
            OSError, TimeoutError: a connection broke, or not all came in time.
            MismatchedCallError: a member called something else.
            CommunicatorError: a member was lost or gave up.
        """
        own = None if self._has_compared else self._signatures[self.rank]
        self._has_compared = True
        for rank, peer in self._peers.items():
            peer.begin(own, sent.get(rank), received.get(rank))
        poller, is_equal = _Poller(self._peers.values()), True
        checked_s, waited = time.monotonic(), WaitedTime()
        while poller.update():
            ready = poller.ready()
            for peer in ready:
                peer.send()
                peer.receive()
                if peer.unheard and not peer.into:
                    # Its signature is here. Its data may only follow if it made the same call: else it has another size.
                    peer.unheard = False
                    is_equal = is_equal and torch.equal(peer.signature, self._signatures[self.rank])
                    if is_equal:
                        peer.into = peer.after
                        peer.receive()
                if not is_equal:  # hear the others, so that all members name the same two calls
                    for each in self._peers.values():
                        each.forget_data()
            now_s = time.monotonic()
            if ready:
                waited = WaitedTime()  # of one wait: large tensors may take longer
            if now_s - checked_s >= _CHECK_S:
                checked_s, waited_s = now_s, waited.look()
                self._check(waited_s)
                if waited_s >= self._timeout_s:
                    raise TimeoutError(f"nothing came for {self._timeout_s:.1f} s")
        if not is_equal:
            calls.refuse_difference(self._signatures, self.rank, self._members)

    def _staged(self, tensor: Tensor | None) -> Tensor:
        """A copy on the host, in memory that is used again."""
        if tensor is None:
            return torch.empty(0)
        return self._stage.view(tensor.numel(), tensor.dtype).copy_(tensor.detach().reshape(-1))


class _Poller:
    """Waits for those peers that have something to move."""

    def __init__(self, peers: Iterable[_Peer]) -> None:
        self._poll = select.poll()
        self._peers = {peer.socket.fileno(): peer for peer in peers}
        self._events = dict.fromkeys(self._peers, 0)

    def update(self) -> bool:
        """Wait for what is left from now on; returns whether anything is."""
        for number, peer in self._peers.items():
            events = peer.events()
            if events != self._events[number]:
                if events:
                    self._poll.register(number, events)
                else:
                    self._poll.unregister(number)
                self._events[number] = events
        return any(self._events.values())

    def ready(self) -> list[_Peer]:
        """Those that can move something, or whose connection broke; nobody if none can for a while."""
        return [self._peers[number] for number, _ in self._poll.poll(1e3 * _CHECK_S)]
