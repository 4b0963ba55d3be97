"""Tensors in memory that the members of a group on one host map: each reads and writes at any time, without messages."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor

from collectives.communicator import Communicator
from collectives.experience import file_layout
from collectives.experience.errors import ChannelError
from collectives.experience.file_layout import SharedFile
from collectives.objects import all_gather_objects
from collectives.rendezvous import host_identity
from collectives.transports.shm.memory import CACHE_LINE_BYTES

SHARED_TENSORS_MAGIC = 0x3130544853594152
LOCK_LIMIT_S = 60.0
"""How long a member waits for the others' lock, which they hold for microseconds."""
_NAME = "shared-tensors"


class SharedTensors:
    """Named flat tensors, zero at first. Nothing orders the members' writes but ``lock``.

    ::

        shared = SharedTensors(communicator, {"parameters": (1000, torch.float32)})
        shared["parameters"].add_(step)   # at once in every member
    """

    _lock: int | None = None

    def __init__(self, communicator: Communicator, sizes: Mapping[str, tuple[int, torch.dtype]]) -> None:
        """Collective: every member passes the same sizes (elements, dtype).

        Raises:
            ChannelError: members are on several hosts, there is not enough memory, or this host is not supported.
        """
        _refuse_several_hosts(communicator)
        offsets = [CACHE_LINE_BYTES]  # behind the magic number
        for numel, dtype in sizes.values():
            offsets.append(offsets[-1] + -(-numel * dtype.itemsize // CACHE_LINE_BYTES) * CACHE_LINE_BYTES)
        self._file = _common_file(communicator, offsets[-1])
        self._tensors = {
            name: torch.frombuffer(self._file.bytes, dtype=dtype, count=numel, offset=offset)
            for (name, (numel, dtype)), offset in zip(sizes.items(), offsets, strict=False)
        }
        # An open file description of its own: locks of two members exclude each other, also within one process.
        self._lock = os.open(self._file.endpoint.partition("#")[0], os.O_RDWR | os.O_CLOEXEC)
        _holders.add(self)
        communicator.barrier()  # until all have mapped it, rank 0 keeps it open

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of this name, (elements,)."""
        return self._tensors[name]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude the other members' ``lock``. A member that ends meanwhile leaves it open: the kernel holds it.

        Not in a child that was forked: it has no lock of its own.

        Raises:
            ChannelError: another member has held it for ``LOCK_LIMIT_S``, as one that was stopped does.
        """
        assert self._lock is not None
        _take(self._lock)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close_lock(self) -> None:
        """Close the lock's descriptor: the lock is held until every copy of it is closed. Safe to call twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __del__(self) -> None:
        self.close_lock()


def _take(lock: int) -> None:
    """flock has no time limit of its own: ask again, ever more rarely."""
    deadline, pause_s = time.monotonic() + LOCK_LIMIT_S, 1e-5
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ChannelError(
                    _NAME,
                    f"another member has held its lock for {LOCK_LIMIT_S:.0f} s: see whether a GMI's process is stopped",
                ) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-2)
        else:
            return


_holders: WeakSet[SharedTensors] = WeakSet()


def _after_fork_in_child() -> None:
    for holder in _holders:  # else a child would keep the lock of a member that ends
        holder.close_lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _common_file(communicator: Communicator, size: int) -> SharedFile:
    """Rank 0's file, mapped by every member."""
    own = None
    if communicator.rank == 0:
        own = SharedFile.create(_NAME, size)
        own.words[file_layout.MAGIC] = SHARED_TENSORS_MAGIC
    endpoint = all_gather_objects(None if own is None else own.endpoint, communicator)[0]
    return own or SharedFile.open(_NAME, endpoint, SHARED_TENSORS_MAGIC)


def _refuse_several_hosts(communicator: Communicator) -> None:
    hosts = set(all_gather_objects(host_identity(), communicator))
    if len(hosts) > 1:
        raise ChannelError(
            _NAME,
            f"its members are on {len(hosts)} hosts, which share no memory: use GMIs of one host, or an algorithm that "
            "sends experience or gradients (impala, appo, ppo)",
        )
