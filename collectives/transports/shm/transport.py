"""The ``ip`` primitive: collectives among processes of one host through shared memory, without a copy through the kernel.

All-reduce of a registered buffer: arrive; each member reduces its share over all members' buffers, chunk by chunk while
the chunk is in its cache, and writes the result into every member's buffer; arrive. Each member reads and writes as many
bytes as the tensor has, which is what one memcpy of it moves.

Other tensors pass through staging memory in pieces (``staging.py``). Where that moves no more bytes, every member reduces
all of each piece straight into its own tensor: one barrier a piece. Otherwise each reduces its share of a piece within
the staging memory of all, while it copies the piece before out and the piece after in; again one barrier a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from collectives.errors import CommunicatorError
from collectives.rendezvous import Member
from collectives.shares import shares
from collectives.transports.base import ReduceOp
from collectives.transports.shm import calls
from collectives.transports.shm.calls import ON_DEVICE, ON_HOST, OPS
from collectives.transports.shm.memory import Region, Segment, page_aligned
from collectives.transports.shm.reduction import Reduction
from collectives.transports.shm.staging import Staging
from collectives.transports.shm.waiting import Barrier

_SMALL_BYTES = 2**15
"""Up to here a barrier costs more than reducing everything on every member."""
_FEW_MEMBERS = 3
"""Among so many, reducing everything on every member moves no more bytes than shares do: copies in 2, reduction
world_size + 1, against copies 2 + 2, reduction 2."""
_HALVES = 2
"""Regions of staging memory; registered buffers come after them."""
_MOST_BUFFERS = ON_DEVICE - 1


class _Chunk(NamedTuple):
    """What one call of a reduction takes, combines into, and where the result is copied to."""

    parts: tuple[Tensor, ...]
    out: Tensor
    copies: tuple[Tensor, ...]


class _ReduceCall(NamedTuple):
    """A reduction as asked for."""

    word: int
    flat: Tensor
    place: int
    reduction: Reduction


class SharedMemoryTransport:
    """One member of a group on one host."""

    def __init__(self, segment: Segment, members: Sequence[Member], rank: int, timeout_s: float) -> None:
        """Wait until every member mapped the segment. ``rank`` is this process's place among ``members``.

        Raises:
            CommunicatorError: a member did not come within ``timeout_s``, or died.
            ValueError: a group of one, which has nothing to exchange.
        """
        if len(members) < 2:
            raise ValueError("shared memory needs at least two members; one is alone")
        self.rank = rank
        self.world_size = len(members)
        self._member = members[rank]
        self._segment = segment
        self._staging = Staging(segment.halves, rank)
        self._regions: list[Region] = list(segment.halves)
        self._numbers: dict[int, int] = {}
        self._barrier = Barrier(segment.words, segment.address, members, rank, timeout_s)
        # What an operation needs beside its tensor is made once and kept.
        self._reduction = lru_cache(maxsize=32)(self._make_reduction)
        self._bounds = lru_cache(maxsize=128)(self._make_bounds)
        self._share = lru_cache(maxsize=128)(self._make_share)
        self._whole = lru_cache(maxsize=128)(self._make_whole)
        self._arrive(calls.encoded("connect"))

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place, on every member."""
        call = self._reduce_call("all_reduce", tensor, op)
        staged_whole = call.place == ON_HOST and self.world_size <= _FEW_MEMBERS
        if staged_whole or self._is_small(call):
            self._reduce_whole(call, takes=True)
        else:
            self._reduce_shares(call, range(self.world_size))

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place on rank 0; what the others' tensors then hold is unspecified."""
        call = self._reduce_call("reduce", tensor, op)
        if self._is_small(call):
            self._reduce_whole(call, takes=self.rank == 0)
        else:
            self._reduce_shares(call, range(1))

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce in place this member's share, [begin, end) by ``collectives.shares``; the rest is unspecified.

        Only registered memory gains by it: of other tensors all is reduced.
        """
        call = self._reduce_call("reduce_scatter", tensor, op)
        if call.place in (ON_HOST, ON_DEVICE):
            self._reduce_shares(call, range(self.world_size))
        else:
            self._reduce_shares(call, range(self.rank, self.rank + 1))
        return self._bounds(call.flat.numel())

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        flat, place = self._placed(tensor.contiguous())
        word = calls.encoded("all_gather", 0, flat.dtype, flat.numel(), place)
        gathered = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        rows = gathered.view(self.world_size, -1)
        if place in (ON_HOST, ON_DEVICE):
            for piece in self._staging.pieces(flat):
                half = self._staging.next_half()
                self._staging.put(flat, piece, half)
                self._staging.settle(flat)
                self._arrive(word)
                for rank in range(self.world_size):
                    self._staging.take(rows[rank], piece, half, rank)
                self._staging.settle(flat)
        else:
            self._arrive(word)
            for row, theirs in zip(rows, self._views(place, flat), strict=True):
                row.copy_(theirs)
            self._arrive(word)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""
        if not 0 <= source < self.world_size:
            raise ValueError(f"source is {source}, of {self.world_size} members; give a rank of this group")
        flat, place = self._placed(tensor)
        word = calls.encoded("broadcast", source, flat.dtype, flat.numel(), place)
        if place in (ON_HOST, ON_DEVICE):
            for piece in self._staging.pieces(flat):
                half = self._staging.next_half()
                if self.rank == source:
                    self._staging.put(flat, piece, half)
                    self._staging.settle(flat)
                self._arrive(word)
                if self.rank != source:
                    self._staging.take(flat, piece, half, source)
                    self._staging.settle(flat)
        else:
            self._arrive(word)
            if self.rank != source:
                flat.copy_(self._views(place, flat)[source])
            self._arrive(word)

    def barrier(self) -> None:
        """Wait until every member is here."""
        self._arrive(calls.encoded("barrier"))

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory, (numel,), on which operations need no copy in or out. All members ask alike, in the same order.

        Views that begin at its start count as it. ``close`` lets go of it; it lives on while the caller keeps it.

        Raises:
            CommunicatorError: there is no memory for it, or a member asked for something else.
            ValueError: there are as many buffers already as calls can name.
        """
        if numel < 0:
            raise ValueError(f"a buffer cannot have {numel} elements")
        if len(self._regions) == _HALVES + _MOST_BUFFERS:
            raise ValueError(f"there are {_MOST_BUFFERS} buffers already; use views of larger ones")
        piece_bytes = page_aligned(numel * dtype.itemsize)
        try:
            if self.rank == 0 and self._barrier.broken is None:
                self._segment.reserve(piece_bytes)  # whose failure the others notice by this one's leaving
            self._arrive(calls.encoded("buffer", 0, dtype, numel))
            region = self._segment.map_region(piece_bytes)
        except OSError as error:
            self.close()
            size = f"{self.world_size * piece_bytes / 2**20:.1f} MiB"
            raise CommunicatorError(
                "buffer", self._member.rank, "nobody", 0.0, f"cannot map {size} of shared memory: {error}"
            ) from error
        self._regions.append(region)
        own = region.views(numel, dtype)[self.rank]
        self._numbers[own.data_ptr()] = len(self._regions) - _HALVES
        return own

    def close(self) -> None:
        """Say goodbye: members that wait for this one get an error. Safe to call twice, and from another thread."""
        self._barrier.leave()
        self._staging.close()
        self._numbers.clear()
        self._regions.clear()
        for cache in (self._bounds, self._share, self._whole, self._reduction):
            cache.cache_clear()
        self._segment.close()

    def _arrive(self, word: int) -> None:
        """A barrier; closes if it fails, for nothing can follow."""
        try:
            self._barrier.arrive(word)
        except CommunicatorError:
            self.close()
            raise

    def _placed(self, tensor: Tensor) -> tuple[Tensor, int]:
        """The tensor flat, and where it is: on the host, on a device, or the number of its registered buffer."""
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous")
        flat = tensor.detach().view(-1)
        if flat.is_cpu:
            return flat, self._numbers.get(flat.data_ptr(), ON_HOST)
        self._staging.pin(flat)
        return flat, ON_DEVICE

    def _reduce_call(self, name: str, tensor: Tensor, op: ReduceOp) -> _ReduceCall:
        flat, place = self._placed(tensor)
        reduction = self._reduction(op, flat.dtype)
        return _ReduceCall(
            calls.encoded(name, OPS.index(op), flat.dtype, flat.numel(), place), flat, place, reduction
        )

    def _is_small(self, call: _ReduceCall) -> bool:
        return call.flat.nbytes <= _SMALL_BYTES and call.place != ON_DEVICE

    def _reduce_whole(self, call: _ReduceCall, takes: bool) -> None:
        """Everyone stages each piece; those that take the result reduce all of it straight into their tensors."""
        for piece in self._staging.pieces(call.flat):
            half = self._staging.next_half()
            self._staging.put(call.flat, piece, half)
            self._arrive(call.word)
            if takes:
                begin, end = piece
                for chunk, parts in self._whole(call.reduction, half, end - begin):
                    call.reduction(parts, call.flat[begin + chunk.start : begin + chunk.stop])

    def _reduce_shares(self, call: _ReduceCall, to: range) -> None:
        """Each member reduces its share into the memory of the members ``to``."""
        if call.place in (ON_HOST, ON_DEVICE):
            self._reduce_shares_staged(call, to)
            return
        self._arrive(call.word)
        self._reduce_share(call.reduction, _HALVES + call.place - 1, call.flat.numel(), to)
        self._arrive(call.word)

    def _reduce_shares_staged(self, call: _ReduceCall, to: range) -> None:
        """While a piece is reduced, the one before is copied out and the one after in: they use the other half."""
        staging, flat = self._staging, call.flat
        pieces = staging.pieces(flat)
        half = staging.next_half()
        staging.put(flat, pieces[0], half)
        staging.settle(flat)
        for index, (begin, end) in enumerate(pieces):
            self._arrive(call.word)
            if index and self.rank in to:
                staging.take(flat, pieces[index - 1], 1 - half, self.rank)
            if index + 1 < len(pieces):
                staging.put(flat, pieces[index + 1], staging.next_half())
            self._reduce_share(call.reduction, half, end - begin, to)
            staging.settle(flat)
            half = 1 - half
        self._arrive(call.word)
        if self.rank in to:
            staging.take(flat, pieces[-1], 1 - half, self.rank)
            staging.settle(flat)

    def _reduce_share(self, reduction: Reduction, region: int, numel: int, to: range) -> None:
        for parts, out, copies in self._share(reduction, region, numel, to):
            reduction(parts, out)
            for copy in copies:
                copy.copy_(out)

    def _make_reduction(self, op: ReduceOp, dtype: torch.dtype) -> Reduction:
        return Reduction(op, dtype, self.world_size)

    def _make_bounds(self, numel: int) -> tuple[int, int]:
        """The elements that this member reduces."""
        return shares(numel, self.world_size)[self.rank]

    def _make_share(self, reduction: Reduction, region: int, numel: int, to: range) -> list[_Chunk]:
        """This member's share of the first elements of a region."""
        members = self._regions[region].views(numel, reduction.dtype)
        begin, end = self._bounds(numel)
        return [
            _Chunk(
                parts=tuple(member[chunk] for member in members),
                out=members[0][chunk],
                copies=tuple(members[rank][chunk] for rank in to if rank != 0),
            )
            for chunk in reduction.chunks(begin, end)
        ]

    def _make_whole(
        self, reduction: Reduction, half: int, numel: int
    ) -> list[tuple[slice, tuple[Tensor, ...]]]:
        """All chunks of a half's first elements, with every member's part."""
        members = self._regions[half].views(numel, reduction.dtype)
        return [(chunk, tuple(member[chunk] for member in members)) for chunk in reduction.chunks(0, numel)]

    def _views(self, place: int, flat: Tensor) -> tuple[Tensor, ...]:
        """Every member's tensor in a registered buffer."""
        return self._regions[_HALVES + place - 1].views(flat.numel(), flat.dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
