"""The ``device`` primitive: collectives among GMIs of one GPU, which read each other's device memory by CUDA IPC.

All members open every registered buffer through an IPC handle, which works between MPS clients of one GPU. An all-reduce:

1. Device barrier: each member waits for its own stream, then for the others at a barrier on the host.
2. Each member reduces its share over all buffers, in rank order, into its own buffer.
3. Device barrier.
4. Each member copies the other shares out of the others' buffers; device barrier.

No member writes to another's memory: one that was suspended, and given up, cannot corrupt the others when it resumes.
A control transport in shared memory among the same members provides the barrier, exchanges the handles, detects lost members
and compares the calls.

The same code runs on CPU tensors through torch's shared memory, for tests without a GPU.
[unverified on GPU] handles between MPS clients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from collectives.errors import CommunicatorError
from collectives.limits import poll_until_done
from collectives.rendezvous import Member
from collectives.transports import calls
from collectives.transports.base import ReduceOp, ReusedMemory, Transport, TransportGroup, combine, shares
from collectives.transports.device_memory import DeviceBuffer, remove_leftovers
from collectives.transports.shm import transport as shared_memory

_SCRATCH = -1
_MIN_SCRATCH_BYTES = 2**20


def connect(group: TransportGroup) -> DeviceTransport:
    """Connect the members of one GPU. Raises CommunicatorError where they cannot share host memory."""
    control = shared_memory.connect(group)
    if isinstance(control, str):
        raise CommunicatorError("connect", group.members[group.rank].rank, "nobody", 0.0, control)
    return DeviceTransport(control, group.members, group.device, group.timeout_s)


class DeviceTransport:
    """Transport of one member on a GPU that all members share; it owns ``control`` and closes it.

    Work that fills a tensor must be on the calling thread's current stream, or finished. Results are complete on return.
    """

    def __init__(
        self, control: Transport, members: Sequence[Member], device: torch.device, timeout_s: float
    ) -> None:
        """``control`` connects ``members`` and limits the waits for them; ``timeout_s`` limits waits for the device."""
        self.rank = control.rank
        self.world_size = control.world_size
        self._control, self._members = control, members
        self._me = members[control.rank].rank
        self._device = torch.empty(0, device=device).device  # with its index
        self._timeout_s = timeout_s
        self._registered: dict[int, DeviceBuffer] = {}
        self._scratch: DeviceBuffer | None = None
        self._sum = ReusedMemory(device)
        self._broken: str | None = None
        self._num_operations = 0

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place, on every member."""
        with self._operation("all_reduce", tensor, op, layout=layout) as views:
            self._reduce_share(views, op)
            self._gather_shares(views, tensor)

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place on rank 0; what the others' tensors then hold is unspecified."""
        with self._operation("reduce", tensor, op, layout=layout) as views:
            self._reduce_share(views, op)
            self._gather_shares(views, tensor if self.rank == 0 else None)

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce in place this member's share, [begin, end) by ``shares``; the rest is unspecified."""
        begin, end = shares(tensor.numel(), self.world_size)[self.rank]
        with self._operation("reduce_scatter", tensor, op) as views:
            own = views[self.rank]
            self._reduce_share(views, op)
            self._device_barrier()
            if own.data_ptr() != tensor.data_ptr():
                tensor.detach().view(-1)[begin:end].copy_(own[begin:end])
                self._synchronize()
        return begin, end

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        gathered = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device=self._device)
        with self._operation("all_gather", tensor.detach().contiguous().view(-1)) as views:
            for row, view in zip(gathered, views, strict=True):
                row.view(-1).copy_(view)
            self._device_barrier()
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0, layout: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""
        with self._operation("broadcast", tensor, detail=source, layout=layout) as views:
            if self.rank != source:
                tensor.detach().view(-1).copy_(views[source])
            self._device_barrier()

    def barrier(self) -> None:
        """Wait until every member has arrived."""
        with self._translated("barrier"):
            self._control.barrier()

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory, (numel,), that all members of the GPU read and write. Freed when all have closed.

        Raises:
            CommunicatorError: members requested different sizes, or cannot share the device's memory.
        """
        number = len(self._registered)
        with self._translated("buffer"):
            self._check_same_call(calls.encode_call("buffer", 0, dtype, numel))
            if not numel:  # it has no address to register
                return torch.zeros(0, dtype=dtype, device=self._device)
            registered = DeviceBuffer.share(
                self._control, number, numel, dtype, self._device, self._synchronize
            )
        own = registered.views[self.rank]
        self._registered[own.data_ptr()] = registered
        return own

    def close(self) -> None:
        """Leave, and unmap the others' memory. Safe to call twice."""
        self._broken = self._broken or "this communicator is closed"
        self._control.close()
        self._registered.clear()
        self._scratch = None
        self._sum = ReusedMemory(self._device)
        remove_leftovers(self._members)

    @contextmanager
    def _operation(
        self, call: str, tensor: Tensor, op: ReduceOp = "sum", detail: int = 0, layout: int = 0
    ) -> Iterator[tuple[Tensor, ...]]:
        """Begin an operation: compare the calls; yields every member's tensor, by rank, with complete contents."""
        if tensor.device != self._device:
            raise ValueError(f"{call} takes tensors on {self._device}, not one on {tensor.device}")
        with self._translated(call):
            registered = self._find(tensor)
            place = registered.number + 1 if registered else calls.ON_DEVICE
            self._synchronize()
            detail = calls.OPS.index(op) if "reduce" in call else detail
            self._check_same_call(
                calls.encode_call(call, detail, tensor.dtype, tensor.numel(), place, layout)
            )
            if registered is not None:
                yield tuple(view[: tensor.numel()] for view in registered.views)
            else:
                yield self._through_scratch(tensor)

    def _find(self, tensor: Tensor) -> DeviceBuffer | None:
        """The registered buffer that the tensor begins; None if it begins none."""
        found = self._registered.get(tensor.data_ptr())
        if found is None or found.views[0].dtype != tensor.dtype or found.views[0].numel() < tensor.numel():
            return None
        return found

    def _through_scratch(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Copy the tensor to shared scratch memory, which grows as needed, equally on all members."""
        size = tensor.numel() * tensor.element_size()
        if self._scratch is None or self._scratch.views[0].numel() < size:
            capacity = max(_MIN_SCRATCH_BYTES, 1 << (size - 1).bit_length())
            self._scratch = DeviceBuffer.share(
                self._control, _SCRATCH, capacity, torch.uint8, self._device, self._synchronize
            )
        views = tuple(view[:size].view(tensor.dtype) for view in self._scratch.views)
        views[self.rank].copy_(tensor.detach().view(-1))
        self._device_barrier()
        return views

    def _reduce_share(self, views: Sequence[Tensor], op: ReduceOp) -> None:
        """Reduce this member's share over all views in rank order, into its own view.

        No other member reads or writes these elements before the next barrier, so the result may overwrite a contribution.
        """
        begin, end = shares(views[0].numel(), self.world_size)[self.rank]
        parts = [view[begin:end] for view in views]
        total = self._sum.view(end - begin, parts[0].dtype)
        combine(parts, total, op)
        views[self.rank][begin:end].copy_(total)

    def _gather_shares(self, views: Sequence[Tensor], tensor: Tensor | None) -> None:
        """Once all have reduced their shares, copy them to ``tensor``; None: this member gets no result."""
        self._device_barrier()
        if tensor is not None:
            result = tensor.detach().view(-1)
            for view, (begin, end) in zip(views, shares(len(result), self.world_size), strict=True):
                if view.data_ptr() != result.data_ptr():
                    result[begin:end].copy_(view[begin:end])
        self._device_barrier()  # before a member overwrites what others read

    def _check_same_call(self, word: int) -> None:
        """Wait for all members, and compare their calls."""
        self._num_operations += 1
        gathered = self._control.all_gather(calls.signature(word, self._num_operations))
        calls.refuse_difference(gathered, self.rank, self._members)

    def _device_barrier(self) -> None:
        """Wait until all members' streams have finished their earlier work."""
        self._synchronize()
        self._control.barrier()

    def _synchronize(self) -> None:
        """Wait until the device has finished this thread's work."""
        if self._device.type != "cuda":
            return
        with torch.cuda.device(self._device):
            done = torch.cuda.Event()
            done.record()
            poll_until_done(done.query, self._timeout_s, lambda: None)  # no other process is involved

    @contextmanager
    def _translated(self, call: str) -> Iterator[None]:
        """Close after an error, so that the others fail at once, and raise it as a CommunicatorError."""
        if self._broken is not None:
            raise CommunicatorError(call, self._me, "nobody", 0.0, self._broken)
        begin = time.monotonic()
        try:
            yield
        except BaseException as error:
            self._broken = f"an earlier {call} failed: {error}"
            self.close()
            if isinstance(error, CommunicatorError) or not isinstance(error, Exception):
                raise
            waited_s = time.monotonic() - begin
            raise CommunicatorError(call, self._me, str(self._device), waited_s, str(error)) from error
