"""Cuts the GPUs of one host as a plan wants them, and undoes it: the only place that calls ``partition`` and ``restore``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from placement.backends import get_backend
from placement.backends.base import SliceHealth
from placement.cleanup import recover_stale_state, stale_ledgers
from placement.errors import InventoryError, PartitionError
from placement.inventory.nvml import memory_by_process
from placement.ledger import Ledger
from placement.types import Gpu, Share, Slice


class Partitioner:
    """Runs on the GPUs' own host, in a process that lives as long as the shares: its end makes the ledger a dead one's."""

    def __init__(self, backend_name: str, run: str, directory: Path | None = None) -> None:
        self._backend = get_backend(backend_name)
        self._directory = directory
        self._ledger = Ledger.open(run, directory)
        self._partitioned: list[str] = []

    def partition(self, wanted: Sequence[tuple[Gpu, tuple[float, ...]]]) -> list[tuple[Share, ...]]:
        """Cut each GPU into shares of these sizes. On any failure nothing is left.

        What dead processes left on these GPUs is mended first.

        Raises:
            PartitionError: a GPU could not be cut.
        """
        self._recover_stale_state([gpu.uuid for gpu, _ in wanted])
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
        """Undo everything, the last GPU first. Safe to call twice.

        Raises:
            PartitionError: something could not be undone: it stays in the ledger. All else was.
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
        """How each slice of this host is, and how much device memory its process holds.

        Args:
            asked: slices, and the processes in them
        """
        states: dict[object, SliceHealth] = {}
        memory: dict[str, dict[int, int]] = {}
        found = []
        for gmi_slice, pid in asked:
            # One question for slices of one daemon or instance: each takes a process, or a call of the driver.
            share = gmi_slice.share
            place = share and (share.gpu_uuid, share.mig_uuid, share.pipe_directory)
            if place not in states:
                states[place] = self._backend.health(gmi_slice)
            device = share and (share.mig_uuid or share.gpu_uuid)
            if device and device not in memory:
                memory[device] = _memory_on(device)
            found.append(replace(states[place], memory_bytes=memory[device].get(pid) if device else None))
        return found

    def evict(self, gmi_slice: Slice, pid: int) -> None:
        """Detach a process that does not answer from its share, before it is killed."""
        self._backend.evict(gmi_slice, pid)

    def _recover_stale_state(self, gpu_uuids: Sequence[str]) -> None:
        for ledger in stale_ledgers(self._directory):
            if any(ledger.steps(gpu_uuid) for gpu_uuid in gpu_uuids):
                for error in recover_stale_state(ledger):
                    raise error


def _memory_on(device_uuid: str) -> dict[int, int]:
    """Empty where the driver does not answer, which is for the slices' states to say."""
    try:
        return memory_by_process(device_uuid)
    except InventoryError:
        return {}
