"""A driver library with state, below the real pynvml: it stands where libnvidia-ml.so.1 would be loaded.

The calls, structures, error classes and error codes that the code under test meets are NVIDIA's own bindings; only
what the C functions do is written here, from NVIDIA's documentation of them. Its tables of MIG profiles are written
apart from the ones that are tested.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

OK, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION = 0, 2, 3, 4
NOT_FOUND, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED = 6, 7, 9
GPU_IS_LOST, RESET_REQUIRED, IN_USE, INSUFFICIENT_RESOURCES, UNKNOWN = 15, 16, 19, 23, 999

UNCOUNTED = ("nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString")
"""Calls that never fail by plan: without them there is no session to fail in."""


class ProcessKilled(BaseException):
    """The process under test ended here, as by SIGKILL: nothing may catch it and go on."""


@dataclass(frozen=True)
class FakeProfile:
    constant: int  # NVML_GPU_INSTANCE_PROFILE_*
    profile_id: int
    slices: int
    starts: tuple[int, ...]
    size: int
    most: int
    sms: int
    memory_mib: int


def _profiles(rows: list[tuple]) -> tuple[FakeProfile, ...]:
    return tuple(FakeProfile(*row) for row in rows)


SEVEN, EVEN = (0, 1, 2, 3, 4, 5, 6), (0, 2, 4, 6)
A100_40 = _profiles(
    [
        (0, 19, 1, SEVEN, 1, 7, 14, 4864),
        (7, 20, 1, SEVEN, 1, 1, 14, 4864),
        (9, 15, 1, EVEN, 2, 4, 14, 9984),
        (1, 14, 2, (0, 2, 4), 2, 3, 28, 9984),
        (2, 9, 3, (0, 4), 4, 2, 42, 20096),
        (3, 5, 4, (0,), 4, 1, 56, 20096),
        (4, 0, 7, (0,), 8, 1, 98, 40192),
    ]
)
H100 = _profiles(
    [
        (0, 19, 1, SEVEN, 1, 7, 16, 9984),
        (7, 20, 1, SEVEN, 1, 1, 16, 9984),
        (9, 15, 1, EVEN, 2, 4, 26, 20096),
        (1, 14, 2, (0, 2, 4), 2, 3, 32, 20096),
        (2, 9, 3, (0, 4), 4, 2, 60, 40448),
        (3, 5, 4, (0,), 4, 1, 64, 40448),
        (4, 0, 7, (0,), 8, 1, 132, 80896),
    ]
)
A30 = _profiles(
    [
        (0, 14, 1, (0, 1, 2, 3), 1, 4, 14, 5952),
        (1, 5, 2, (0, 2), 2, 2, 28, 11968),
        (3, 0, 4, (0,), 4, 1, 56, 24125),
    ]
)
COMPUTE_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7}
"""NVML_COMPUTE_INSTANCE_PROFILE_*: slices."""


@dataclass
class FakeComputeInstance:
    id: int
    slices: int
    uuid: str
    pids: list[int] = field(default_factory=list)


@dataclass
class FakeGpuInstance:
    id: int
    profile: FakeProfile
    start: int
    compute: dict[int, FakeComputeInstance] = field(default_factory=dict)
    busy: bool = False  # processes of a compute instance that was destroyed under them

    @property
    def occupied(self) -> range:
        return range(self.start, self.start + self.profile.size)


@dataclass
class FakeGpu:
    uuid: str = "GPU-a1000000-0000-4000-8000-000000000000"
    name: str = "NVIDIA A100-SXM4-40GB"
    memory: tuple[int, int] | None = (40 * 2**30, 39 * 2**30)  # total, free
    capability: tuple[int, int] | None = (8, 0)
    cuda_cores: int | None = 6912
    architecture: int = 7
    compute_mode: int = 0
    mig_profiles: tuple[FakeProfile, ...] = A100_40  # none: a GPU without MIG
    mig: list[int] = field(default_factory=lambda: [0, 0])  # current, pending
    mode_change: int = OK  # activation status of a change of MIG mode
    instances: dict[int, FakeGpuInstance] = field(default_factory=dict)
    pids: dict[int, int | None] = field(default_factory=dict)  # pid: bytes
    mps_pids: list[int] = field(default_factory=list)
    nvlinks: list[str] = field(default_factory=list)  # where each ends: "switch", or a GPU's uuid
    near_cores: tuple[int, ...] = ()
    numa_node: int | None = None
    bus: int = 0
    lost: bool = False

    def layout(self) -> set[tuple[int, int, int, tuple[int, ...]]]:
        """What exists, without ids: profile, start, size, and the slices of its compute instances."""
        return {
            (
                one.profile.profile_id,
                one.start,
                one.profile.size,
                tuple(sorted(part.slices for part in one.compute.values())),
            )
            for one in self.instances.values()
        }

    def make(self, profile_id: int, start: int, *, compute: bool = True, pids: tuple[int, ...] = ()) -> str:
        """An instance that somebody made before; returns the MIG device's UUID, or "" without a compute instance."""
        profile = next(one for one in self.mig_profiles if one.profile_id == profile_id)
        instance = FakeGpuInstance(_free_id(self.instances), profile, start)
        self.instances[instance.id] = instance
        if not compute:
            return ""
        part = self.fill(instance, profile.slices)
        part.pids = list(pids)
        return part.uuid

    def fill(self, instance: FakeGpuInstance, slices: int) -> FakeComputeInstance:
        part_id = _free_id(instance.compute)
        part = FakeComputeInstance(part_id, slices, f"MIG-{self.uuid[4:12]}-{instance.id}-{part_id}")
        instance.compute[part_id] = part
        return part


def a_free_mig_gpu(**changes: Any) -> FakeGpu:
    """A GPU in MIG mode without instances."""
    return FakeGpu(**({"mig": [1, 1]} | changes))


def _free_id(taken: dict[int, Any]) -> int:
    """Ids are used again after their owner is gone, as the driver does."""
    return next(number for number in range(1, 100) if number not in taken)


class FakeDriver:
    """The library: attributes are C functions that take ctypes values and return an error code."""

    def __init__(self, *gpus: FakeGpu, privileged: bool = True, missing: tuple[str, ...] = ()) -> None:
        self.gpus = list(gpus)
        self.privileged = privileged
        self.missing = missing
        """Functions that this driver is too old to have."""
        self.init_code = OK
        self.process_names: dict[int, str] = {}
        self.open_sessions = 0
        self.calls: list[str] = []
        self.plan: dict[int, tuple[str, int]] = {}
        """What goes wrong at the n-th call, counted from 1: ("error", code), ("lost", 0), ("killed before", 0), or
        ("killed after", 0)."""
        self.killed = False
        """The process has ended: nothing that it still does may reach the driver."""
        self._handles: list[Any] = []

    def install(self, monkeypatch: Any) -> FakeDriver:
        """Be the library that pynvml has loaded."""
        monkeypatch.setattr(pynvml, "nvmlLib", self)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        monkeypatch.setattr(pynvml.NVMLError, "_errcode_to_string", dict(pynvml.NVMLError._errcode_to_string))
        return self

    def begin(self, plan: dict[int, tuple[str, int]] | None = None) -> None:
        """Count calls from here, with another plan of what goes wrong."""
        self.calls, self.plan, self.killed = [], plan or {}, False
        for gpu in self.gpus:
            gpu.lost = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(type(self), f"_{name}", None)
        if function is None or name in self.missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            if self.killed:
                raise ProcessKilled
            if name in UNCOUNTED:
                return function(self, *arguments)
            self.calls.append(name)
            what, code = self.plan.get(len(self.calls), ("", OK))
            self.killed = what.startswith("killed")
            if what == "killed before":
                raise ProcessKilled
            if what == "error":
                return code
            if what == "lost":
                for gpu in self.gpus:
                    gpu.lost = True
            if any(gpu.lost for gpu in self.gpus):
                return GPU_IS_LOST
            result = function(self, *arguments)
            if what == "killed after":
                raise ProcessKilled
            return result

        return call

    # Values behind pointers.

    def _give(self, pointer: Any, thing: Any) -> int:
        """Write a handle for ``thing`` into a pointer argument."""
        if thing not in self._handles:
            self._handles.append(thing)
        address = 16 * (1 + next(i for i, known in enumerate(self._handles) if known == thing))
        ctypes.c_void_p.from_buffer(pointer._obj).value = address
        return OK

    def _of(self, handle: Any) -> Any:
        """What a handle stands for: a tuple of a GPU's uuid, a GPU instance's id, a compute instance's id."""
        address = ctypes.cast(handle, ctypes.c_void_p).value
        return self._handles[address // 16 - 1]

    def _gpu(self, handle: Any) -> FakeGpu:
        return next(gpu for gpu in self.gpus if gpu.uuid == self._of(handle)[0])

    def _instance(self, handle: Any) -> FakeGpuInstance | None:
        return self._gpu(handle).instances.get(self._of(handle)[1])

    def _part(self, handle: Any) -> FakeComputeInstance | None:
        instance = self._instance(handle)
        return None if instance is None else instance.compute.get(self._of(handle)[2])

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
            return NOT_FOUND
        buffer.value = self.process_names[pid.value].encode()
        return OK

    # Devices.

    def _nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.gpus)
        return OK

    def _nvmlDeviceGetHandleByIndex_v2(self, index, device):
        if index.value >= len(self.gpus):
            return INVALID_ARGUMENT
        return self._give(device, (self.gpus[index.value].uuid,))

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
        return _list_processes(dict.fromkeys(self._gpu(device).mps_pids), count, array)

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

    # MIG, for everybody.

    def _nvmlDeviceGetMigMode(self, device, current, pending):
        gpu = self._gpu(device)
        if not gpu.mig_profiles:
            return NOT_SUPPORTED
        current._obj.value, pending._obj.value = gpu.mig
        return OK

    def _nvmlDeviceGetMaxMigDeviceCount(self, device, count):
        count._obj.value = 7 if self._gpu(device).mig_profiles else 0
        return OK

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, device, index, mig_device):
        """The index is the GPU instance's id, so that there are gaps."""
        gpu = self._gpu(device)
        instance = gpu.instances.get(index.value + 1)
        if instance is None or not instance.compute:
            return NOT_FOUND
        return self._give(mig_device, (gpu.uuid, instance.id, min(instance.compute)))

    def _nvmlDeviceGetGpuInstanceId(self, device, number):
        number._obj.value = self._of(device)[1]
        return OK

    def _nvmlDeviceGetAttributes_v2(self, device, attributes):
        instance, part = self._instance(device), self._part(device)
        if instance is None or part is None:
            return INVALID_ARGUMENT
        answer = attributes._obj
        answer.multiprocessorCount = instance.profile.sms * part.slices // instance.profile.slices
        answer.gpuInstanceSliceCount = instance.profile.slices
        answer.computeInstanceSliceCount = part.slices
        answer.memorySizeMB = instance.profile.memory_mib
        return OK

    # MIG, for privileged users.

    def _nvmlDeviceSetMigMode(self, device, mode, status):
        gpu = self._gpu(device)
        if not gpu.mig_profiles:
            return NOT_SUPPORTED
        if not self.privileged:
            return NO_PERMISSION
        gpu.mig[1] = mode
        if gpu.mode_change == OK or gpu.mig[0] == mode:
            gpu.mig[0] = mode
            status._obj.value = OK
        else:
            status._obj.value = gpu.mode_change
        return OK

    def _nvmlDeviceGetGpuInstanceProfileInfo(self, device, constant, info):
        gpu = self._gpu(device)
        profile = next((one for one in gpu.mig_profiles if one.constant == constant), None)
        if profile is None:
            return NOT_SUPPORTED
        answer = info._obj
        answer.id, answer.sliceCount, answer.instanceCount = profile.profile_id, profile.slices, profile.most
        answer.multiprocessorCount, answer.memorySizeMB = profile.sms, profile.memory_mib
        return OK

    def _nvmlDeviceGetGpuInstances(self, device, profile_id, array, count):
        gpu = self._gpu(device)
        if not self.privileged:
            return NO_PERMISSION
        found = [one for one in gpu.instances.values() if one.profile.profile_id == profile_id]
        for i, instance in enumerate(found):
            self._give_at(array, i, (gpu.uuid, instance.id))
        count._obj.value = len(found)
        return OK

    def _give_at(self, array, i, thing):
        slot = ctypes.c_void_p()
        self._give(ctypes.byref(slot), thing)
        ctypes.c_void_p.from_buffer(array, i * ctypes.sizeof(ctypes.c_void_p)).value = slot.value

    def _nvmlDeviceGetGpuInstanceById(self, device, number, instance):
        if not self.privileged:
            return NO_PERMISSION
        gpu = self._gpu(device)
        if number not in gpu.instances:
            return NOT_FOUND
        return self._give(instance, (gpu.uuid, number))

    def _nvmlGpuInstanceGetInfo(self, handle, info):
        instance = self._instance(handle)
        if instance is None:
            return INVALID_ARGUMENT
        answer = info._obj
        answer.id, answer.profileId = instance.id, instance.profile.profile_id
        answer.placement.start, answer.placement.size = instance.start, instance.profile.size
        return OK

    def _nvmlDeviceCreateGpuInstanceWithPlacement(self, device, profile_id, placement, instance):
        gpu, place = self._gpu(device), placement._obj
        profile = next((one for one in gpu.mig_profiles if one.profile_id == profile_id), None)
        if not self.privileged:
            return NO_PERMISSION
        if not gpu.mig[0]:
            return NOT_SUPPORTED
        if profile is None or place.start not in profile.starts or place.size != profile.size:
            return INVALID_ARGUMENT
        wanted = set(range(place.start, place.start + place.size))
        same = sum(one.profile is profile for one in gpu.instances.values())
        if any(wanted & set(one.occupied) for one in gpu.instances.values()) or same == profile.most:
            return INSUFFICIENT_RESOURCES
        made = FakeGpuInstance(_free_id(gpu.instances), profile, place.start)
        gpu.instances[made.id] = made
        return self._give(instance, (gpu.uuid, made.id))

    def _nvmlGpuInstanceGetComputeInstanceProfileInfo(self, handle, constant, engine, info):
        instance = self._instance(handle)
        slices = COMPUTE_SLICES.get(constant)
        if instance is None or slices is None or slices > instance.profile.slices:
            return NOT_SUPPORTED
        info._obj.id, info._obj.sliceCount = constant, slices
        info._obj.instanceCount = instance.profile.slices // slices
        return OK

    def _nvmlGpuInstanceCreateComputeInstance(self, handle, profile_id, compute_instance):
        instance = self._instance(handle)
        slices = COMPUTE_SLICES.get(profile_id)
        if not self.privileged:
            return NO_PERMISSION
        if instance is None or slices is None:
            return INVALID_ARGUMENT
        if slices + sum(part.slices for part in instance.compute.values()) > instance.profile.slices:
            return INSUFFICIENT_RESOURCES
        gpu = self._gpu(handle)
        part = gpu.fill(instance, slices)
        return self._give(compute_instance, (gpu.uuid, instance.id, part.id))

    def _nvmlGpuInstanceGetComputeInstances(self, handle, profile_id, array, count):
        instance = self._instance(handle)
        if not self.privileged:
            return NO_PERMISSION
        found = [part for part in instance.compute.values() if part.slices == COMPUTE_SLICES[profile_id]]
        for i, part in enumerate(found):
            self._give_at(array, i, (self._gpu(handle).uuid, instance.id, part.id))
        count._obj.value = len(found)
        return OK

    def _nvmlGpuInstanceGetComputeInstanceById(self, handle, number, compute_instance):
        instance = self._instance(handle)
        if instance is None or number not in instance.compute:
            return NOT_FOUND
        return self._give(compute_instance, (self._gpu(handle).uuid, instance.id, number))

    def _nvmlComputeInstanceGetInfo_v2(self, handle, info):
        gpu, part = self._gpu(handle), self._part(handle)
        if part is None:
            return INVALID_ARGUMENT
        info._obj.id = part.id
        device = pynvml.c_nvmlDevice_t()
        self._give(ctypes.byref(device), (gpu.uuid, self._of(handle)[1], part.id))
        info._obj.device = device
        return OK

    def _nvmlComputeInstanceDestroy(self, handle):
        """Goes through although processes run in it: their GPU instance then stays."""
        if not self.privileged:
            return NO_PERMISSION
        instance, part = self._instance(handle), self._part(handle)
        if instance is None or part is None:
            return INVALID_ARGUMENT
        del instance.compute[part.id]
        if part.pids:
            instance.busy = True
        return OK

    def _nvmlGpuInstanceDestroy(self, handle):
        if not self.privileged:
            return NO_PERMISSION
        instance = self._instance(handle)
        if instance is None:
            return INVALID_ARGUMENT
        if instance.compute or instance.busy:
            return IN_USE
        del self._gpu(handle).instances[instance.id]
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
