"""Collectives over TCP by torch's Gloo: any members, on any hosts."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.communicator import ReduceOp
from collectives.errors import CommunicatorError
from collectives.rendezvous import Member

_LOOPBACK = "127.0.0.1"


class GlooStore:
    """The key-value store through which Gloo's members exchange addresses; rank 0 hosts it, the others connect.

    It listens on one address only: loopback when all members share a host.
    """

    def __init__(self, store: dist.TCPStore, host: str, port: int) -> None:
        self.store = store
        self.endpoint = f"{host}:{port}"

    @classmethod
    def host(cls, members: Sequence[Member], timeout_s: float) -> Self:
        """Start a store on a free port of this process's host.

        Raises:
            CommunicatorError: the address cannot be listened on.
        """
        address = _address(members, 0)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
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
                "connect", 0, "the group's TCP store", 0.0, f"cannot listen on {address}: {error}"
            ) from error
        listener.detach()  # the store owns the descriptor now
        return cls(store, address, port)

    @classmethod
    def connect(cls, endpoint: str, rank: int, timeout_s: float) -> Self:
        """Reach the store that rank 0 hosts at ``host:port``.

        Raises:
            CommunicatorError: it cannot be reached within ``timeout_s``.
        """
        host, _, port = endpoint.rpartition(":")
        begin = time.monotonic()
        try:
            store = dist.TCPStore(
                host, int(port), timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            )
        except RuntimeError as error:
            raise CommunicatorError(
                "connect", rank, f"rank 0's store at {endpoint}", time.monotonic() - begin, str(error)
            ) from error
        return cls(store, host, int(port))


class GlooCommunicator:
    """A Gloo process group of its own, beside any other in the process: torch's default group stays untouched."""

    def __init__(self, store: GlooStore, members: Sequence[Member], rank: int, timeout_s: float) -> None:
        """Connect to every other member.

        Raises:
            CommunicatorError: a member did not connect within ``timeout_s``.
        """
        self.rank = rank
        self.world_size = len(members)
        self._others = ", ".join(str(member) for member in members if member.rank != rank)
        self._store = store
        self._broken: str | None = None
        self._group: dist.ProcessGroupGloo | None = None
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out what its own tests use
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_address(members, rank))]
        options._timeout = timedelta(seconds=timeout_s)
        # A namespace in the store, so that the caller may keep other things there.
        names = dist.PrefixStore("gloo", store.store)
        with _Translated(self, "connect"):
            self._group = gloo(names, rank, self.world_size, options)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place: ring reduce-scatter and all-gather, so each element is summed in one place only."""
        reduce_op = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        if tensor.numel():
            self._run("all_reduce", lambda group: group.allreduce(tensor, reduce_op))
        if op == "mean":
            tensor.div_(self.world_size)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        gathered = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.numel():
            own = tensor.detach().contiguous()
            self._run("all_gather", lambda group: group.allgather([list(gathered.unbind(0))], [own]))
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""
        if tensor.numel():
            self._run("broadcast", lambda group: group.broadcast(tensor, source))

    def barrier(self) -> None:
        """Wait until every member is here."""
        self._run("barrier", lambda group: group.barrier())

    def close(self) -> None:
        """Drop the connections; a member that still waits for this one gets an error. Safe to call twice."""
        self._broken = self._broken or "this communicator is closed"
        self._group = None

    def _run(self, operation: str, start: Callable[[Any], dist.Work]) -> None:
        """Start an operation and wait for it within the group's time limit."""
        if self._broken is not None:
            raise CommunicatorError(operation, self.rank, "nobody", 0.0, self._broken)
        with _Translated(self, operation):
            start(self._group).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Translated:
    """Turns torch's RuntimeErrors inside the block into CommunicatorError, and marks the communicator unusable."""

    def __init__(self, communicator: GlooCommunicator, operation: str) -> None:
        self._communicator = communicator
        self._operation = operation

    def __enter__(self) -> None:
        self._begin = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, RuntimeError):
            return
        owner = self._communicator
        waited_s = time.monotonic() - self._begin
        detail = str(error).splitlines()[0]
        owner._broken = f"an earlier {self._operation} failed: {detail}"
        # Without its connections, members that wait for this one fail now and not at their own time limit.
        owner._group = None
        raise CommunicatorError(self._operation, owner.rank, owner._others, waited_s, detail) from error


def _address(members: Sequence[Member], rank: int) -> str:
    """Where a member listens: loopback when all members share a host."""
    if len({member.host_id for member in members}) == 1:
        return _LOOPBACK
    return next(member.address for member in members if member.rank == rank)
