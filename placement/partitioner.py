"""Partitioner: partitions the GPUs of one host for a plan, and undoes it. Only it calls ``partition`` and ``restore``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from placement.backends import get_backend
from placement.backends.base import SliceHealth
from placement.errors import InventoryError, LedgerError, PartitionError
from placement.inventory.nvml import memory_by_process
from placement.ledger import Ledger, all_ledgers, exclusive_lock
from placement.types import Gpu, Share, Slice

_logger = logging.getLogger(__name__)


class Partitioner:
    """Runs on the GPUs' own host, in a process that lives as long as the shares. When it dies, its ledger becomes stale."""

    def __init__(self, backend_name: str, run: str, directory: Path | None = None) -> None:
        self._backend = get_backend(backend_name)
        self._directory = directory
        self._ledger = Ledger.open(run, directory)
        self._partitioned: list[str] = []

    def partition(self, wanted: Sequence[tuple[Gpu, tuple[float, ...]]]) -> list[tuple[Share, ...]]:
        """Partition each GPU into shares of these sizes. On any failure everything is rolled back.

        First undoes what dead processes left on these GPUs.

        Raises:
            PartitionError: a GPU could not be partitioned.
        """
        for ledger in stale_ledgers(self._directory):
            if any(ledger.steps(gpu.uuid) for gpu, _ in wanted):
                for error in recover_stale_state(ledger):
                    raise error
        try:
            shares = []
            for gpu, sizes in wanted:
                self._partitioned.append(gpu.uuid)
                shares.append(self._backend.partition(gpu, sizes, self._ledger))
            return shares
        except BaseException as error:
            try:
                self.restore()
            except PartitionError as left:
                error.add_note(f"Left behind, for `rayagi cleanup` on this host: {left}")
            raise

    def restore(self) -> None:
        """Undo everything, the last GPU first. Idempotent.

        Raises:
            PartitionError: something could not be undone and stays in the ledger; everything else was undone.
        """
        errors = []
        for gpu_uuid in reversed(self._partitioned):
            try:
                self._backend.restore(gpu_uuid, self._ledger)
            except PartitionError as error:
                errors.append(error)
        self._partitioned = list(dict.fromkeys(step.gpu_uuid for step in reversed(self._ledger.steps())))
        if errors:
            raise errors[0]

    def health(self, asked: Sequence[tuple[Slice, int]]) -> list[SliceHealth]:
        """Health of each slice of this host, with the device memory that its process holds.

        Args:
            asked: pairs of a slice and the pid of its process
        """
        states: dict[object, SliceHealth] = {}
        memory: dict[str, dict[int, int]] = {}
        found = []
        for gmi_slice, pid in asked:
            # One query per daemon or instance: each costs a subprocess or a driver call.
            share = gmi_slice.share
            place = share and (share.gpu_uuid, share.mig_uuid, share.pipe_directory)
            if place not in states:
                states[place] = self._backend.health(gmi_slice)
            device = share and (share.mig_uuid or share.gpu_uuid)
            if device and device not in memory:
                memory[device] = {}
                with suppress(InventoryError):  # the driver does not respond, which ``state`` reports
                    memory[device] = memory_by_process(device)
            found.append(replace(states[place], memory_bytes=memory[device].get(pid) if device else None))
        return found

    def evict(self, gmi_slice: Slice, pid: int) -> None:
        """Detach an unresponsive process from its share, before it is killed."""
        self._backend.evict(gmi_slice, pid)


def stale_ledgers(directory: Path | None = None) -> list[Ledger]:
    """Ledgers whose process has ended without undoing what it made."""
    return [ledger for ledger in all_ledgers(directory)[0] if ledger.owner_state() == "dead"]


def recover_this_host(directory: Path | None = None) -> None:
    """Undo what dead processes left, before a run is planned around it. What cannot be undone is logged."""
    for ledger in stale_ledgers(directory):
        left: list[Exception]
        try:
            left = [*recover_stale_state(ledger)]
        except (LedgerError, PartitionError) as error:
            left = [error]
        for each in left:
            _logger.warning("what run %s left cannot be undone: %s", ledger.run, each)


def recover_stale_state(ledger: Ledger) -> list[PartitionError]:
    """Undo a dead process's steps. Steps that could not be undone stay in the ledger; their errors are returned."""
    errors = []
    with exclusive_lock(ledger.path.parent):
        if not ledger.path.exists():
            return []  # another process has recovered it in the meantime
        current = Ledger.load(ledger.path)
        if not current.owner.is_of_this_boot:
            # Restarting the host has destroyed its MIG instances: what is in their places is somebody else's.
            for step in current.steps(backend="mig"):
                current.erase(step)
        for backend, gpu_uuid in dict.fromkeys((step.backend, step.gpu_uuid) for step in current.steps()):
            try:
                get_backend(backend).restore(gpu_uuid, current)
            except PartitionError as error:
                errors.append(error)
    return errors
