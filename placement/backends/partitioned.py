"""What backends have in common that make shares on the host: a process enters its share by what CUDA reads at its start."""

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
    """A share is there before its process enters it, and is enforced from outside of it."""

    changes_host = True

    @abstractmethod
    def share_environment(self, share: Share) -> dict[str, str]:
        """What a process's first CUDA call reads to land in the share."""

    def environment(self, gmi_slice: Slice) -> dict[str, str]:
        """Thread counts; once carved, the share. Before, the GPU is for Ray to choose and to make the only visible one."""
        if gmi_slice.gpu_uuid is None:
            raise SliceError("a GPU", f"none in the slice {gmi_slice.label()}", "Use the cpu backend for it")
        variables = thread_environment(gmi_slice.num_threads)
        if gmi_slice.share is None:
            return variables | {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
        return variables | self.share_environment(gmi_slice.share)

    def device(self, gmi_slice: Slice) -> str:
        """The only device that the process sees."""
        return "cuda:0"

    def limits(self, gmi_slice: Slice) -> SliceLimits:
        """What was carved; nothing before."""
        if gmi_slice.share is None:
            return SliceLimits()
        return SliceLimits(sm_count=gmi_slice.share.sm_count, memory_bytes=gmi_slice.share.memory_bytes)

    def enter(self, gmi_slice: Slice) -> None:
        """Pin to the slice's cores, hold torch to its threads, and set what CUDA reads at its first call.

        Raises:
            SliceError: the slice was not carved, or this process has made CUDA calls already.
        """
        import torch  # the slice's thread counts have to be in place before this import

        if gmi_slice.share is None or torch.cuda.is_initialized():
            unpartitioned = gmi_slice.share is None
            there = "a slice that was not carved" if unpartitioned else "a process that CUDA already runs in"
            raise SliceError(
                f"a share of {gmi_slice.gpu_uuid}", there, "Enter the slice first, after the carving"
            )
        pin_to_cores(gmi_slice.cores)
        limit_torch_threads(gmi_slice.num_threads)
        os.environ.update(self.environment(gmi_slice))
