"""GPUs as NVML reports them. The only module that imports pynvml.

No library and no driver mean no GPUs. A driver that answers with an error is an InventoryError: a broken GPU
must not quietly become a run on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from placement.errors import InventoryError
from placement.types import Gpu

WITHOUT_GPU = "Mend the driver, or set CUDA_VISIBLE_DEVICES= (empty) to go on without GPUs"

CORES_PER_SM = {
    (6, 0): 64,
    (7, 0): 64,
    (7, 2): 64,
    (7, 5): 64,
    (8, 0): 64,
}
"""CUDA cores of one multiprocessor by compute capability, where not 128 (CUDA C++ programming guide,
technical specifications per compute capability). NVML counts cores only."""


def visible_gpus(*, host_memory_bytes: int) -> tuple[Gpu, ...]:
    """GPUs that CUDA would see in this process, in NVML's order (by PCI bus).

    Args:
        host_memory_bytes: taken as the GPU's memory where the two are one and NVML has no number of its own

    Raises:
        InventoryError: the driver does not answer properly, or CUDA_VISIBLE_DEVICES names MIG instances.
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and wanted.strip() in ("", "-1"):
        return ()
    gpus = _all_gpus(host_memory_bytes)
    return gpus if wanted is None else select_visible(gpus, wanted)


def select_visible(gpus: tuple[Gpu, ...], wanted: str) -> tuple[Gpu, ...]:
    """Apply CUDA_VISIBLE_DEVICES: indices or UUID prefixes. As in CUDA, the first that fits none ends it."""
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.startswith("MIG-"):
            raise InventoryError(
                f"CUDA_VISIBLE_DEVICES={wanted}",
                "MIG instances cannot be planned for",
                "Name whole GPUs by index or UUID",
            )
        found = [gpu for gpu in gpus if entry and (str(gpu.index) == entry or gpu.uuid.startswith(entry))]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen.append(found[0])
    return tuple(chosen)


def _all_gpus(host_memory_bytes: int) -> tuple[Gpu, ...]:
    try:
        import pynvml  # here, since a machine without NVIDIA's package is a machine without GPUs
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:
        raise InventoryError("NVML", f"the driver did not start: {error}", WITHOUT_GPU) from error
    try:
        count = pynvml.nvmlDeviceGetCount()
        return tuple(_read(pynvml, index, host_memory_bytes) for index in range(count))
    except pynvml.NVMLError as error:
        raise InventoryError("NVML", f"a GPU could not be read: {error}", WITHOUT_GPU) from error
    finally:
        pynvml.nvmlShutdown()


def _read(nvml: Any, index: int, host_memory_bytes: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _if_supported(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _if_supported(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    cores = _if_supported(nvml, nvml.nvmlDeviceGetNumGpuCores, handle)
    capability = None if capability is None else (int(capability[0]), int(capability[1]))
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_total_bytes=host_memory_bytes if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        sm_count=None
        if cores is None or capability is None
        else int(cores) // CORES_PER_SM.get(capability, 128),
        compute_capability=capability,
    )


def _if_supported(nvml: Any, query: Callable[[Any], Any], handle: Any) -> Any:
    """The answer, or None where this device or driver does not know the question."""
    try:
        return query(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
        return None


def _text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
