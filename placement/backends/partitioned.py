"""Base class of the backends that partition the GPU on the host (MPS, MIG). Environment variables select the share."""

from __future__ import annotations

import os
from abc import abstractmethod

from placement.backends.base import (
    Backend,
    SliceLimits,
    limit_torch_threads,
    pin_to_cores,
    thread_environment,
)
from placement.errors import SliceError
from placement.types import Share, Slice


class PartitionedBackend(Backend):
    """The share exists before its process enters it, and is enforced from outside of the process."""

    changes_host = True

    @abstractmethod
    def share_environment(self, share: Share) -> dict[str, str]:
        """Environment variables that select the share; read by the process's first CUDA call."""

    def environment(self, gmi_slice: Slice) -> dict[str, str]:
        """Thread counts, and the share once the GPU is partitioned."""
        if gmi_slice.share is None:
            return super().environment(gmi_slice)
        return thread_environment(gmi_slice) | self.share_environment(gmi_slice.share)

    def limits(self, gmi_slice: Slice) -> SliceLimits:
        """Limits of the share; none before partitioning."""
        if gmi_slice.share is None:
            return SliceLimits()
        return SliceLimits(sm_count=gmi_slice.share.sm_count, memory_bytes=gmi_slice.share.memory_bytes)

    def enter(self, gmi_slice: Slice) -> None:
        """Pin to the slice's cores, limit torch's threads, and set the share's environment variables.

        Raises:
            SliceError: the slice has no share yet, or this process has made CUDA calls already.
        """
        import torch  # the slice's thread counts have to be in place before this import

        if gmi_slice.share is None or torch.cuda.is_initialized():
            missing, late = "a slice without a partition", "a process that has initialised CUDA already"
            raise SliceError(
                f"a share of {gmi_slice.gpu_uuid}",
                missing if gmi_slice.share is None else late,
                "Partition the GPU, then enter the slice before any CUDA call",
            )
        pin_to_cores(gmi_slice.cores)
        limit_torch_threads(gmi_slice.num_threads)
        os.environ.update(self.environment(gmi_slice))
