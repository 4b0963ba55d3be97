"""NVML queries: processes, MIG instances, and interconnects as in `nvidia-smi topo -m`.

The caller passes pynvml and owns its session. [unverified on GPU]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from placement.mig_geometry import Geometry
from placement.types import GpuLink, GpuProcess, MigInstance, PciePath


def if_supported(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    """The query's result; None if device or driver do not support it, or the user lacks the permission."""
    try:
        return query(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
        return None


def if_known(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    """The query's result; None after any error. For what only describes a device: a run goes on without it.

    In WSL and in some virtual machines and containers CPU affinity and topology end with "Unknown Error".
    """
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


PROC = Path("/proc")


def read_processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    """Compute processes on a GPU or a MIG instance, as far as this user may see them."""
    found = if_supported(nvml, nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle) or []
    return tuple(
        GpuProcess(
            pid=int(one.pid),
            memory_used_bytes=None if one.usedGpuMemory is None else int(one.usedGpuMemory),
            of_ray=_is_ray_worker(int(one.pid)),
        )
        for one in found
    )


def _is_ray_worker(pid: int) -> bool:
    """By the title that Ray gives its workers: ``ray::`` and what they run. False for a process that cannot be seen."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


def text(value: str | bytes) -> str:
    """Decode a string; older pynvml versions return bytes."""
    return value.decode() if isinstance(value, bytes) else value


PATHS: dict[int, PciePath] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML_TOPOLOGY_*. 0: two GPUs on one board with a PCIe switch."""


def read_links(nvml: Any, handles: Sequence[Any], uuids: Sequence[str]) -> tuple[GpuLink, ...]:
    """One link per pair, in the order of the GPUs."""
    if len(handles) < 2:
        return ()
    switched, peers = zip(*(_read_ends(nvml, handle) for handle in handles), strict=True)
    buses = [_bus_id(if_known(nvml, nvml.nvmlDeviceGetPciInfo, handle)) for handle in handles]
    links = []
    for one, other in combinations(range(len(handles)), 2):
        level = if_known(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handles[one], handles[other])
        through_switch = min(switched[one], switched[other])
        straight = peers[one].count(buses[other]) if buses[other] else 0
        links.append(
            GpuLink(
                gpus=(uuids[one], uuids[other]),
                nvlinks=through_switch + straight,
                path=None if level is None else PATHS.get(int(level)),
            )
        )
    return tuple(links)


def _read_ends(nvml: Any, handle: Any) -> tuple[int, list[str]]:
    """A GPU's active NVLinks: how many lead to a switch, and the PCI bus ids of the other GPUs, one per link."""
    switched, peers = 0, list[str]()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        # An invalid argument where the GPU has fewer links than NVML's maximum.
        if not if_known(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        kind = if_known(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            switched += 1
        else:
            peers.append(_bus_id(if_known(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)))
    return switched, peers


def _bus_id(info: Any) -> str:
    return "" if info is None else text(info.busId).lower()


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
    """Handles of the GPU's MIG devices, in a container of those that it has. Their indices may have gaps."""
    devices = []
    for index in range(if_supported(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        try:
            devices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except (nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
            continue
    return devices


def _read(nvml: Any, handle: Any, device: Any, geometry: Geometry | None) -> MigInstance:
    attributes = nvml.nvmlDeviceGetAttributes_v2(device)
    placement = _placement(nvml, handle, int(nvml.nvmlDeviceGetGpuInstanceId(device)))
    memory = int(attributes.memorySizeMB) * MIB
    return MigInstance(
        uuid=text(nvml.nvmlDeviceGetUUID(device)),
        profile=_profile_name(attributes, geometry),
        memory_bytes=memory,
        start=None if placement is None else placement[0],
        size=None if placement is None else placement[1],
        sm_count=int(attributes.multiprocessorCount),
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
    by_distance = sorted(candidates, key=lambda one: abs(float(one.split(".")[1].removesuffix("gb")) - gib))
    name = next(iter(by_distance), f"{slices}g.{gib:.0f}gb")
    return name if compute == slices else f"{compute}c.{name}"
