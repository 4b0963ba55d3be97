"""Collectives over TCP by torch's Gloo, among any members on any hosts.

Gloo moves the bytes; this module adds. Gloo's own ring sums an element in an order that depends on its position, and rounds
bfloat16 at every addition. Here an all-reduce is:

1. All-to-all: every member sends each other member that member's share.
2. Each member reduces its own share in rank order.
3. Each member broadcasts its share.

This moves as many bytes as a ring, and the order of the sum is the same for every element.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.errors import CommunicatorError
from collectives.rendezvous import Member
from collectives.transports import calls
from collectives.transports.base import (
    ReduceOp,
    ReusedMemory,
    TransportGroup,
    as_bytes,
    combine,
    listening_address,
    shares,
)
from collectives.transports.gloo_mesh import connected_mesh
from collectives.transports.ring import GroupTransport

_CHECK_INTERVAL = timedelta(milliseconds=50)
"""Between two checks of the other members during a wait."""
_LONG_S = 0.5
"""After an operation that took longer the members are checked once more."""
_ATTEMPT_S = 1.0
"""Per attempt to reach a store, which torch does not let one interrupt."""
_GRACE_S = 1.0
"""Gloo's own time limit exceeds ours by this much, because our error says more."""


def connect(group: TransportGroup) -> GlooTransport:
    """Connect the members over TCP."""
    return GlooTransport(GlooStore.of(group), group.members, group.rank, group.timeout_s, group.check)


class GlooStore:
    """The key-value store through which Gloo's members exchange addresses; rank 0 hosts it, the others connect.

    It listens on one address only: loopback when all members share a host.
    """

    def __init__(self, store: dist.TCPStore, host: str, port: int) -> None:
        self.store = store
        self.endpoint = f"{host}:{port}"

    @classmethod
    def of(cls, group: TransportGroup) -> Self:
        """The first member's store, whose endpoint it publishes."""
        if group.rank > 0:
            endpoint = group.published(group.members[0], group.key)
            return cls.connect(endpoint, group.members[group.rank].rank, group.timeout_s, group.check)
        store = cls.host(group.members, group.timeout_s)
        group.publish(group.key, store.endpoint)
        return store

    @classmethod
    def host(cls, members: Sequence[Member], timeout_s: float) -> Self:
        """Start a store on a free port of this process's host.

        Raises:
            CommunicatorError: the address cannot be listened on.
        """
        address, family = listening_address(members, 0)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((address, 0))
            listener.listen()
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                address,
                port,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.fileno(),
            )
        except (OSError, RuntimeError) as error:
            listener.close()
            raise CommunicatorError(
                "connect",
                members[0].rank,
                "the group's TCP store",
                0.0,
                f"cannot listen on {address}: {error}",
            ) from error
        listener.detach()  # the store owns the descriptor now
        return cls(store, address, port)

    @classmethod
    def connect(
        cls,
        endpoint: str,
        rank: int,
        timeout_s: float,
        check: Callable[[float], None] = lambda waited_s: None,
    ) -> Self:
        """Reach the store that rank 0 hosts at ``host:port``. ``check`` is called between attempts; it may raise.

        Raises:
            CommunicatorError: it cannot be reached within ``timeout_s``.
        """
        host, _, port = endpoint.rpartition(":")
        begin = time.monotonic()
        while True:
            left_s = timeout_s - (time.monotonic() - begin)
            try:
                attempt = timedelta(seconds=max(0.0, min(_ATTEMPT_S, left_s)))
                store = dist.TCPStore(host, int(port), timeout=attempt, wait_for_workers=False)
            except RuntimeError as error:
                check(time.monotonic() - begin)
                waited_s = time.monotonic() - begin
                if waited_s >= timeout_s:
                    raise CommunicatorError(
                        "connect", rank, f"rank 0's store at {endpoint}", waited_s, str(error)
                    ) from error
            else:
                store.set_timeout(timedelta(seconds=timeout_s))
                return cls(store, host, int(port))


class GlooTransport(GroupTransport):
    """A process group of Gloo's."""

    def __init__(
        self,
        store: GlooStore,
        members: Sequence[Member],
        rank: int,
        timeout_s: float,
        check: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        """Connect to every other member. ``rank`` and ``check`` as of ``GroupTransport``; ``check`` also after long waits.

        Raises:
            CommunicatorError: a member did not connect within ``timeout_s``.
        """
        super().__init__(members, rank, device=torch.device("cpu"), timeout_s=timeout_s, check=check)
        self._store = store
        self._stage, self._scratch = ReusedMemory(), ReusedMemory()
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out what its own tests use
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=listening_address(members, rank)[0])]
        options._timeout = timedelta(seconds=timeout_s + _GRACE_S)
        begin = time.monotonic()
        try:
            self._group = connected_mesh(
                store.store, rank, self.world_size, options, lambda: check(time.monotonic() - begin)
            )
        except CommunicatorError:
            raise
        except RuntimeError as error:
            raise CommunicatorError(
                "connect", self._me, self._others, time.monotonic() - begin, str(error).splitlines()[0]
            ) from error

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place: each member reduces its share and broadcasts it."""
        self._check_same_call("all_reduce", tensor, calls.OPS.index(op), layout)
        with self._staged(tensor) as flat:
            self._reduce_share("all_reduce", flat, op)
            pieces = [flat[begin:end] for begin, end in shares(flat.numel(), self.world_size)]
            self._run(
                "all_reduce",
                lambda group: [
                    group.broadcast(as_bytes(piece), rank)
                    for rank, piece in enumerate(pieces)
                    if piece.numel()
                ],
            )

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place on rank 0: each member reduces its share and sends it there."""
        self._check_same_call("reduce", tensor, calls.OPS.index(op), layout)
        with self._staged(tensor) as flat:
            begin, end = self._reduce_share("reduce", flat, op)
            own = self._scratch.view(end - begin, flat.dtype).copy_(flat[begin:end])
            nothing = [0] * self.world_size
            into, sizes = (flat, self._sizes(flat)) if self.rank == 0 else (flat[:0], nothing)
            if flat.numel():
                self._exchange("reduce", own, [end - begin, *nothing[1:]], into, sizes)

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce in place this member's share; returns [begin, end)."""
        self._check_same_call("reduce_scatter", tensor, calls.OPS.index(op))
        with self._staged(tensor) as flat:
            return self._reduce_share("reduce_scatter", flat, op)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        self._check_same_call("all_gather", tensor)
        own = tensor.detach().to("cpu", copy=True).contiguous()
        gathered = torch.empty((self.world_size, *own.shape), dtype=own.dtype)
        if own.numel():
            self._run("all_gather", lambda group: [group._allgather_base(as_bytes(gathered), as_bytes(own))])
        return gathered.to(tensor.device)

    def broadcast(self, tensor: Tensor, source: int = 0, layout: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""
        self._check_same_call("broadcast", tensor, source, layout)
        if tensor.numel():
            with self._staged(tensor) as flat:
                self._run("broadcast", lambda group: [group.broadcast(as_bytes(flat), source)])

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Plain memory: operations copy tensors anyway."""
        return torch.zeros(numel, dtype=dtype)

    def _leave(self, last: list[Any]) -> None:
        # In a thread: the group's destructor waits for an aborted operation, up to Gloo's own time limit.
        threading.Thread(target=last.clear, name="gloo-ending", daemon=True).start()

    def _sizes(self, tensor: Tensor) -> list[int]:
        return [end - begin for begin, end in shares(tensor.numel(), self.world_size)]

    def _reduce_share(self, operation: str, tensor: Tensor, op: ReduceOp) -> tuple[int, int]:
        begin, end = shares(tensor.numel(), self.world_size)[self.rank]
        if not tensor.numel():
            return begin, end
        parts = self._scratch.view(self.world_size * (end - begin), tensor.dtype)
        self._exchange(operation, tensor, self._sizes(tensor), parts, [end - begin] * self.world_size)
        combine(parts.view(self.world_size, -1).unbind(0), tensor[begin:end], op)
        return begin, end

    def _exchange(
        self, operation: str, out: Tensor, out_sizes: list[int], into: Tensor, into_sizes: list[int]
    ) -> None:
        """All-to-all: send every member its piece of ``out``; concatenate the received pieces in ``into``."""
        width = out.element_size()
        self._run(
            operation,
            lambda group: [
                group.alltoall_base(
                    as_bytes(into),
                    as_bytes(out),
                    [width * size for size in into_sizes],
                    [width * size for size in out_sizes],
                )
            ],
        )

    @contextmanager
    def _staged(self, tensor: Tensor) -> Iterator[Tensor]:
        """A copy on the host, copied back unless an error is raised."""
        flat = self._stage.view(tensor.numel(), tensor.dtype).copy_(tensor.detach().view(-1))
        yield flat
        tensor.detach().view(-1).copy_(flat)

    def _await(self, works: Sequence[dist.Work], begin: float) -> None:
        """As of ``GroupTransport``."""
        for work in works:
            while not self._ended(work):
                self._check(time.monotonic() - begin)
                if time.monotonic() - begin >= self._timeout_s:
                    raise TimeoutError(f"not all came within {self._timeout_s:.1f} s")
        passed_s = time.monotonic() - self._began_s
        if passed_s >= _LONG_S:
            # This process may have been suspended, and the others may have given up the operation that it completed.
            self._check(passed_s)

    def _ended(self, work: dist.Work) -> bool:
        """Wait for one interval. Raises RuntimeError if the operation failed, or the transport was closed."""
        try:
            work.wait(_CHECK_INTERVAL)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if it failed; it may have succeeded just after the interval
                return True
            if self._broken is not None:
                raise RuntimeError(self._broken) from None
            return False
        return True
