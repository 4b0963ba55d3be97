"""MIG instances of one GPU through NVML: list, create, destroy; raises PartitionError. [unverified on GPU]

``placement.inventory.nvml.nvml_session`` provides NVML. Calls, their order and their errors follow NVIDIA's documentation of
NVML, "Multi Instance GPU Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from placement.errors import InventoryError, PartitionError
from placement.inventory.nvml import nvml_session
from placement.inventory.nvml_queries import MIB, mig_devices, read_instances, read_processes, text
from placement.mig_geometry import Geometry, PlacedProfile, Placement
from placement.types import MigInstance

PROFILE_INFO_VERSION = 1
"""Version of NVML's profile info struct; every driver with MIG supports it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuInstance:
    """An existing GPU instance, with or without compute instances."""

    id: int
    profile_id: int
    placement: Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeInstance:
    """A compute instance: the MIG device that a process uses."""

    id: int
    uuid: str
    sm_count: int
    memory_bytes: int


class MigGpu:
    """One GPU during an NVML session."""

    def __init__(self, nvml: Any, handle: Any, uuid: str) -> None:
        self._nvml, self._handle, self.uuid = nvml, handle, uuid

    def mode(self) -> tuple[bool, bool] | None:
        """Whether MIG is on, and whether it will be after the next reset; None if the GPU has no MIG."""
        with self._as_partition_errors("read the MIG mode"):
            try:
                current, pending = self._nvml.nvmlDeviceGetMigMode(self._handle)
            except self._nvml.NVMLError_NotSupported:
                return None
        return bool(current), bool(pending)

    def permitted_instances(self) -> list[GpuInstance] | None:
        """Like ``instances``; None without the permission to manage MIG, which listing needs too."""
        try:
            return self.instances()
        except PartitionError as error:
            if isinstance(error.__cause__, self._nvml.NVMLError_NoPermission):
                return None
            raise

    def instances(self) -> list[GpuInstance]:
        """Every GPU instance, whoever created it."""
        found = []
        with self._as_partition_errors("list the GPU instances"):
            for info in self._profiles():
                # pynvml fills the given array; a profile has at most instanceCount instances.
                array = (self._nvml.c_nvmlGpuInstance_t * max(1, info.instanceCount))()
                count = ctypes.c_uint(0)
                self._nvml.nvmlDeviceGetGpuInstances(self._handle, info.id, array, ctypes.byref(count))
                found += [self._read_instance(array[i]) for i in range(count.value)]
        return sorted(found, key=lambda one: one.id)

    def devices(self, geometry: Geometry | None) -> tuple[MigInstance, ...]:
        """The MIG devices, readable without special permission."""
        with self._as_partition_errors("list the MIG devices"):
            return read_instances(self._nvml, self._handle, geometry)

    def profile_id(self, placed: PlacedProfile) -> int:
        """The driver's id of a profile."""
        with self._as_partition_errors(f"look up the MIG profile {placed.profile.name}"):
            info = self._nvml.nvmlDeviceGetGpuInstanceProfileInfo(
                self._handle, placed.profile.nvml_profile, version=PROFILE_INFO_VERSION
            )
        return int(info.id)

    def create(self, profile_id: int, placement: Placement) -> Any:
        """Create a GPU instance; returns its handle, which ``id_of`` takes."""
        with self._as_partition_errors(
            f"create a GPU instance of profile {profile_id} at memory slice {placement.start}"
        ):
            place = self._nvml.c_nvmlGpuInstancePlacement_t(placement.start, placement.size)
            return self._nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
                self._handle, profile_id, ctypes.byref(place)
            )

    def id_of(self, instance: Any) -> int:
        """The id of a GPU instance that was just created."""
        with self._as_partition_errors("read the id of the new GPU instance"):
            return int(self._nvml.nvmlGpuInstanceGetInfo(instance).id)

    def was_refused(self, error: PartitionError) -> bool:
        """Whether the driver rejected the request, so that nothing was created; otherwise it may have failed half-way."""
        refusals = (
            self._nvml.NVMLError_InsufficientResources,
            self._nvml.NVMLError_NoPermission,
            self._nvml.NVMLError_InvalidArgument,
            self._nvml.NVMLError_NotSupported,
        )
        return isinstance(error.__cause__, refusals)

    def create_compute_instance(self, instance_id: int) -> int:
        """Create the compute instance that fills a GPU instance; returns its id."""
        with self._as_partition_errors(f"create a compute instance in GPU instance {instance_id}"):
            instance = self._nvml.nvmlDeviceGetGpuInstanceById(self._handle, instance_id)
            largest = max(self._compute_profiles(instance), key=lambda info: int(info.sliceCount))
            made = self._nvml.nvmlGpuInstanceCreateComputeInstance(instance, largest.id)
            return int(self._nvml.nvmlComputeInstanceGetInfo(made).id)

    def compute_instances(self, instance_id: int) -> list[ComputeInstance]:
        """The compute instances of a GPU instance."""
        with self._as_partition_errors(f"list the compute instances of GPU instance {instance_id}"):
            instance = self._nvml.nvmlDeviceGetGpuInstanceById(self._handle, instance_id)
            return [self._device_of(one) for one in self._compute_handles(instance)]

    def processes(self, uuid: str) -> list[int]:
        """Processes on the MIG device of that UUID; empty if there is no such device."""
        with self._as_partition_errors(f"list the processes of {uuid}"):
            for device in mig_devices(self._nvml, self._handle):
                if text(self._nvml.nvmlDeviceGetUUID(device)) == uuid:
                    return [one.pid for one in read_processes(self._nvml, device)]
        return []

    def destroy_compute_instance(self, instance_id: int, compute_id: int) -> None:
        """Destroy one compute instance. Drivers do this under running processes too: check ``processes`` first."""
        with self._as_partition_errors(
            f"destroy compute instance {compute_id} of GPU instance {instance_id}"
        ):
            instance = self._nvml.nvmlDeviceGetGpuInstanceById(self._handle, instance_id)
            made = self._nvml.nvmlGpuInstanceGetComputeInstanceById(instance, compute_id)
            self._nvml.nvmlComputeInstanceDestroy(made)

    def destroy(self, instance_id: int) -> None:
        """Destroy a GPU instance whose compute instances are gone."""
        with self._as_partition_errors(f"destroy GPU instance {instance_id}"):
            self._nvml.nvmlGpuInstanceDestroy(
                self._nvml.nvmlDeviceGetGpuInstanceById(self._handle, instance_id)
            )

    def _profiles(self) -> Iterator[Any]:
        for constant in range(self._nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
            try:
                yield self._nvml.nvmlDeviceGetGpuInstanceProfileInfo(
                    self._handle, constant, version=PROFILE_INFO_VERSION
                )
            except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_InvalidArgument):
                continue  # not on this model, or not known to this driver

    def _compute_profiles(self, instance: Any) -> list[Any]:
        found = []
        for constant in range(self._nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            try:
                found.append(
                    self._nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                        instance,
                        constant,
                        self._nvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED,
                        version=PROFILE_INFO_VERSION,
                    )
                )
            except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_InvalidArgument):
                continue
        return found

    def _compute_handles(self, instance: Any) -> Iterator[Any]:
        for info in self._compute_profiles(instance):
            array = (self._nvml.c_nvmlComputeInstance_t * max(1, info.instanceCount))()
            count = ctypes.c_uint(0)
            self._nvml.nvmlGpuInstanceGetComputeInstances(instance, info.id, array, ctypes.byref(count))
            yield from (array[i] for i in range(count.value))

    def _read_instance(self, instance: Any) -> GpuInstance:
        info = self._nvml.nvmlGpuInstanceGetInfo(instance)
        placement = Placement(int(info.placement.start), int(info.placement.size))
        return GpuInstance(id=int(info.id), profile_id=int(info.profileId), placement=placement)

    def _device_of(self, compute_instance: Any) -> ComputeInstance:
        info = self._nvml.nvmlComputeInstanceGetInfo(compute_instance)
        attributes = self._nvml.nvmlDeviceGetAttributes_v2(info.device)
        return ComputeInstance(
            id=int(info.id),
            uuid=text(self._nvml.nvmlDeviceGetUUID(info.device)),
            sm_count=int(attributes.multiprocessorCount),
            memory_bytes=int(attributes.memorySizeMB) * MIB,
        )

    @contextmanager
    def _as_partition_errors(self, doing: str) -> Iterator[None]:
        """Convert NVML errors to PartitionError, with a hint for each."""
        try:
            yield
        except self._nvml.NVMLError as error:
            hint = self._hints().get(error.value, "See `nvidia-smi` and the kernel's log (`dmesg`)")
            raise PartitionError(f"MIG on {self.uuid}", f"could not {doing}: {error}", hint) from error

    def _hints(self) -> dict[int, str]:
        nvml, uuid = self._nvml, self.uuid
        return {
            nvml.NVML_ERROR_NO_PERMISSION: "Run as root, have an administrator partition the GPU, or use backend='mps'",
            nvml.NVML_ERROR_IN_USE: "Something still uses the GPU: end the processes that "
            f"`nvidia-smi -i {uuid}` and `fuser -v /dev/nvidia*` list, then try again",
            nvml.NVML_ERROR_RESET_REQUIRED: "Once nothing uses the GPU, "
            f"run `sudo nvidia-smi --gpu-reset -i {uuid}`, then try again",
            nvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "Another user may have partitioned the GPU in the meantime: "
            f"see `sudo nvidia-smi mig -lgi -i {uuid}`, then try again",
            nvml.NVML_ERROR_GPU_IS_LOST: "The GPU fell off the bus: reset it or restart the host, "
            "then run `rayagi cleanup`",
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND: "The driver is too old for MIG: update it to 450 or newer "
            "(H100 and later need 525), or use backend='mps'",
            nvml.NVML_ERROR_NOT_SUPPORTED: "This GPU or driver does not support it: use backend='mps'",
        }


@contextmanager
def mig_gpu(uuid: str) -> Iterator[MigGpu]:
    """Open an NVML session for a GPU of this host, by UUID.

    Raises:
        PartitionError: no driver responds, or it has no such GPU.
    """
    with ExitStack() as session:
        try:
            nvml = session.enter_context(nvml_session())
        except InventoryError as error:
            raise PartitionError(f"MIG on {uuid}", error.problem, error.hint) from error
        if nvml is None:
            raise PartitionError(
                f"MIG on {uuid}", "no NVIDIA driver responds", "See `nvidia-smi` on that host"
            )
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            raise PartitionError(
                f"MIG on {uuid}",
                f"the driver cannot open the GPU: {error}",
                "See `nvidia-smi -L`; a GPU that is lost needs a reset or a restart of the host",
            ) from error
        yield MigGpu(nvml, handle, uuid)
