"""NCCL rings among GMIs on different GPUs (``rp``).

[unverified on GPU] Start, environment and end; the operations are those of ``ring.py``, which is tested on CPUs.
The behaviour of ``ProcessGroupNCCL`` is as in PyTorch's source (torch 2.11 to 2.13).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collectives.environment import temporary_environment
from collectives.errors import CommunicatorError
from collectives.limits import call_with_timeout
from collectives.rendezvous import Member, other_members
from collectives.transports.base import TransportGroup
from collectives.transports.gloo import GlooStore
from collectives.transports.ring import RingTransport

Version = tuple[int, int, int]

MIG_SINCE: Version = (2, 31, 0)
"""First NCCL that supports MIG instances of one GPU as separate devices."""

_RING = ("NCCL_ALGO", "Ring")
"""One algorithm for all sizes, with a fixed order of summation: NVLS may differ from run to run."""
_OWN_ERROR_HANDLING = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
"""Without it torch's watchdog thread ends the process when an operation fails or times out."""


def connect(group: TransportGroup) -> NcclTransport:
    """Connect the members by NCCL. [unverified on GPU]"""
    store, device = GlooStore.of(group), group.device
    return NcclTransport(
        store, group.members, group.rank, device=device, timeout_s=group.timeout_s, check=group.check
    )


def nccl_version() -> Version | None:
    """Version of NCCL in this process; None if torch was built without it. [unverified on GPU]"""
    if not dist.is_nccl_available():
        return None
    return parse_version(torch.cuda.nccl.version())


def parse_version(parts: Sequence[int | str]) -> Version:
    """The first three numbers of torch's version tuple: (2, 30, 7) or, for a pre-release, (2, 30, 7, "rc1").

    Raises:
        ValueError: there are not three numbers.
    """
    numbers = [part for part in parts[:3] if isinstance(part, int)]
    if len(numbers) != 3:
        raise ValueError(f"{parts!r} is no NCCL version: expected three numbers")
    return numbers[0], numbers[1], numbers[2]


class NcclTransport(RingTransport):
    """NCCL among members with a GPU each. [unverified on GPU]"""

    def __init__(
        self,
        store: GlooStore,
        members: Sequence[Member],
        rank: int,
        *,
        device: torch.device,
        timeout_s: float,
        check: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        """Connect to all members through the first member's store, and all-reduce one number.

        ``rank`` counts within ``members``; ``check`` as for ``RingTransport``.

        Raises:
            CommunicatorError: NCCL is missing or rejects these members, or one did not come within ``timeout_s``.
        """
        me = members[rank].rank
        if nccl_version() is None:
            raise CommunicatorError("connect", me, "nobody", 0.0, "torch was built without NCCL")
        os.environ.setdefault(*_RING)
        # A namespace in the store, so that the caller may use other keys.
        names = dist.PrefixStore("nccl", store.store)

        def connected() -> Any:
            """The group after its first operation, which makes the connections."""
            group = _group(names, rank, len(members), timeout_s)
            group.eager_connect_single_device(device)
            group.allreduce(torch.zeros(1, device=device), dist.ReduceOp.SUM).wait()
            return group

        begin = time.monotonic()
        try:
            # In a thread: NCCL waits forever for members that do not come.
            group = call_with_timeout(timeout_s, connected)
        except (RuntimeError, TimeoutError) as error:
            detail = " ".join(str(error).split())  # NCCL's reason is on the last line
            waited_s = time.monotonic() - begin
            awaited = ", ".join(map(str, other_members(members, rank)))
            raise CommunicatorError("connect", me, awaited, waited_s, detail) from error
        super().__init__(group, members, rank, device=device, timeout_s=timeout_s, check=check)

    def _leave(self, last: list[Any]) -> None:
        """Abort: ends kernels that wait for a lost member, and waits for no other member."""
        last[0].abort()


def _group(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    # Only for this group: others of this process keep theirs.
    with temporary_environment(_OWN_ERROR_HANDLING):
        return nccl(store, rank, world_size, options)
