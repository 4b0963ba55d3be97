"""GPU inventory through NVML. The only module that imports pynvml; others get it from ``nvml_session``.

Without the library or the driver there are no GPUs. A driver error raises InventoryError, so that a broken GPU does not
silently become a run on the CPU. [unverified on GPU]
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from placement.errors import InventoryError
from placement.inventory.nvml_queries import (
    if_known,
    if_supported,
    mig_mode,
    read_instances,
    read_links,
    read_processes,
    text,
)
from placement.mig_geometry import geometry_of, nominal_memory_bytes
from placement.types import ComputeMode, Gpu, GpuLink, GpuProcess, MigInstance

WITHOUT_GPU = "Repair the driver, or set CUDA_VISIBLE_DEVICES= (empty) to run without GPUs"
WITHOUT_THIS_GPU = (
    "Reset it or restart the host, or set CUDA_VISIBLE_DEVICES to the others, or empty to run without GPUs"
)
NO_DEVICES = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs; the last one is Slurm's for a job that has none."""

CORES_PER_SM = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
"""CUDA cores per multiprocessor by compute capability, if not 128 (CUDA C++ programming guide, technical specifications per
compute capability). NVML reports only the number of cores."""

COMPUTE_MODES: dict[int, ComputeMode] = {0: "default", 2: "prohibited", 3: "exclusive_process"}
"""NVML_COMPUTEMODE_*. 1, exclusive thread, has been the same as exclusive process since CUDA 8."""

MAX_HOST_CORES = 1024
"""Size of the CPU affinity mask, as in Linux's cpu_set_t."""

MPS_SERVER = "nvidia-cuda-mps-server"

DEV = Path("/dev")


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverReading:
    """NVML's inventory of this host."""

    gpus: tuple[Gpu, ...] = ()
    gpu_links: tuple[GpuLink, ...] = ()
    driver_version: str | None = None
    cuda_version: tuple[int, int] | None = None


@contextmanager
def nvml_session() -> Iterator[Any]:
    """Open an NVML session and yield the pynvml module; None without the library or the driver.

    Raises:
        InventoryError: NVML fails to initialise.
    """
    try:
        import pynvml  # optional dependency: without it there are no GPUs
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield None
        return
    except pynvml.NVMLError as error:
        raise InventoryError("NVML", f"the driver did not start: {error}", WITHOUT_GPU) from error
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):  # an error at shutdown must not hide an earlier one
            pynvml.nvmlShutdown()


def read_driver(*, host_memory_bytes: int) -> DriverReading:
    """GPUs that CUDA can see in this process, in NVML's order (by PCI bus), and their interconnects.

    Args:
        host_memory_bytes: used as the GPU's memory if NVML reports none (GPUs that share the host's memory)

    Raises:
        InventoryError: the driver returns an error, or cannot read a GPU that CUDA could see, or
            CUDA_VISIBLE_DEVICES names none of its GPUs.
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and wanted.strip() in NO_DEVICES:
        return DriverReading()
    with nvml_session() as nvml:
        if nvml is None:
            _raise_if_devices(sorted(path.name for path in DEV.glob("nvidia[0-9]*")))
            return DriverReading()
        reading, failures = _read_all(nvml, host_memory_bytes)
    gpus = reading.gpus if wanted is None else select_visible(reading.gpus, wanted)
    if failures and (wanted is None or len(gpus) < len(wanted.split(","))):
        raise failures[0]  # else the GPU that cannot be read is none of those that are wanted
    if reading.gpus and not gpus:
        raise _names_none(reading.gpus, str(wanted))
    uuids = {gpu.uuid for gpu in gpus}
    links = tuple(link for link in reading.gpu_links if uuids.issuperset(link.gpus))
    return replace(reading, gpus=gpus, gpu_links=links)


def _raise_if_devices(devices: list[str]) -> None:
    """Raise InventoryError if GPUs are here that NVML cannot read: the run would be on cores, without a word."""
    if devices:
        raise InventoryError(
            f"GPUs {', '.join(devices)}",
            "NVML's library (libnvidia-ml.so.1) or the driver is not there",
            "Start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility, repair the driver, or set "
            "CUDA_VISIBLE_DEVICES= (empty) to run without GPUs",
        )


def select_visible(gpus: tuple[Gpu, ...], wanted: str) -> tuple[Gpu, ...]:
    """Apply CUDA_VISIBLE_DEVICES: indices, UUID prefixes, MIG instances. As in CUDA, the first invalid entry ends the list.

    A listed MIG instance counts as a separate, smaller GPU.
    """
    chosen: dict[str, Gpu] = {}
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.startswith("MIG-"):
            found = [
                as_gpu(gpu, one, index=len(chosen))
                for gpu in gpus
                for one in gpu.mig_instances
                if one.uuid == entry
            ]
        else:
            found = [gpu for gpu in gpus if gpu.is_called(entry)]
        if len(found) != 1 or found[0].uuid in chosen:
            break
        chosen[found[0].uuid] = found[0]
    return tuple(chosen.values())


def _names_none(gpus: tuple[Gpu, ...], wanted: str) -> InventoryError:
    """The error for a value that hides all GPUs by mistake: the run would be on cores, without a word."""
    parts = [one.uuid for gpu in gpus for one in gpu.mig_instances]
    there = ", ".join([*(f"{gpu.index} ({gpu.uuid})" for gpu in gpus), *parts])
    return InventoryError(
        f"CUDA_VISIBLE_DEVICES={wanted}",
        f"its first entry is none of the GPUs that CUDA has here: {there}",
        "Name some of them, or set it empty to run without GPUs",
    )


def as_gpu(owner: Gpu, instance: MigInstance, *, index: int) -> Gpu:
    """A MIG instance as a GPU: the view of a process whose only device it is."""
    return replace(
        owner,
        index=index,
        uuid=instance.uuid,
        name=f"{owner.name} MIG {instance.profile}",
        memory_total_bytes=instance.memory_bytes,
        memory_free_bytes=None,
        sm_count=instance.sm_count,
        mig_enabled=None,
        mig_pending=None,
        mig_instances=(),
        processes=(),
        mps_running=None,
    )


def _read_all(nvml: Any, host_memory_bytes: int) -> tuple[DriverReading, list[InventoryError]]:
    """What NVML has, and an error for each GPU that it cannot read."""
    try:
        version = if_supported(nvml, nvml.nvmlSystemGetDriverVersion)
        cuda = if_supported(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise InventoryError("NVML", f"the driver could not be read: {error}", WITHOUT_GPU) from error
    handles, gpus, failures = list[Any](), list[Gpu](), list[InventoryError]()
    for number in range(count):
        index = len(gpus) + len(failures)
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
        except nvml.NVMLError_NoPermission:
            continue  # as of another job of the node: NVML counts it, and CUDA does not
        except nvml.NVMLError as error:
            failures.append(_unreadable(index, error))
            continue
        try:
            gpus.append(_read_gpu(nvml, handle, index, host_memory_bytes))
        except nvml.NVMLError as error:
            failures.append(_unreadable(index, error))
        else:
            handles.append(handle)
    reading = DriverReading(
        gpus=tuple(gpus),
        gpu_links=read_links(nvml, handles, [gpu.uuid for gpu in gpus]),
        driver_version=None if version is None else text(version),
        cuda_version=None if cuda is None else (int(cuda) // 1000, int(cuda) % 1000 // 10),
    )
    return reading, failures


def _unreadable(index: int, error: Exception) -> InventoryError:
    return InventoryError("NVML", f"GPU {index} could not be read: {error}", WITHOUT_THIS_GPU)


def _memory(nvml: Any, handle: Any, name: str, host_memory_bytes: int) -> tuple[int, int | None]:
    """Memory of a GPU and how much of it is free, in bytes."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NoPermission:  # of a GPU in MIG mode without the permission to configure it
        return nominal_memory_bytes(name) or 0, None
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):  # it shares the host's memory
        return host_memory_bytes, None
    return int(memory.total), int(memory.free)


def _read_gpu(nvml: Any, handle: Any, index: int, host_memory_bytes: int) -> Gpu:
    name = text(nvml.nvmlDeviceGetName(handle))
    total, free = _memory(nvml, handle, name, host_memory_bytes)
    capability = if_supported(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    cores = if_supported(nvml, nvml.nvmlDeviceGetNumGpuCores, handle)
    capability = None if capability is None else (int(capability[0]), int(capability[1]))
    mode = mig_mode(nvml, handle) or (None, None)
    compute_mode = if_supported(nvml, nvml.nvmlDeviceGetComputeMode, handle)
    processes = if_known(nvml, read_processes, nvml, handle) or ()
    near = if_known(nvml, nvml.nvmlDeviceGetMemoryAffinity, handle, 1, nvml.NVML_AFFINITY_SCOPE_NODE)
    gpu = Gpu(
        index=index,
        uuid=text(nvml.nvmlDeviceGetUUID(handle)),
        name=name,
        memory_total_bytes=total,
        memory_free_bytes=free,
        sm_count=None
        if cores is None or capability is None
        else int(cores) // CORES_PER_SM.get(capability, 128),
        compute_capability=capability,
        architecture=_architecture(nvml, handle),
        mig_enabled=mode[0],
        mig_pending=mode[1],
        compute_mode=None if compute_mode is None else COMPUTE_MODES.get(int(compute_mode)),
        processes=processes,
        mps_running=_mps_running(nvml, handle, processes),
        numa_node=next(iter(_bits(near)), None),
        cores=_bits(if_known(nvml, nvml.nvmlDeviceGetCpuAffinity, handle, MAX_HOST_CORES // 64)),
    )
    if not gpu.mig_enabled:
        return gpu
    instances = read_instances(nvml, handle, geometry_of(gpu))
    at_least = sum(instance.memory_bytes for instance in instances)
    return replace(gpu, mig_instances=instances, memory_total_bytes=max(total, at_least))


def memory_by_process(device_uuid: str) -> dict[int, int]:
    """pid -> bytes on a GPU or MIG instance, including MPS clients; empty if NVML does not report it.

    The pids are the host's, which may differ from those inside a container.
    """
    with nvml_session() as nvml:
        if nvml is None:
            return {}
        try:
            handle = if_supported(nvml, nvml.nvmlDeviceGetHandleByUUID, device_uuid)
            if handle is None:
                return {}
            clients = if_supported(nvml, nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle) or []
            held = {int(one.pid): one.usedGpuMemory for one in clients}
            held |= {one.pid: one.memory_used_bytes for one in read_processes(nvml, handle)}
        except nvml.NVMLError:  # the device is lost: ``Backend.health`` reports that
            return {}
    return {pid: int(used) for pid, used in held.items() if used is not None}


def _mps_running(nvml: Any, handle: Any, processes: tuple[GpuProcess, ...]) -> bool | None:
    """Whether an MPS server uses this GPU: there are MPS clients, or the server is among the processes.

    NVML does not report a daemon without a server.
    """
    clients = if_known(nvml, nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle)
    if clients is None:
        return None
    return bool(clients) or any(_process_name(nvml, one.pid) == MPS_SERVER for one in processes)


def _process_name(nvml: Any, pid: int) -> str | None:
    name = if_known(nvml, nvml.nvmlSystemGetProcessName, pid)  # it may have ended
    return None if name is None else os.path.basename(text(name))


def _architecture(nvml: Any, handle: Any) -> str | None:
    """Architecture name from NVML's constants: NVML_DEVICE_ARCH_HOPPER is ``Hopper``."""
    number = if_known(nvml, nvml.nvmlDeviceGetArchitecture, handle)
    prefix = "NVML_DEVICE_ARCH_"
    names = [
        name.removeprefix(prefix).capitalize()
        for name in dir(nvml)
        if name.startswith(prefix) and getattr(nvml, name) == number
    ]
    return next((name for name in names if name != "Unknown"), None)


def _bits(masks: Any) -> tuple[int, ...]:
    """Indices of the set bits in 64-bit words, low word first."""
    words = [] if masks is None else [int(word) for word in masks]
    return tuple(64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1)
