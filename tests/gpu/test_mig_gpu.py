"""MIG and the inventory on a real driver. Read only, unless RAYAGI_TEST_MIG=1 says that this GPU may be cut."""

from __future__ import annotations

import ctypes
import os
import subprocess

import pytest
import torch

from placement.backends.mig import MigBackend
from placement.backends.mig_nvml import mig_gpu
from placement.inventory import local_machine
from placement.inventory.nvml import nvml_session
from placement.ledger import Ledger
from placement.mig_geometry import geometry_of
from placement.types import Slice
from tests.programs import run_python

MAY_CUT = os.environ.get("RAYAGI_TEST_MIG") == "1"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was verified"),
]

IN_AN_INSTANCE = """
import json, sys, torch
seen = torch.cuda.get_device_properties(0)
torch.ones(1000, device="cuda").sum().item()
print(json.dumps([torch.cuda.device_count(), seen.multi_processor_count, seen.total_memory]))
"""


def asked(*fields: str) -> list[list[str]]:
    """nvidia-smi's own answers, per GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.strip().splitlines()]


@pytest.fixture
def node(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return local_machine().nodes[0]


def test_the_inventory_says_what_nvidia_smi_says(node):
    rows = asked("uuid", "name", "compute_cap", "memory.total", "driver_version", "mig.mode.current")
    assert len(rows) == len(node.gpus)
    modes = {"Enabled": True, "Disabled": False}
    for gpu, (uuid, name, capability, memory_mib, driver, mode) in zip(node.gpus, rows, strict=True):
        assert (gpu.uuid, gpu.name) == (uuid, name)
        assert gpu.compute_capability == tuple(map(int, capability.split(".")))
        assert gpu.memory_total_bytes // 2**20 == int(memory_mib)
        assert node.driver_version == driver
        assert gpu.mig_enabled is modes.get(mode)  # None where it has no MIG


def test_this_process_is_seen_among_those_on_the_gpu(node):
    if node.gpus[0].mig_enabled:
        pytest.skip("in MIG mode, processes belong to instances")
    held = torch.ones(1, device="cuda:0")
    processes = [one.pid for gpu in local_machine().nodes[0].gpus for one in gpu.processes]
    assert os.getpid() in processes or os.readlink("/proc/self/ns/pid") != os.readlink("/proc/1/ns/pid")
    del held


def test_every_mig_device_of_nvidia_smi_is_in_the_inventory(node):
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True)
    uuids = {line.split("UUID: ")[1].rstrip(")") for line in listed.stdout.splitlines() if "MIG" in line}
    assert {one.uuid for gpu in node.gpus for one in gpu.mig_instances} == uuids


def test_the_geometry_is_the_drivers(node):
    """Profile ids, sizes, SMs and legal placements, as this driver lists them for this GPU."""
    compared = 0
    with nvml_session() as nvml:
        for gpu in node.gpus:
            geometry = geometry_of(gpu)
            if geometry is None:
                continue
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            for profile in geometry.profiles:
                info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, profile.nvml_profile, version=1)
                assert (info.id, info.sliceCount) == (profile.profile_id, profile.compute_slices)
                assert profile.sm_count in (None, info.multiprocessorCount), profile.name
                count = ctypes.c_uint(0)
                try:
                    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(
                        handle, info.id, None, ctypes.byref(count)
                    )
                except nvml.NVMLError_NoPermission:
                    continue
                places = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
                nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, info.id, places, ctypes.byref(count))
                found = {(one.start, one.size) for one in places[: count.value]}
                assert found == {(start, profile.size) for start in profile.starts}, profile.name
                compared += 1
    if not compared:
        pytest.skip("no GPU here whose MIG placements this user may list")


@pytest.mark.skipif(
    not MAY_CUT, reason="RAYAGI_TEST_MIG is not 1: nothing was cut, nothing of it was verified"
)
def test_a_gpu_is_cut_used_and_given_back(node, tmp_path):
    """Needs root, and a GPU in MIG mode that nobody uses."""
    gpu = next((gpu for gpu in node.gpus if geometry_of(gpu) is not None and gpu.mig_enabled), None)
    if gpu is None:
        pytest.skip("no GPU here is in MIG mode")
    backend, ledger = MigBackend(), Ledger.open("test", tmp_path)
    before = (gpu.mig_enabled, gpu.mig_instances)
    try:
        shares = backend.partition(gpu, (0.5, 0.25), ledger)
        with mig_gpu(gpu.uuid) as device:
            assert len(device.instances()) == len(before[1]) + 2
        for share in shares:
            gmi_slice = Slice(node=node.name, backend="mig", gpu_uuid=gpu.uuid, gpu_fraction=0.5, share=share)
            assert backend.health(gmi_slice).state == "ok"
            done = run_python(IN_AN_INSTANCE, env=os.environ | backend.environment(gmi_slice))
            devices, sms, memory = map(int, done.stdout.strip(" []\n").split(","))
            assert (devices, sms) == (1, share.sm_count)
            assert memory <= share.memory_bytes
    finally:
        backend.restore(gpu.uuid, ledger)
    after = next(one for one in local_machine().nodes[0].gpus if one.uuid == gpu.uuid)
    assert (after.mig_enabled, after.mig_instances) == before
