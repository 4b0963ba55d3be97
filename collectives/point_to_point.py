"""Point-to-point messages: each direction of each pair of members is a channel with its own transport.

A channel's transport has two members, of which the sender broadcasts: shared memory inside a host, TCP between hosts.
A message is a header (dtype and shape) and the elements; it is transferred when both sides have called. Channels do not
wait for each other, nor for the communicator's collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from collectives.errors import CommunicatorError, RendezvousError, counted
from collectives.queue import OperationQueue, QueuedOperation
from collectives.transports.base import Transport, as_bytes

Direction = tuple[int, int]
"""Ranks of sender and receiver."""

MESSAGE_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.float16,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""Dtypes of messages; a header has the index."""
MOST_DIMS = 8
_HEADER = 2 + MOST_DIMS
"""int64 elements: dtype, number of dimensions, their sizes."""


class PointToPointChannels:
    """Channels of one member; each is connected at first use, by both of its members."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        connect: Callable[[Direction], Transport],
        guarded: Callable[[str, Callable[[], None]], None],
    ) -> None:
        """Connects nothing yet.

        ``connect`` makes the transport of a direction; ``guarded`` runs a named operation for the communicator, which
        records its failure.
        """
        self._rank, self._world_size = rank, world_size
        self._connect, self._guarded = connect, guarded
        self._queues: dict[Direction, OperationQueue] = {}
        self._transports: dict[Direction, Transport] = {}
        self._released = False
        self._lock = threading.Lock()

    def send(self, tensor: Tensor, to: int) -> QueuedOperation:
        """Start to send and return; the tensor belongs to the message until the handle's ``wait``.

        Raises:
            ValueError: there is no such other member, or messages do not support such tensors.
        """
        self._check_partner("to", to)
        message, direction = _host_copy(tensor), (self._rank, to)
        return self._queue(direction).start(
            partial(self._guarded, f"send to rank {to}", partial(self._send, direction, message))
        )

    def recv(self, source: int) -> Tensor:
        """Wait for the next message of another member; returns its tensor, on the host.

        Raises:
            CommunicatorError: none came within the time limit, or the sender is lost.
            ValueError: there is no such other member.
        """
        self._check_partner("source", source)
        direction = (source, self._rank)
        received: list[Tensor] = []
        self._queue(direction).call(
            partial(
                self._guarded, f"recv from rank {source}", lambda: received.append(self._receive(direction))
            )
        )
        return received[0]

    def release(self) -> None:
        """Leave every channel: members that wait in one get an error. Safe to call twice, and from other threads."""
        with self._lock:
            self._released = True
            transports = list(self._transports.values())
        for transport in transports:
            transport.close()

    def close(self, limit_s: float) -> None:
        """Fail waiting messages, interrupt running ones, and wait up to ``limit_s`` for these."""
        self.release()
        deadline = time.monotonic() + limit_s
        with self._lock:
            queues = list(self._queues.values())
        for queue in queues:
            queue.close(interrupt=self.release, limit_s=max(0.0, deadline - time.monotonic()))

    def _check_partner(self, name: str, rank: int) -> None:
        if not 0 <= rank < self._world_size or rank == self._rank:
            raise ValueError(f"{name}={rank}: give a rank from 0 to {self._world_size - 1}, not {self._rank}")

    def _queue(self, direction: Direction) -> OperationQueue:
        with self._lock:
            return self._queues.setdefault(direction, OperationQueue(self._rank))

    def _send(self, direction: Direction, message: Tensor) -> None:
        transport = self._transport(direction)
        transport.broadcast(_header(message), 0)
        if message.numel():
            transport.broadcast(as_bytes(message), 0)

    def _receive(self, direction: Direction) -> Tensor:
        transport = self._transport(direction)
        header = torch.empty(_HEADER, dtype=torch.int64)
        transport.broadcast(header, 0)
        dtype, dims, *sizes = header.tolist()
        message = torch.empty(sizes[:dims], dtype=MESSAGE_DTYPES[dtype])
        if message.numel():
            transport.broadcast(as_bytes(message), 0)
        return message

    def _transport(self, direction: Direction) -> Transport:
        """The direction's transport. Called by its queue only, one operation at a time."""
        known = self._transports.get(direction)
        if known is not None:
            return known
        begin = time.monotonic()
        try:
            made = self._connect(direction)
        except RendezvousError as error:
            other = sum(direction) - self._rank
            raise CommunicatorError(
                "connect", self._rank, f"rank {other}", time.monotonic() - begin, str(error)
            ) from error
        with self._lock:
            self._transports[direction] = made
            released = self._released
        if released:
            made.close()
        return made


def _host_copy(tensor: Tensor) -> Tensor:
    """The tensor itself where it is contiguous in host memory, else a copy of it. [unverified on GPU]

    Raises:
        ValueError: unsupported dtype, or too many dimensions.
    """
    if tensor.dtype not in MESSAGE_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in MESSAGE_DTYPES)
        raise ValueError(f"a tensor of {tensor.dtype}: messages hold {known}")
    if tensor.dim() > MOST_DIMS:
        raise ValueError(
            f"a tensor of {counted(tensor.dim(), 'dimension')}: messages have at most {MOST_DIMS}"
        )
    return tensor.detach().cpu().contiguous()


def _header(message: Tensor) -> Tensor:
    sizes = [*message.shape, *[0] * (MOST_DIMS - message.dim())]
    return torch.tensor([MESSAGE_DTYPES.index(message.dtype), message.dim(), *sizes])
