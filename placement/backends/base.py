"""Backend interface: check availability, partition a GPU, confine a process to its slice, undo the partition."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from placement.errors import PartitionError, SliceError, counted
from placement.ledger import Ledger
from placement.types import BackendName, Gpu, Node, Share, Slice, core_ranges

SPINS = 2000
"""Of libgomp's idle threads before they sleep; it counts 100 a microsecond. Chosen by experiments/ablation/waiting.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Availability:
    """Whether a backend can be used on a GPU or node."""

    usable: bool
    reason: str
    """The reason as a clause: ``the driver is 470, static partitions need 580``."""
    hint: str = ""
    """What the user can do; empty if usable, or if nothing helps."""


def refused(reason: str, hint: str) -> Availability:
    """Not usable, with the reason as a clause, and what the user can do."""
    return Availability(usable=False, reason=reason, hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceLimits:
    """Limits of a process in a slice; None: no limit."""

    sm_count: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceHealth:
    """Health of a slice."""

    state: Literal["ok", "degraded", "lost"]
    """degraded: running processes continue, new ones cannot enter. lost: running processes cannot continue."""
    text: str
    """One sentence for messages."""
    memory_bytes: int | None = None
    """Device memory of the slice's process by the driver's count, including CUDA's own; None: not reported."""


class Backend(Protocol):
    """One mechanism for sharing a device. Stateless: shares and the ledger hold what was created.

    Backends inherit from it to get the default methods.
    """

    name: BackendName
    divides_gpus: bool = True
    """Whether a slice is a share of a GPU. If not, it is a set of cores."""
    changes_host: bool
    """Whether ``partition`` changes the host. If not, it can be called in any process on any host."""

    def availability(self, node: Node, gpu: Gpu | None) -> Availability:
        """Whether the backend can be used, according to the inventory. ``gpu``: None: on the node's cores."""

    def predict_limits(self, node: Node, gpu: Gpu, sizes: Sequence[float]) -> tuple[SliceLimits, ...]:
        """Limits that ``partition`` would give, according to the inventory; one per size. Default: no limits.

        Raises:
            PlanError: the GPU cannot be partitioned into these sizes; the text says what would fit.
        """
        return tuple(SliceLimits() for _ in sizes)

    def idle_shares(self, gpu: Gpu) -> tuple[float, ...]:
        """Fractions of the GPU that exist as shares already and are idle, largest first. Default: none."""
        return ()

    def partition(self, gpu: Gpu, sizes: Sequence[float], ledger: Ledger) -> tuple[Share, ...]:
        """Create one share per size, on the GPU's own host. Rolls back on any failure.

        Args:
            gpu: from the inventory of this host
            sizes: fractions of the GPU, each in (0, 1], together at most 1
            ledger: records every step before it is done

        Raises:
            PartitionError: it failed and was rolled back.
        """

    def restore(self, gpu_uuid: str, ledger: Ledger) -> None:
        """Undo the ledger's steps of this backend and GPU, newest first.

        Idempotent, and safe in another process after a crash at any step. A step that fails does not keep the others from
        being undone.

        Raises:
            PartitionError: a step could not be undone; it stays in the ledger.
        """

    def environment(self, gmi_slice: Slice) -> dict[str, str]:
        """Environment variables of the GMI: thread counts before it starts, the share before its first CUDA call.

        Default: Ray sets CUDA_VISIBLE_DEVICES to the GPU that it allocated. It does not publish which GPU it allocated to
        whom, so a process that chose by itself could take another run's GPU. The variable is set to 0 explicitly, since the
        node may have been started with it set to 1. Ray gives an index, which CUDA counts from the fastest GPU, and NVML and
        nvidia-smi by PCI bus: once the GPU is known, its UUID takes the index's place.

        Raises:
            SliceError: the slice has no GPU, and the backend divides GPUs.
        """
        if gmi_slice.gpu_uuid is None:
            raise SliceError("a GPU", f"none in the slice {gmi_slice.label()}", "Use the cpu backend for it")
        known = {} if gmi_slice.share is None else {"CUDA_VISIBLE_DEVICES": gmi_slice.share.gpu_uuid}
        threads = thread_environment(gmi_slice)
        return threads | {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"} | known

    def device(self, gmi_slice: Slice) -> str:
        """The slice's torch device, as a string for ``torch.device``. Default: the only GPU that the process sees."""
        return "cuda:0"

    def limits(self, gmi_slice: Slice) -> SliceLimits:
        """Limits of the slice's process. Default: no limits."""
        return SliceLimits()

    def enter(self, gmi_slice: Slice) -> None:
        """Confine this process to the slice. Called once in the GMI's process, before its first CUDA call.

        Raises:
            SliceError: the slice's cores or device do not exist.
        """

    def verify(self, gmi_slice: Slice) -> None:
        """Check that this process is inside its slice, after its first CUDA call. Default: no check.

        Raises:
            SliceError: it is outside the slice, or exceeds its limits.
        """
        return

    def health(self, gmi_slice: Slice) -> SliceHealth:
        """Health of the slice; call it on the slice's host."""

    def evict(self, gmi_slice: Slice, pid: int) -> None:
        """Detach an unresponsive process on its host, before it is killed. Default: a no-op.

        Raises:
            PartitionError: it could not be detached.
        """
        return


def validate_sizes(gpu: Gpu, sizes: Sequence[float]) -> tuple[float, ...]:
    """Check that the sizes are shares of one GPU, and return them.

    Raises:
        PartitionError: one is not in (0, 1], or together they are more than the GPU.
    """
    # Ray counts fractions in steps of 1e-4: sums of floats may miss 1 by less than half of one.
    if not sizes or any(not 0 < size <= 1 for size in sizes) or math.fsum(sizes) > 1 + 5e-5:
        raise PartitionError(
            f"shares {', '.join(f'{size:g}' for size in sizes) or 'none'} of {gpu.uuid}",
            "each must be in (0, 1], and together they must not exceed 1",
            "Ask for fewer or smaller GMIs per GPU",
        )
    return tuple(sizes)


def thread_environment(gmi_slice: Slice) -> dict[str, str]:
    """Environment variables that limit every native thread pool to the slice's threads.

    OMP_WAIT_POLICY=PASSIVE: idle threads sleep, since torch's otherwise spin for 3 ms, in which whatever else uses the cores
    waits. But waking them takes longer than many operations of small networks: on cores of its own, a slice's threads
    spin for ``SPINS`` first.
    """
    count = str(gmi_slice.num_threads)
    own_cores = gmi_slice.num_cpus is None and 1 < gmi_slice.num_threads <= len(gmi_slice.cores)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
    } | ({"GOMP_SPINCOUNT": str(SPINS)} if own_cores else {})


def pin_to_cores(cores: tuple[int, ...]) -> None:
    """Set the CPU affinity of this process and its future threads to ``cores``. No cores: no change.

    Raises:
        SliceError: a core does not exist or is not granted to this process.
    """
    if not cores:
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        got: set[int] = set()  # none of them exists
    else:
        got = os.sched_getaffinity(0)  # the kernel drops cores that do not exist without an error
    if got != set(cores):
        os.sched_setaffinity(0, before)
        raise SliceError(
            f"{counted(len(cores), 'core')} ({core_ranges(cores)})",
            f"{len(before)} ({core_ranges(before)}) in process {os.getpid()}",
            "The plan was made for another machine, or Ray was started with more CPUs than there are cores: "
            f"plan on this machine with at most {counted(len(before), 'GMI')}",
        )


def limit_torch_threads(num_threads: int) -> None:
    """Limit torch's intra-op pool to ``num_threads`` and its inter-op pool to 1."""
    import torch  # the slice's environment has to be in place before this import

    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:
        # torch accepts this once, before its first parallel work; a later call changes nothing.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(1)
