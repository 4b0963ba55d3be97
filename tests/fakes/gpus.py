"""GPUs as a driver sees them: modes, MIG instances, processes. The tables of MIG profiles are written here from NVIDIA's
documentation, apart from the ones that are tested."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OK, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION = 0, 2, 3, 4
NOT_FOUND, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED = 6, 7, 9
NO_DATA = 21
GPU_IS_LOST, RESET_REQUIRED, IN_USE, INSUFFICIENT_RESOURCES, UNKNOWN = 15, 16, 19, 23, 999


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
    instances: dict[int, FakeGpuInstance] = field(default_factory=dict)
    pids: dict[int, int | None] = field(default_factory=dict)  # pid: bytes
    mps_pids: list[int] = field(default_factory=list)
    mps_bytes: dict[int, int] = field(default_factory=dict)
    nvlinks: list[str] = field(default_factory=list)  # where each ends: "switch", or a GPU's uuid
    near_cores: tuple[int, ...] = ()
    numa_node: int | None = None
    bus: int = 0
    lost: bool = False
    handle_code: int = OK  # what asking for the device ends with
    hidden_instances: tuple[int, ...] = ()  # of other containers

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
        instance = FakeGpuInstance(free_id(self.instances), profile, start)
        self.instances[instance.id] = instance
        if not compute:
            return ""
        part = self.fill(instance, profile.slices)
        part.pids = list(pids)
        return part.uuid

    def fill(self, instance: FakeGpuInstance, slices: int) -> FakeComputeInstance:
        part_id = free_id(instance.compute)
        part = FakeComputeInstance(part_id, slices, f"MIG-{self.uuid[4:12]}-{instance.id}-{part_id}")
        instance.compute[part_id] = part
        return part


def a_free_mig_gpu(**changes: Any) -> FakeGpu:
    """A GPU in MIG mode without instances."""
    return FakeGpu(**({"mig": [1, 1]} | changes))


def free_id(taken: dict[int, Any]) -> int:
    """Ids are used again after their owner is gone, as the driver does."""
    return next(number for number in range(1, 100) if number not in taken)
