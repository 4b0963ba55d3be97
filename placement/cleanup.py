"""Cleanup: undoes what dead processes left on this host's GPUs."""

from __future__ import annotations

from pathlib import Path

from placement.backends import get_backend
from placement.errors import PartitionError
from placement.ledger import Ledger, all_ledgers, exclusive_lock


def stale_ledgers(directory: Path | None = None) -> list[Ledger]:
    """Ledgers whose process has ended without undoing what it made."""
    return [ledger for ledger in all_ledgers(directory)[0] if ledger.owner.state() == "dead"]


def recover_stale_state(ledger: Ledger) -> list[PartitionError]:
    """Undo a dead process's steps. Steps that could not be undone stay in the ledger; their errors are returned."""
    errors = []
    with exclusive_lock(ledger.path.parent):
        if not ledger.path.exists():
            return []  # another process has recovered it in the meantime
        current = Ledger.load(ledger.path)
        for backend, gpu_uuid in dict.fromkeys((step.backend, step.gpu_uuid) for step in current.steps()):
            try:
                get_backend(backend).restore(gpu_uuid, current)
            except PartitionError as error:
                errors.append(error)
    return errors
