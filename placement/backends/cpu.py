"""CPU backend: a slice is a set of cores. Affinity pins the process, and every thread pool has the slice's size."""

from __future__ import annotations

from placement.backends.base import Availability, limit_torch_threads, pin_to_cores, thread_environment
from placement.backends.unpartitioned import UnpartitionedBackend
from placement.types import BackendName, Gpu, Node, Slice


class CpuBackend(UnpartitionedBackend):
    """Slices of a machine without a GPU, or of one whose GPUs are not used."""

    name: BackendName = "cpu"

    def availability(self, node: Node, gpu: Gpu | None) -> Availability:
        """Usable if Ray grants at least one core."""
        if node.usable_cores:
            return Availability(usable=True, reason=f"node {node.name} has {len(node.usable_cores)} cores")
        return Availability(
            usable=False, reason=f"node {node.name} has no core", hint="Give Ray at least one CPU there"
        )

    def environment(self, gmi_slice: Slice) -> dict[str, str]:
        """Thread counts, and no visible GPU, so that no CUDA context is created by accident."""
        return thread_environment(gmi_slice.num_threads) | {"CUDA_VISIBLE_DEVICES": ""}

    def device(self, gmi_slice: Slice) -> str:
        """Always the CPU."""
        return "cpu"

    def enter(self, gmi_slice: Slice) -> None:
        """Pin to the slice's cores and limit torch's threads."""
        pin_to_cores(gmi_slice.cores)
        limit_torch_threads(gmi_slice.num_threads)
