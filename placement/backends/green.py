"""CUDA green contexts: a process confines itself to a number of SMs, without a daemon. [unverified on GPU]

No memory limit, no fault isolation, and no reservation: other processes are still time-sliced with this one. It shows how a
role performs with fewer SMs. PyTorch's wrapper is in beta (torch.cuda.green_contexts).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Any

from placement.backends.base import Availability, SliceLimits, refused, validate_sizes
from placement.backends.unpartitioned import DirectBackend
from placement.errors import PartitionError, PlanError, SliceError
from placement.ledger import Ledger
from placement.types import FRACTION_STEP, BackendName, Gpu, Node, Share, Slice

FIRST_CUDA = (12, 4)
"""First CUDA version with green contexts in the driver."""


class GreenBackend(DirectBackend):
    """Like ``direct``, but each process confines itself to its share of the SMs."""

    name: BackendName = "green"

    def __init__(self) -> None:
        # Kept for the life of the process: CUDA destroys the context with the object.
        self._context: Any = None

    def availability(self, node: Node, gpu: Gpu | None) -> Availability:
        """Usable if the driver has green contexts and the GPU's SM count is known. ``enter`` checks torch."""
        found = super().availability(node, gpu)
        if not found.usable or gpu is None:
            return found
        if node.cuda_version is not None and node.cuda_version < FIRST_CUDA:
            has = ".".join(map(str, node.cuda_version))
            return refused(
                f"node {node.name}'s driver supports CUDA {has}, and green contexts need 12.4",
                "Update the driver to 550 or newer, or use backend='mps'",
            )
        if gpu.sm_count is None:
            return refused(f"the number of SMs of {gpu.uuid} is not known", "Use backend='mps'")
        return Availability(usable=True, reason="the driver supports green contexts")

    def predict_limits(self, node: Node, gpu: Gpu, sizes: Sequence[float]) -> tuple[SliceLimits, ...]:
        """SMs in whole groups; no memory limit."""
        super().predict_limits(node, gpu, sizes)
        if min(_sms(gpu, size) for size in sizes) == 0:
            raise PlanError(*_too_small(gpu, min(sizes)))
        return tuple(SliceLimits(sm_count=_sms(gpu, size)) for size in sizes)

    def partition(self, gpu: Gpu, sizes: Sequence[float], ledger: Ledger) -> tuple[Share, ...]:
        """Shares with SM counts, rounded down to whole groups.

        Raises:
            PartitionError: a share is smaller than one group.
        """
        counts = [_sms(gpu, size) for size in validate_sizes(gpu, sizes)]
        if min(counts) == 0:
            raise PartitionError(*_too_small(gpu, min(sizes)))
        return tuple(Share(kind="green", gpu_uuid=gpu.uuid, sm_count=count) for count in counts)

    def limits(self, gmi_slice: Slice) -> SliceLimits:
        """The SM limit."""
        return SliceLimits(sm_count=None if gmi_slice.share is None else gmi_slice.share.sm_count)

    def enter(self, gmi_slice: Slice) -> None:
        """Pin to cores, limit torch's threads, and make a green context with the share's SMs current.

        Raises:
            SliceError: the slice has no share yet, or this torch or its CUDA has no green contexts.
        """
        super().enter(gmi_slice)
        from torch.cuda import green_contexts  # the slice's environment has to be in place before this import

        if gmi_slice.share is None or gmi_slice.share.sm_count is None:
            raise SliceError("a number of SMs", "a slice without a partition", "Partition the GPU first")
        wanted = f"a green context of {gmi_slice.share.sm_count} SMs"
        if not green_contexts.SUPPORTED:
            raise SliceError(wanted, "a torch without green contexts", "Use backend='mps' or 'direct'")
        try:
            self._context = green_contexts.GreenContext.create(num_sms=gmi_slice.share.sm_count, device_id=0)
            self._context.set_context()
        except RuntimeError as error:
            raise SliceError(wanted, f"an error of CUDA: {error}", "Use backend='mps' or 'direct'") from error


def _sms(gpu: Gpu, size: float) -> int:
    """SMs of a share, in whole groups."""
    group = _sms_per_group(gpu)
    return floor((gpu.sm_count or 0) * (size + FRACTION_STEP) / group) * group  # as mps.sms_of


def _too_small(gpu: Gpu, size: float) -> tuple[str, str, str]:
    return (
        f"{size:g} of the {gpu.sm_count} SMs of {gpu.uuid}",
        f"green contexts have at least {_sms_per_group(gpu)} SMs",
        "Set gmis_per_gpu lower",
    )


def _sms_per_group(gpu: Gpu) -> int:
    """Granularity of a green context in SMs (cuDevSmResourceSplitByCount: 8 from Hopper on, else 2 to 4)."""
    return 8 if gpu.compute_capability is None or gpu.compute_capability >= (9, 0) else 4
