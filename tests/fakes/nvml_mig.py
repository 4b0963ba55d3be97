"""The driver's calls on MIG, by NVIDIA's documentation of NVML, multi instance GPU management."""

from __future__ import annotations

import ctypes

import pynvml

from tests.fakes.gpus import (
    COMPUTE_SLICES,
    IN_USE,
    INSUFFICIENT_RESOURCES,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    OK,
    FakeGpuInstance,
    free_id,
)
from tests.fakes.nvml_library import FakeLibrary


class MigCalls(FakeLibrary):
    """Everybody may list MIG devices; only privileged users see and change instances."""

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
        if instance.id in gpu.hidden_instances:
            return NO_PERMISSION
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
        made = FakeGpuInstance(free_id(gpu.instances), profile, place.start)
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
