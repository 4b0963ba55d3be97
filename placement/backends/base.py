"""What every way of sharing a device can do: say whether it can, cut a GPU, confine a process, undo what it did."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from placement.errors import PartitionError, SliceError
from placement.ledger import Ledger
from placement.types import BackendName, Gpu, Node, Share, Slice, core_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class Availability:
    """Whether a backend can be used on a GPU or node."""

    usable: bool
    reason: str
    """Why, as a clause: ``the driver is 470, static partitions need 580``."""
    hint: str = ""
    """What a human would have to do or run; empty where usable, or where nothing helps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceLimits:
    """What a process in a slice cannot exceed; None: no limit."""

    sm_count: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceHealth:
    """How a slice is."""

    state: Literal["ok", "degraded", "lost"]
    """degraded: those inside go on, nobody new gets in. lost: what is inside cannot go on."""
    text: str
    """One sentence for people."""
    memory_bytes: int | None = None
    """Device memory that the slice's process holds by the driver's count, CUDA's own included; None: it does not tell."""


class Backend(Protocol):
    """One way of sharing a device. Nothing is kept between calls: what was made is in shares and in the ledger.

    Backends inherit from it: methods that do nothing by default are then theirs.
    """

    name: BackendName
    changes_host: bool
    """Whether ``partition`` changes anything on the host; else nobody needs to be started there to call it."""

    def availability(self, node: Node, gpu: Gpu | None) -> Availability:
        """Whether it can be used here, by what the inventory says. ``gpu``: None asks for the node without a GPU."""
        ...

    def predict_limits(self, node: Node, gpu: Gpu, sizes: Sequence[float]) -> tuple[SliceLimits, ...]:
        """What ``partition`` would give, by what the inventory says; one per size. By default: nothing is limited.

        Raises:
            PlanError: the GPU cannot be cut into these sizes; the text says what would fit.
        """
        return tuple(SliceLimits() for _ in sizes)

    def partition(self, gpu: Gpu, sizes: Sequence[float], ledger: Ledger) -> tuple[Share, ...]:
        """Make one share per size, on the GPU's own host. Rolls back whatever it did when anything fails.

        Args:
            gpu: as the inventory of this host has it
            sizes: fractions of the GPU, each in (0, 1], together at most 1
            ledger: takes a note before every step

        Raises:
            PartitionError: it could not be done; nothing is left behind.
        """
        ...

    def restore(self, gpu_uuid: str, ledger: Ledger) -> None:
        """Undo exactly what the ledger says of this backend and GPU, the newest first.

        Safe to call twice, and from another process after a crash at any step. What could be undone is undone and
        erased, also where something else could not.

        Raises:
            PartitionError: something could not be undone; it stays in the ledger.
        """
        ...

    def environment(self, gmi_slice: Slice) -> dict[str, str]:
        """Variables of the GMI's process: thread counts before it starts, the share's before its first CUDA call."""
        ...

    def device(self, gmi_slice: Slice) -> str:
        """The torch device on which the slice's tensors live, as ``torch.device`` takes it."""
        ...

    def limits(self, gmi_slice: Slice) -> SliceLimits:
        """What the slice's process cannot exceed."""
        ...

    def enter(self, gmi_slice: Slice) -> None:
        """Confine this process to the slice. Called inside the GMI's process, once, before its first CUDA call.

        Raises:
            SliceError: the slice's cores or device are not there.
        """
        ...

    def verify(self, gmi_slice: Slice) -> None:
        """Make sure that this process, which has made its first CUDA call, is inside its slice. By default: nothing.

        Raises:
            SliceError: it is not, or not within the slice's limits.
        """
        return

    def health(self, gmi_slice: Slice) -> SliceHealth:
        """How the slice is, asked on its own host."""
        ...

    def evict(self, gmi_slice: Slice, pid: int) -> None:
        """Detach a process that no longer answers, on its host and before it is killed. By default: nothing.

        Raises:
            PartitionError: it could not be detached.
        """
        return


def validate_sizes(gpu: Gpu, sizes: Sequence[float]) -> tuple[float, ...]:
    """The sizes, once they are shares of one GPU.

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


def thread_environment(num_threads: int) -> dict[str, str]:
    """Variables that hold every native thread pool to ``num_threads``.

    OMP_WAIT_POLICY=PASSIVE, since libgomp's idle threads otherwise spin, which makes small torch updates
    several times slower as soon as a neighbour uses the same cores.
    """
    count = str(num_threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def pin_to_cores(cores: tuple[int, ...]) -> None:
    """Confine this process, and every thread it starts from now on, to ``cores``. No cores: no change.

    Raises:
        SliceError: a core does not exist here or is not granted to this process.
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
            f"{len(cores)} cores ({core_ranges(cores)})",
            f"{len(before)} ({core_ranges(before)}) in process {os.getpid()}",
            "The plan was made for another machine, or Ray was started with more CPUs than there are cores: "
            f"plan on this machine with at most {len(before)} GMIs",
        )


def limit_torch_threads(num_threads: int) -> None:
    """Hold torch's own pools to ``num_threads``; operators of one process never run side by side."""
    import torch  # the slice's environment has to be in place before this import

    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:
        # torch accepts this once, before its first parallel work; a later call changes nothing.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(1)


def cuda_missing_error(gmi_slice: Slice) -> SliceError:
    """The error for a process that has a share of a GPU and cannot use it."""
    import torch  # the slice's environment has to be in place before this import

    return SliceError(
        f"{gmi_slice.gpu_fraction:g} of a GPU",
        f"no CUDA device in process {os.getpid()} (torch {torch.__version__}, "
        f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})",
        "Install a CUDA build of torch, or use the cpu backend",
    )
