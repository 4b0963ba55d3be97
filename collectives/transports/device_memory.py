"""Memory of one device that several processes see: each makes a piece, and opens the others' through torch's handles.

On a GPU a handle is one of CUDA IPC, and torch counts in a file of /dev/shm who still uses what it names. On a CPU it is a
descriptor of anonymous shared memory. [unverified on GPU] that handles open between MPS clients.
"""

from __future__ import annotations

import os
import pickle
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Protocol

import torch
import torch.multiprocessing  # teaches ForkingPickler to send tensors as handles
from torch import Tensor

from collectives.exchange import SupportsAllGather, exchange
from collectives.rendezvous import Member


class ControlTransport(SupportsAllGather, Protocol):
    """What members of one device need of a transport on their host: any ``Transport`` offers it."""

    def barrier(self) -> None:
        """Wait until every member is here."""
        ...

    def close(self) -> None:
        """Leave: members that wait for this one get an error."""
        ...


@dataclass(frozen=True)
class DeviceBuffer:
    """One symmetric buffer: every member's piece of it, by rank, as this process sees them."""

    number: int
    views: tuple[Tensor, ...]

    @classmethod
    def share(
        cls,
        control: ControlTransport,
        number: int,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        synchronize: Callable[[], None],
    ) -> DeviceBuffer:
        """Make this member's zeroed piece and open the others'. All members call it at once.

        Args:
            control: among the members, on their host
            number: what to know the buffer by
            numel: elements of each piece
            dtype: their type
            device: of all pieces
            synchronize: waits until the device has done what this thread gave it

        Raises:
            RuntimeError: the memory cannot be shared.
            CommunicatorError: a member is lost.
        """
        own = torch.zeros(numel, dtype=dtype, device=device)
        synchronize()
        ranks = range(control.world_size)
        # A handle for each receiver: torch counts how many have to give the memory back.
        handles = [bytes(ForkingPickler.dumps(own)) if rank != control.rank else b"" for rank in ranks]
        given = [pickle.loads(message) for message in exchange(control, pickle.dumps(handles))]
        views = tuple(
            own if rank == control.rank else pickle.loads(given[rank][control.rank]) for rank in ranks
        )
        if strangers := {str(view.device) for view in views} - {str(device)}:
            raise RuntimeError(f"members' memory is on {', '.join(sorted(strangers))} and not on {device}")
        control.barrier()  # who hands out a handle stays until it is opened
        return cls(number, views)


def remove_leftovers(members: Sequence[Member]) -> None:
    """Remove the files in which killed members' torch counted who uses their memory; nobody else would."""
    for member in members:
        if _has_ended(member.pid):
            for path in Path("/dev/shm").glob(f"torch_{member.pid}_*"):
                path.unlink(missing_ok=True)


def _has_ended(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # a kernel without such descriptors
        return False
    try:
        news = select.poll()
        news.register(descriptor, select.POLLIN)
        return bool(news.poll(0))
    finally:
        os.close(descriptor)
