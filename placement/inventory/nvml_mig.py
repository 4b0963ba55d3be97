"""MIG instances of a GPU through NVML, with or without the permission to manage them. [unverified on GPU]"""

from __future__ import annotations

from typing import Any

from placement.inventory.nvml_queries import if_supported, read_processes, text
from placement.mig_geometry import Geometry
from placement.types import MigInstance

MIB = 2**20


def mig_mode(nvml: Any, handle: Any) -> tuple[bool, bool] | None:
    """Whether MIG is on, and whether it will be after the next reset; None if the GPU has no MIG."""
    mode = if_supported(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else (bool(mode[0]), bool(mode[1]))


def read_instances(nvml: Any, handle: Any, geometry: Geometry | None) -> tuple[MigInstance, ...]:
    """Every instance that a process can use, in NVML's order; GPU instances without a compute instance are not included.

    Args:
        nvml: pynvml, initialised
        handle: NVML handle of the GPU
        geometry: geometry of the GPU model; None: profiles are named by slices and memory alone
    """
    return tuple(_read(nvml, handle, device, geometry) for device in mig_devices(nvml, handle))


def mig_devices(nvml: Any, handle: Any) -> list[Any]:
    """Handles of the GPU's MIG devices. Their indices may have gaps."""
    devices = []
    for index in range(if_supported(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        try:
            devices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError_NotFound:
            continue
    return devices


def _read(nvml: Any, handle: Any, device: Any, geometry: Geometry | None) -> MigInstance:
    attributes = nvml.nvmlDeviceGetAttributes_v2(device)
    instance_id = int(nvml.nvmlDeviceGetGpuInstanceId(device))
    placement = _placement(nvml, handle, instance_id)
    memory = int(attributes.memorySizeMB) * MIB
    return MigInstance(
        uuid=text(nvml.nvmlDeviceGetUUID(device)),
        profile=_profile_name(attributes, geometry),
        memory_bytes=memory,
        start=None if placement is None else placement[0],
        size=None if placement is None else placement[1],
        sm_count=int(attributes.multiprocessorCount),
        gpu_instance_id=instance_id,
        in_use=bool(read_processes(nvml, device)),
    )


def _placement(nvml: Any, handle: Any, instance_id: int) -> tuple[int, int] | None:
    """Placement (start, size) of a GPU instance; None without the permission to read it."""
    instance = if_supported(nvml, nvml.nvmlDeviceGetGpuInstanceById, handle, instance_id)
    info = None if instance is None else if_supported(nvml, nvml.nvmlGpuInstanceGetInfo, instance)
    return None if info is None else (int(info.placement.start), int(info.placement.size))


def _profile_name(attributes: Any, geometry: Geometry | None) -> str:
    """Profile name as in `nvidia-smi -L`: ``2g.10gb``, or ``1c.2g.10gb`` if the compute instance does not fill it.

    NVML reports slices and memory. An instance has somewhat less memory than its profile's name states. Among the profiles
    with as many compute slices, the nearest in memory is chosen (1g has two).
    """
    slices, compute = int(attributes.gpuInstanceSliceCount), int(attributes.computeInstanceSliceCount)
    gib = attributes.memorySizeMB / 1024
    candidates = [one.name for one in geometry.profiles if one.compute_slices == slices] if geometry else []
    by_distance = sorted(candidates, key=lambda one: abs(_gigabytes(one) - gib))
    name = next(iter(by_distance), f"{slices}g.{gib:.0f}gb")
    return name if compute == slices else f"{compute}c.{name}"


def _gigabytes(profile_name: str) -> float:
    return float(profile_name.split(".")[1].removesuffix("gb"))
