"""Transport interface: the operations of one primitive among its members. A schedule runs on several transports."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from collectives.rendezvous import Member

ReduceOp = Literal["sum", "mean", "max"]
"""How elements are combined. ``mean`` is for floats: the sum, divided once by the number of members."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportGroup:
    """Members that a transport connects, from the view of one of them."""

    members: Sequence[Member]
    rank: int
    """Of this process among them."""
    key: str
    """Unique among the transports of a rendezvous: the first member publishes its endpoint under it."""
    device: torch.device
    """Of the tensors."""
    timeout_s: float
    """Limit of each wait."""
    check: Callable[[float], None]
    """Called during waits with their seconds so far; raises if a member is lost or gave up."""
    publish: Callable[[str, str], None]
    """Publish a text under a key."""
    published: Callable[[Member, str], str]
    """Wait for the text that a member publishes under a key. Raises RendezvousError or MemberLostError."""


class Transport(Protocol):
    """One primitive among one set of members. Every member calls the same operations in the same order.

    Tensors are flat and contiguous. Each element is combined in rank order by one member, so results are bitwise equal on
    all members and from run to run. bfloat16 is accumulated in float32 and rounded once. NaN and infinity propagate; NaN
    for max too. Operations raise ``collectives.errors.CommunicatorError``; after an error the transport is unusable. Members
    compare their calls before data moves (``calls.py``); if they differ, the operation fails on all, naming both calls.
    """

    rank: int
    """Among this transport's members."""
    world_size: int

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place, on every member. ``layout``: from ``calls.shapes_digest``; members compare it, here and below."""

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place on rank 0; what the others' tensors then hold is unspecified."""

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce in place this member's share, [begin, end) by ``shares``; the rest is unspecified."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""

    def broadcast(self, tensor: Tensor, source: int = 0, layout: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""

    def barrier(self) -> None:
        """Wait until every member has arrived."""

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed registered memory, (numel,), reduced without copies. All members call it alike, in the same order.

        Views that begin at its start and hold the same dtype count as it. Freed when the transport is closed.
        """

    def close(self) -> None:
        """Leave the group: members that wait for this one get an error. Safe to call twice.

        From another thread it interrupts a running operation, which raises.
        """


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
"""Reducible dtypes."""


def combine(parts: Sequence[Tensor], out: Tensor, op: ReduceOp) -> None:
    """Reduce two or more parts of equal size in their order: ((p0 + p1) + p2) + ... ``out`` may alias the first part only.

    bfloat16 is summed in float32 and rounded once. A NaN in any part gives NaN, for max too.
    """
    if op == "max":
        total = torch.maximum(parts[0], parts[1], out=out)
        for part in parts[2:]:
            torch.maximum(total, part, out=total)
        return
    is_wide = out.dtype != torch.bfloat16
    total = torch.add(parts[0], parts[1], out=out) if is_wide else parts[0].float().add_(parts[1])
    for part in parts[2:]:
        total.add_(part)
    if op == "mean":
        # By a tensor of the device: by a number of the host, CUDA multiplies by its rounded reciprocal.
        total.div_(torch.full((), len(parts), dtype=total.dtype, device=total.device))
    if not is_wide:
        out.copy_(total)


def listening_address(members: Sequence[Member], rank: int) -> tuple[str, socket.AddressFamily]:
    """Where a member listens for the others: loopback if all of them share a host."""
    one_host = len({member.host_id for member in members}) == 1
    address = "127.0.0.1" if one_host else members[rank].address
    return address, family_of(address)


def family_of(address: str) -> socket.AddressFamily:
    """IPv6 or IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


_ALIGN_ELEMENTS = 16
"""Shares begin on multiples of a cache line of float32, so that two members never write to one line."""


def shares(numel: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """[begin, end) of each rank's share: contiguous, in rank order, covering all elements; some may be empty."""
    blocks = -(-numel // _ALIGN_ELEMENTS)
    bounds = [min(numel, _ALIGN_ELEMENTS * (blocks * rank // world_size)) for rank in range(world_size + 1)]
    return tuple(pairwise(bounds))


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as flat bytes, for what does not know every dtype."""
    return tensor.view(-1).view(torch.uint8)


class ReusedMemory:
    """Memory of a device that operations use again; it at least doubles when it must grow."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def view(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The first (numel,) elements, with unspecified contents. It replaces the view before."""
        size = numel * dtype.itemsize
        if self._bytes.numel() < size:
            self._bytes = self._bytes.new_empty(max(size, 2 * self._bytes.numel()))
        return self._bytes[:size].view(dtype)
