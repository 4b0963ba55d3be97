"""Interconnects between the GPUs of a host: NVLinks and PCIe path, as in `nvidia-smi topo -m`. [unverified on GPU]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from placement.inventory.nvml_queries import if_supported, text
from placement.types import GpuLink, PciePath

PATHS: dict[int, PciePath] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML_TOPOLOGY_*. 0: two GPUs on one board with a PCIe switch."""


@dataclass(slots=True)
class _LinkEndpoints:
    """Remote ends of a GPU's active NVLinks."""

    switch: int = 0
    gpus: list[str] = field(default_factory=list)
    """PCI bus ids, one per link."""


def read_links(nvml: Any, handles: Sequence[Any], uuids: Sequence[str]) -> tuple[GpuLink, ...]:
    """One link per pair, in the order of the GPUs."""
    if len(handles) < 2:
        return ()
    ends = [_read_ends(nvml, handle) for handle in handles]
    buses = [_bus_id(if_supported(nvml, nvml.nvmlDeviceGetPciInfo, handle)) for handle in handles]
    links = []
    for one, other in combinations(range(len(handles)), 2):
        level = if_supported(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handles[one], handles[other])
        through_switch = min(ends[one].switch, ends[other].switch)
        straight = ends[one].gpus.count(buses[other]) if buses[other] else 0
        links.append(
            GpuLink(
                gpus=(uuids[one], uuids[other]),
                nvlinks=through_switch + straight,
                path=None if level is None else PATHS.get(int(level)),
            )
        )
    return tuple(links)


def _read_ends(nvml: Any, handle: Any) -> _LinkEndpoints:
    ends = _LinkEndpoints()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = if_supported(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        except nvml.NVMLError_InvalidArgument:  # the GPU has fewer links than NVML's maximum
            break
        if not active:
            continue
        kind = if_supported(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            ends.switch += 1
        else:
            ends.gpus.append(_bus_id(if_supported(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)))
    return ends


def _bus_id(info: Any) -> str:
    return "" if info is None else text(info.busId).lower()
