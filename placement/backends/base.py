"""What every way of sharing a device can do: name a slice's environment, and confine a process to it."""

from __future__ import annotations

import contextlib
import os
from typing import Protocol

from placement.errors import SliceError
from placement.types import BackendName, Slice, core_ranges


class SliceBackend(Protocol):
    """One way of sharing a device. Values in, values out: nothing is kept between calls."""

    name: BackendName

    def environment(self, piece: Slice) -> dict[str, str]:
        """Variables that must be in the process before it imports torch or touches CUDA."""
        ...

    def device(self, piece: Slice) -> str:
        """The torch device on which the slice's tensors live, as ``torch.device`` takes it."""
        ...

    def enter(self, piece: Slice) -> None:
        """Confine this process to the slice. Called inside the GMI's process, once, before its first tensor.

        Raises:
            SliceError: the slice's cores or device are not there.
        """
        ...


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
