"""A driver with state, below the real pynvml: the calls, structures, error classes and codes that the code under test
meets are NVIDIA's own bindings; only what the C functions do is written here, from NVIDIA's documentation of them."""

from __future__ import annotations

from typing import Any

import pynvml

from tests.fakes.gpus import (
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NO_DATA,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    OK,
)
from tests.fakes.nvml_mig import MigCalls


class FakeDriver(MigCalls):
    """The whole library: methods are C functions that take ctypes values and return an error code."""

    # System.

    def _nvmlInitWithFlags(self, flags):
        self.open_sessions += self.init_code == OK
        return self.init_code

    def _nvmlShutdown(self):
        self.open_sessions -= 1
        return OK

    def _nvmlErrorString(self, code):
        return f"error {code}".encode()

    def _nvmlSystemGetDriverVersion(self, buffer, length):
        buffer.value = b"580.65.06"
        return OK

    def _nvmlSystemGetCudaDriverVersion_v2(self, version):
        version._obj.value = 13010
        return OK

    def _nvmlSystemGetProcessName(self, pid, buffer, length):
        if pid.value not in self.process_names:
            return NO_DATA  # as driver 580 for a process that has ended
        buffer.value = self.process_names[pid.value].encode()
        return OK

    # Devices.

    def _nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.gpus)
        return OK

    def _nvmlDeviceGetHandleByIndex_v2(self, index, device):
        if index.value >= len(self.gpus):
            return INVALID_ARGUMENT
        gpu = self.gpus[index.value]
        return gpu.handle_code or self._give(device, (gpu.uuid,))

    def _nvmlDeviceGetHandleByUUID(self, uuid, device):
        wanted = uuid.value.decode()
        if all(gpu.uuid != wanted for gpu in self.gpus):
            return NOT_FOUND
        return self._give(device, (wanted,))

    def _nvmlDeviceGetUUID(self, device, buffer, length):
        of_mig = len(self._of(device)) == 3
        part = self._part(device) if of_mig else None
        if of_mig and part is None:
            return INVALID_ARGUMENT
        buffer.value = (part.uuid if part else self._gpu(device).uuid).encode()
        return OK

    def _nvmlDeviceGetName(self, device, buffer, length):
        buffer.value = self._gpu(device).name.encode()
        return OK

    def _nvmlDeviceGetMemoryInfo(self, device, info):
        memory = self._gpu(device).memory
        if self._gpu(device).mig[0] and not self.privileged:
            return NO_PERMISSION  # for a MIG device there would be an answer
        if memory is None:
            return NOT_SUPPORTED
        info._obj.total, info._obj.free = memory
        return OK

    def _nvmlDeviceGetCudaComputeCapability(self, device, major, minor):
        capability = self._gpu(device).capability
        if capability is None:
            return NOT_SUPPORTED
        major._obj.value, minor._obj.value = capability
        return OK

    def _nvmlDeviceGetNumGpuCores(self, device, count):
        cores = self._gpu(device).cuda_cores
        if cores is None:
            return NOT_SUPPORTED
        count._obj.value = cores
        return OK

    def _nvmlDeviceGetArchitecture(self, device, architecture):
        architecture._obj.value = self._gpu(device).architecture
        return OK

    def _nvmlDeviceGetComputeMode(self, device, mode):
        mode._obj.value = self._gpu(device).compute_mode
        return OK

    def _nvmlDeviceGetCpuAffinity(self, device, size, masks):
        cores = self._gpu(device).near_cores
        for word in range(size):
            masks._obj[word] = sum(1 << core - 64 * word for core in cores if core // 64 == word)
        return OK

    def _nvmlDeviceGetMemoryAffinity(self, device, size, masks, scope):
        node = self._gpu(device).numa_node
        if node is None:
            return NOT_SUPPORTED
        masks._obj[0] = 1 << node
        return OK

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, device, count, array):
        part = self._part(device) if len(self._of(device)) == 3 else None
        found = dict.fromkeys(part.pids) if part else self._gpu(device).pids
        return _list_processes(found, count, array)

    def _nvmlDeviceGetMPSComputeRunningProcesses_v3(self, device, count, array):
        gpu = self._gpu(device)
        return _list_processes({pid: gpu.mps_bytes.get(pid) for pid in gpu.mps_pids}, count, array)

    def _nvmlDeviceGetPciInfo_v3(self, device, info):
        info._obj.busId = f"00000000:{self._gpu(device).bus:02X}:00.0".encode()
        return OK

    def _nvmlDeviceGetTopologyCommonAncestor(self, one, other, level):
        level._obj.value = 30 if self._gpu(one).numa_node == self._gpu(other).numa_node else 50
        return OK

    def _nvmlDeviceGetNvLinkState(self, device, link, active):
        links = self._gpu(device).nvlinks
        if not links:
            return NOT_SUPPORTED
        if link >= 18:  # Hopper's number of links
            return INVALID_ARGUMENT
        active._obj.value = link < len(links)
        return OK

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, device, link, kind):
        kind._obj.value = 2 if self._gpu(device).nvlinks[link] == "switch" else 0
        return OK

    def _nvmlDeviceGetNvLinkRemotePciInfo_v2(self, device, link, info):
        remote = next(gpu for gpu in self.gpus if gpu.uuid == self._gpu(device).nvlinks[link])
        info._obj.busId = f"00000000:{remote.bus:02X}:00.0".encode()
        return OK


def _list_processes(found: dict[int, int | None], count: Any, array: Any) -> int:
    if array is None:
        count._obj.value = len(found)
        return INSUFFICIENT_SIZE if found else OK
    entries = array
    for i, (pid, used) in enumerate(found.items()):
        entries[i].pid = pid
        entries[i].usedGpuMemory = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value if used is None else used
    count._obj.value = len(found)
    return OK
