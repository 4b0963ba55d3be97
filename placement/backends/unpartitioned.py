"""What backends have in common that change nothing on the host: there is nothing to carve and nothing to undo."""

from __future__ import annotations

from collections.abc import Sequence

from placement.backends.base import Backend, SliceHealth, SliceLimits, validate_sizes
from placement.ledger import Ledger
from placement.types import Gpu, Share, Slice


class UnpartitionedBackend(Backend):
    """A share is a number that processes agree on; nothing enforces it from outside of them."""

    changes_host = False

    def partition(self, gpu: Gpu, sizes: Sequence[float], ledger: Ledger) -> tuple[Share, ...]:
        """Shares without limits."""
        return tuple(
            Share(kind=self.name, gpu_uuid=gpu.uuid, fraction=size) for size in validate_sizes(gpu, sizes)
        )

    def restore(self, gpu_uuid: str, ledger: Ledger) -> None:
        """Nothing was made."""

    def limits(self, gmi_slice: Slice) -> SliceLimits:
        """None."""
        return SliceLimits()

    def health(self, gmi_slice: Slice) -> SliceHealth:
        """Always well: there is nothing of ours that could break."""
        return SliceHealth(state="ok", text=f"{self.name} has nothing of its own that could fail")
