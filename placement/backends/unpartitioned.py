"""Backends that change nothing on the host: nothing to partition, nothing to undo.

cpu: a slice is a set of cores; affinity pins the process, and every thread pool has the slice's size. direct: processes
share a whole GPU by the driver's time slicing, without limits. green (green.py) derives from direct.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from placement.backends.base import (
    Availability,
    Backend,
    SliceHealth,
    SliceLimits,
    limit_torch_threads,
    pin_to_cores,
    refused,
    thread_environment,
    validate_sizes,
)
from placement.backends.cuda_errors import cuda_missing_error
from placement.errors import PlanError, counted
from placement.ledger import Ledger
from placement.types import BackendName, Gpu, Node, Share, Slice


class UnpartitionedBackend(Backend):
    """A share is a number that processes respect; nothing enforces it from outside of them."""

    changes_host = False

    def partition(self, gpu: Gpu, sizes: Sequence[float], ledger: Ledger) -> tuple[Share, ...]:
        """Shares without limits."""
        return tuple(Share(kind=self.name, gpu_uuid=gpu.uuid) for _ in validate_sizes(gpu, sizes))

    def restore(self, gpu_uuid: str, ledger: Ledger) -> None:
        """A no-op."""

    def health(self, gmi_slice: Slice) -> SliceHealth:
        """Always ok."""
        return SliceHealth(state="ok", text=f"{self.name} creates nothing on the host that could fail")


class CpuBackend(UnpartitionedBackend):
    """Slices of a machine without a GPU, or of one whose GPUs are not used."""

    name: BackendName = "cpu"
    divides_gpus = False

    def availability(self, node: Node, gpu: Gpu | None) -> Availability:
        """Usable if Ray grants at least one core."""
        if node.usable_cores:
            return Availability(usable=True, reason=f"node {node.name} has {len(node.usable_cores)} cores")
        return refused(f"node {node.name} has no core", "Give Ray at least one CPU there")

    def environment(self, gmi_slice: Slice) -> dict[str, str]:
        """Thread counts, and no visible GPU, so that no CUDA context is created by accident."""
        return thread_environment(gmi_slice) | {"CUDA_VISIBLE_DEVICES": ""}

    def device(self, gmi_slice: Slice) -> str:
        """Always the CPU."""
        return "cpu"

    def enter(self, gmi_slice: Slice) -> None:
        """Pin to the slice's cores and limit torch's threads."""
        pin_to_cores(gmi_slice.cores)
        limit_torch_threads(gmi_slice.num_threads)


class DirectBackend(UnpartitionedBackend):
    """Default sharing of a GPU: the baseline for the other backends."""

    name: BackendName = "direct"

    def availability(self, node: Node, gpu: Gpu | None) -> Availability:
        """Usable if the compute mode and MIG mode admit CUDA processes."""
        if gpu is None:
            return refused("there is no GPU", "Use backend='cpu' and num_gmis")
        if gpu.compute_mode == "prohibited":
            return refused(
                f"{gpu.uuid} admits no process (compute mode prohibited)",
                f"Run `nvidia-smi -i {gpu.uuid} -c DEFAULT` as root",
            )
        pids = ", ".join(str(process.pid) for process in gpu.processes if not process.of_ray)
        if _is_exclusive(gpu) and pids:
            reason = f"process {pids} uses {gpu.uuid} exclusively (compute mode exclusive_process)"
            return refused(reason, "Wait until it has ended")
        if gpu.mig_enabled:
            return refused(
                f"{gpu.uuid} is in MIG mode, where only its instances are devices",
                "Use backend='mig', or start Ray with CUDA_VISIBLE_DEVICES=MIG-... and --num-gpus",
            )
        return Availability(usable=True, reason="processes may share the GPU")

    def predict_limits(self, node: Node, gpu: Gpu, sizes: Sequence[float]) -> tuple[SliceLimits, ...]:
        """No limits; one process where the compute mode admits one."""
        if _is_exclusive(gpu) and len(sizes) > 1:
            raise PlanError(
                f"{counted(len(sizes), 'GMI')} on {gpu.uuid}",
                "it admits one process without MPS (compute mode exclusive_process)",
                "Use one GMI per GPU or backend='mps', "
                f"or have an administrator run `nvidia-smi -i {gpu.uuid} -c DEFAULT`",
            )
        return super().predict_limits(node, gpu, sizes)

    def enter(self, gmi_slice: Slice) -> None:
        """Pin to the slice's cores, limit torch's threads, show CUDA the slice's GPU only, and check that it has it."""
        os.environ.update(self.environment(gmi_slice))
        pin_to_cores(gmi_slice.cores)
        limit_torch_threads(gmi_slice.num_threads)
        import torch  # the slice's environment has to be in place before this import

        if not torch.cuda.is_available():
            raise cuda_missing_error(gmi_slice)


def _is_exclusive(gpu: Gpu) -> bool:
    """Whether one process only may use the GPU. Clients of an MPS server that somebody runs on it do that together."""
    return gpu.compute_mode == "exclusive_process" and not gpu.mps_running
