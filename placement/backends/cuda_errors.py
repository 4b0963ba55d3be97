"""Errors of CUDA, torch and Warp in a GMI's process, as errors that say what to do."""

from __future__ import annotations

import os
import re

from placement.errors import GpuMemoryError, SliceError
from placement.types import Slice

OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to allocate")
"""Of a context that does not fit, of cuBLAS, and of Warp: RuntimeErrors with these texts."""


def cuda_missing_error(gmi_slice: Slice) -> SliceError:
    """The error of a process that has a share of a GPU but no CUDA device, with torch's reason."""
    import torch  # the slice's environment has to be in place before this import

    reason = ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        reason = f": {' '.join(str(error).split())[:300].rstrip('.')}"
    if torch.version.cuda is None:
        hint = "Install a CUDA build of torch"
    elif "driver on your system is too old" in reason:
        hint = "Update NVIDIA's driver, or install a torch that is built for the CUDA version of this one"
    else:
        hint = "Repair it until `python -c 'import torch; torch.cuda.init()'` succeeds there"
    return SliceError(
        f"{gmi_slice.gpu_fraction:g} of a GPU",
        f"no CUDA device in process {os.getpid()} (torch {torch.__version__}, "
        f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}){reason}",
        f"{hint}, or use backend='cpu'",
    )


def unusable_gpu_error(gmi_slice: Slice, error: Exception) -> SliceError | None:
    """The error of a process whose GPU cannot run torch, or takes no further process; None for others of CUDA."""
    import torch  # the slice's environment has to be in place before this import

    wanted = f"{gmi_slice.gpu_fraction:g} of a GPU"
    if "no kernel image is available" in str(error):
        major, minor = torch.cuda.get_device_capability(0)
        kernels = " ".join(torch.cuda.get_arch_list())
        return SliceError(
            wanted,
            f"{torch.cuda.get_device_name(0)} of compute capability {major}.{minor}, "
            f"and torch {torch.__version__} has kernels for {kernels} only",
            "Install a torch that is built for this GPU, leave it out by CUDA_VISIBLE_DEVICES, or use backend='cpu'",
        )
    if "busy or unavailable" in str(error):
        return SliceError(
            wanted,
            "a GPU that admits no further process",
            "`nvidia-smi` shows who uses it: wait for them, or have an administrator set the compute mode to default",
        )
    return None


def gpu_memory_error(gmi_slice: Slice, error: BaseException) -> GpuMemoryError | None:
    """The error of a process whose share of a GPU has too little memory; None for any other error."""
    import torch  # the slice's environment has to be in place before this import

    text = " ".join(str(error).split())
    by_text = isinstance(error, RuntimeError) and any(each in text for each in OUT_OF_MEMORY)
    if gmi_slice.gpu_uuid is None or not (isinstance(error, torch.OutOfMemoryError) or by_text):
        return None
    brief = re.match(r".*? is free(?=\.)", text)  # torch goes on with its allocator's settings
    return GpuMemoryError(gmi_slice.label(), brief.group() if brief else text[:200].rstrip("."))
