"""Base class of the backends that change nothing on the host (cpu, direct, green): nothing to partition, nothing to undo."""

from __future__ import annotations

from collections.abc import Sequence

from placement.backends.base import Backend, SliceHealth, SliceLimits, validate_sizes
from placement.ledger import Ledger
from placement.types import Gpu, Share, Slice


class UnpartitionedBackend(Backend):
    """A share is a number that processes respect; nothing enforces it from outside of them."""

    changes_host = False

    def partition(self, gpu: Gpu, sizes: Sequence[float], ledger: Ledger) -> tuple[Share, ...]:
        """Shares without limits."""
        return tuple(
            Share(kind=self.name, gpu_uuid=gpu.uuid, fraction=size) for size in validate_sizes(gpu, sizes)
        )

    def restore(self, gpu_uuid: str, ledger: Ledger) -> None:
        """A no-op."""

    def limits(self, gmi_slice: Slice) -> SliceLimits:
        """No limits."""
        return SliceLimits()

    def health(self, gmi_slice: Slice) -> SliceHealth:
        """Always ok."""
        return SliceHealth(state="ok", text=f"{self.name} creates nothing on the host that could fail")
