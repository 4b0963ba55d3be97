"""Registry of the backends, the mechanisms for sharing a device. To add one, write its module and list it here."""

from __future__ import annotations

from placement.backends.base import Backend
from placement.backends.green import GreenBackend
from placement.backends.mig import MigBackend
from placement.backends.mps import MpsBackend
from placement.backends.unpartitioned import CpuBackend, DirectBackend
from placement.errors import PlanError

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (CpuBackend(), DirectBackend(), MpsBackend(), MigBackend(), GreenBackend())
}


def get_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        PlanError: there is no such backend.
    """
    if name not in BACKENDS:
        raise PlanError(
            f"backend={name!r}",
            f"the backends are {', '.join(BACKENDS)}",
            "Use one of them, or 'auto' to let the plan choose",
        )
    return BACKENDS[name]


__all__ = ["BACKENDS", "Backend", "get_backend"]
