"""What processes that have ended left on this host's GPUs, and undoing it."""

from __future__ import annotations

from pathlib import Path

from placement.backends import get_backend
from placement.errors import CarvingError
from placement.ledger import Ledger, all_ledgers, exclusive


def left_behind(directory: Path | None = None) -> list[Ledger]:
    """Ledgers whose process has ended without undoing what it made."""
    return [ledger for ledger in all_ledgers(directory)[0] if ledger.owner.state() == "dead"]


def mend(ledger: Ledger) -> list[CarvingError]:
    """Undo what a dead process left, and forget it; what could not be undone stays in the ledger and is returned."""
    errors = []
    with exclusive(ledger.path.parent):
        if not ledger.path.exists():
            return []  # somebody else mended it meanwhile
        current = Ledger.load(ledger.path)
        for backend, gpu_uuid in dict.fromkeys((step.backend, step.gpu_uuid) for step in current.steps()):
            try:
                get_backend(backend).restore(gpu_uuid, current)
            except CarvingError as error:
                errors.append(error)
    return errors
