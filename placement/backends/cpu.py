"""A slice is a set of CPU cores: pinned by affinity, with every thread pool held to its size."""

from __future__ import annotations

from placement.backends.base import Availability, limit_torch_threads, pin_to_cores, thread_environment
from placement.backends.unpartitioned import UnpartitionedBackend
from placement.types import BackendName, Gpu, Node, Slice


class CpuBackend(UnpartitionedBackend):
    """Slices of a machine without a GPU, or of one whose GPUs are left to others."""

    name: BackendName = "cpu"

    def availability(self, node: Node, gpu: Gpu | None) -> Availability:
        """Wherever Ray grants a core."""
        if node.usable_cores:
            return Availability(usable=True, reason=f"node {node.name} has {len(node.usable_cores)} cores")
        return Availability(
            usable=False, reason=f"node {node.name} has no core", hint="Give Ray at least one CPU there"
        )

    def environment(self, gmi_slice: Slice) -> dict[str, str]:
        """Thread counts; no GPU is visible, so that no CUDA context is made by accident."""
        return thread_environment(gmi_slice.num_threads) | {"CUDA_VISIBLE_DEVICES": ""}

    def device(self, gmi_slice: Slice) -> str:
        """Always the CPU."""
        return "cpu"

    def enter(self, gmi_slice: Slice) -> None:
        """Pin to the slice's cores and hold torch to its threads."""
        pin_to_cores(gmi_slice.cores)
        limit_torch_threads(gmi_slice.num_threads)
