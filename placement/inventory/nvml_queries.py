"""Shared NVML queries. The caller passes pynvml and owns its session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from placement.types import GpuProcess


def if_supported(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    """The query's result; None if device or driver do not support it, or the user lacks the permission."""
    try:
        return query(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
        return None


def read_processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    """Compute processes on a GPU or a MIG instance, as far as this user may see them."""
    found = if_supported(nvml, nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle) or []
    return tuple(
        GpuProcess(
            pid=int(one.pid),
            memory_used_bytes=None if one.usedGpuMemory is None else int(one.usedGpuMemory),
        )
        for one in found
    )


def text(value: str | bytes) -> str:
    """Decode a string; older pynvml versions return bytes."""
    return value.decode() if isinstance(value, bytes) else value
