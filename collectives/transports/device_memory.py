"""Device memory shared between processes: each allocates a piece, and opens the others' pieces by torch's handles.

On a GPU a handle is a CUDA IPC handle, and torch counts its users in a file of /dev/shm. On a CPU it is a descriptor of
anonymous shared memory. [unverified on GPU] that handles open between MPS clients.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing  # teaches ForkingPickler to send tensors as handles
from torch import Tensor

from collectives.objects import all_gather_objects
from collectives.process_watcher import has_ended
from collectives.rendezvous import Member
from collectives.transports.base import Transport


@dataclass(frozen=True)
class DeviceBuffer:
    """One symmetric buffer: every member's piece by rank, as mapped by this process."""

    number: int
    views: tuple[Tensor, ...]

    @classmethod
    def share(
        cls,
        control: Transport,
        number: int,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        synchronize: Callable[[], None],
    ) -> DeviceBuffer:
        """Allocate this member's zeroed piece and open the others'. All members call it at the same time.

        ``control`` connects the members on their host; ``synchronize`` waits until the device has finished this
        thread's work.

        Raises:
            RuntimeError: the memory cannot be shared.
            CommunicatorError: a member is lost.
        """
        own = torch.zeros(numel, dtype=dtype, device=device)
        synchronize()
        ranks = range(control.world_size)
        # One handle per receiver: torch counts the references to the memory.
        handles = [bytes(ForkingPickler.dumps(own)) if rank != control.rank else b"" for rank in ranks]
        received = all_gather_objects(handles, control)
        views = tuple(
            own if rank == control.rank else pickle.loads(received[rank][control.rank]) for rank in ranks
        )
        if strangers := {str(view.device) for view in views} - {str(device)}:
            raise RuntimeError(f"members' memory is on {', '.join(sorted(strangers))} and not on {device}")
        control.barrier()  # the owner of a handle must live until all have opened it
        return cls(number, views)


def remove_leftovers(members: Sequence[Member]) -> None:
    """Remove torch's reference count files of killed members, which nothing else removes."""
    for member in members:
        if has_ended(member.pid):
            for path in Path("/dev/shm").glob(f"torch_{member.pid}_*"):
                path.unlink(missing_ok=True)
