"""The inventory through NVIDIA's bindings, on a stateful fake driver library; needs no GPU."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from placement.errors import InventoryError
from placement.inventory import nvml_queries
from placement.inventory.local import local_node
from placement.inventory.nvml import (
    DriverReading,
    as_gpu,
    memory_by_process,
    read_driver,
    select_visible,
)
from placement.types import Gpu, GpuLink, GpuProcess, MigInstance
from tests.fakes.gpus import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    H100,
    NO_PERMISSION,
    UNKNOWN,
    FakeGpu,
    a_free_mig_gpu,
)
from tests.fakes.nvml import FakeDriver

HOST_MEMORY = 64 * 2**30


@pytest.fixture(autouse=True)
def _no_devices_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("placement.inventory.nvml.DEV", tmp_path)


def read(monkeypatch, driver: FakeDriver) -> DriverReading:
    driver.install(monkeypatch)
    return read_driver(host_memory_bytes=HOST_MEMORY)


def a100(index: int, **changes) -> FakeGpu:
    return FakeGpu(**({"uuid": f"GPU-a100000{index}", "bus": index + 1} | changes))


def test_no_library_means_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # None makes the import fail
    assert read_driver(host_memory_bytes=HOST_MEMORY) == DriverReading()


def test_no_driver_means_no_gpus(monkeypatch):
    driver = FakeDriver(a100(0))
    driver.init_code = DRIVER_NOT_LOADED
    assert read(monkeypatch, driver) == DriverReading()


@pytest.mark.parametrize("has_library", [True, False])
def test_gpus_that_nvml_cannot_read_are_an_error_and_no_run_on_cores(monkeypatch, tmp_path, has_library):
    """A container with the capability compute and without utility has the devices, CUDA, and not NVML."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    driver = FakeDriver(a100(0)).install(monkeypatch)
    driver.init_code = DRIVER_NOT_LOADED
    if not has_library:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(
        InventoryError,
        match=r"GPUs nvidia0, nvidia1: NVML's library .* NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ):
        read_driver(host_memory_bytes=HOST_MEMORY)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_driver(host_memory_bytes=HOST_MEMORY) == DriverReading()


def test_a_driver_that_fails_is_an_error_with_a_hint(monkeypatch):
    driver = FakeDriver(a100(0))
    driver.init_code = UNKNOWN
    with pytest.raises(
        InventoryError, match=r"the driver did not start: Unknown Error.*CUDA_VISIBLE_DEVICES="
    ):
        read(monkeypatch, driver)


def test_two_gpus_are_read_and_nvml_is_closed(monkeypatch):
    driver = FakeDriver(a100(0), a100(1))
    reading = read(monkeypatch, driver)
    assert [gpu.uuid for gpu in reading.gpus] == ["GPU-a1000000", "GPU-a1000001"]
    gpu = reading.gpus[0]
    # 6912 cores / 64 per multiprocessor (8.0) = 108
    assert gpu.sm_count == 108
    assert (gpu.memory_total_bytes, gpu.memory_free_bytes) == (40 * 2**30, 39 * 2**30)
    assert (gpu.compute_capability, gpu.architecture, gpu.compute_mode) == ((8, 0), "Ampere", "default")
    assert (gpu.mig_enabled, gpu.mig_pending, gpu.mig_instances) == (False, False, ())
    assert (gpu.processes, gpu.mps_running, gpu.numa_node, gpu.cores) == ((), False, None, ())
    assert (reading.driver_version, reading.cuda_version) == ("580.65.06", (13, 1))
    assert driver.open_sessions == 0


def test_what_a_device_does_not_tell_is_left_out(monkeypatch):
    shared = a100(0, cuda_cores=None, memory=None, capability=None, mig_profiles=())
    (gpu,) = read(monkeypatch, FakeDriver(shared)).gpus
    assert (gpu.sm_count, gpu.compute_capability, gpu.mig_enabled, gpu.mig_pending) == (None,) * 4
    assert (gpu.memory_total_bytes, gpu.memory_free_bytes) == (
        HOST_MEMORY,
        None,
    )  # memory shared with the host


def test_an_old_driver_leaves_out_what_it_cannot_answer(monkeypatch):
    missing = (
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetMigMode",
    )
    (gpu,) = read(monkeypatch, FakeDriver(a100(0, numa_node=1), missing=missing)).gpus
    assert (gpu.architecture, gpu.mps_running, gpu.numa_node, gpu.mig_enabled) == (None,) * 4


def test_a_lost_gpu_is_an_error_that_names_it_and_nvml_is_closed(monkeypatch):
    driver = FakeDriver(a100(0), a100(1))
    read(monkeypatch, driver)
    second = [i for i, name in enumerate(driver.calls, 1) if name == "nvmlDeviceGetHandleByIndex_v2"][1]
    driver.begin({second + 2: ("error", GPU_IS_LOST)})
    with pytest.raises(InventoryError, match="GPU 1 could not be read: GPU is lost"):
        read_driver(host_memory_bytes=HOST_MEMORY)
    assert driver.open_sessions == 0


def test_a_lost_gpu_keeps_nobody_from_the_others(monkeypatch):
    driver = FakeDriver(a100(0), a100(1, handle_code=GPU_IS_LOST), a100(2))
    with pytest.raises(InventoryError, match=r"GPU 1 .*: GPU is lost\. .*CUDA_VISIBLE_DEVICES to the others"):
        read(monkeypatch, driver)
    for others in ("0,2", "GPU-a1000000,GPU-a1000002"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", others)
        assert [gpu.index for gpu in read(monkeypatch, driver).gpus] == [0, 2]
    for with_it in ("0,1,2", "1", "GPU-a1000001"):  # no run on fewer GPUs, or on none, without a word
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", with_it)
        with pytest.raises(InventoryError, match="GPU 1 could not be read"):
            read(monkeypatch, driver)


def test_gpus_of_another_job_of_the_node_are_counted_by_nvml_and_not_by_cuda(monkeypatch):
    """nvmlDeviceGetCount_v2 counts devices of which nvmlDeviceGetHandleByIndex_v2 says NO_PERMISSION."""
    driver = FakeDriver(a100(0, handle_code=NO_PERMISSION), a100(1), a100(2))
    assert [(gpu.index, gpu.uuid) for gpu in read(monkeypatch, driver).gpus] == [
        (0, "GPU-a1000001"),
        (1, "GPU-a1000002"),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the index among those of the job, as Slurm gives it
    assert [gpu.uuid for gpu in read(monkeypatch, driver).gpus] == ["GPU-a1000001"]


def test_a_permission_that_is_missing_for_a_gpu_of_the_process_is_an_error(monkeypatch):
    driver = FakeDriver(a100(0))
    driver.failing = {"nvmlDeviceGetUUID": NO_PERMISSION}
    with pytest.raises(InventoryError, match="GPU 0 could not be read: Insufficient Permissions"):
        read(monkeypatch, driver)


def test_mig_instances_of_other_containers_are_left_out(monkeypatch):
    gpu = a_free_mig_gpu()
    gpu.make(14, 0)
    own = gpu.make(14, 2)
    gpu.hidden_instances = (1,)
    (found,) = read(monkeypatch, FakeDriver(gpu, privileged=False)).gpus
    assert [one.uuid for one in found.mig_instances] == [own]


@pytest.mark.parametrize(
    "query",
    [
        "nvmlDeviceGetCpuAffinity",
        "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        "nvmlDeviceGetNvLinkRemotePciInfo_v2",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlSystemGetProcessName",
    ],
)
def test_what_only_describes_a_gpu_may_end_with_an_unknown_error(monkeypatch, query):
    """As CPU affinity does in WSL, where processes are not listed either."""
    driver = FakeDriver(
        *(a100(i, numa_node=0, nvlinks=[f"GPU-a100000{1 - i}"], pids={40 + i: 1}) for i in range(2))
    )
    driver.failing = {query: UNKNOWN}
    reading = read(monkeypatch, driver)
    assert query in driver.calls
    assert [gpu.sm_count for gpu in reading.gpus] == [108, 108]
    assert len(reading.gpu_links) == 1


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100 80GB PCIe", 80),
        ("NVIDIA H200", 141),
        ("NVIDIA GH200 480GB", 2 * 20096 / 1024),  # not in the table: its instances together
    ],
)
def test_the_memory_of_a_gpu_in_mig_mode_is_told_to_administrators_only(monkeypatch, name, gib):
    """Else a host's memory counted as the GPU's, and every instance as a small part of that."""
    gpu = a_free_mig_gpu(name=name)
    gpu.make(9, 0)
    gpu.make(9, 4)
    (found,) = read(monkeypatch, FakeDriver(gpu, privileged=False)).gpus
    assert (found.memory_total_bytes, found.memory_free_bytes) == (gib * 2**30, None)
    assert [one.memory_bytes for one in found.mig_instances] == [20096 * 2**20] * 2


@pytest.mark.parametrize("value", ["", "-1", " ", "NoDevFiles"])
def test_hidden_gpus_are_not_asked_for(monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    driver = FakeDriver(a100(0))
    driver.init_code = UNKNOWN
    assert read(monkeypatch, driver) == DriverReading()


def test_the_environment_chooses_among_the_gpus_and_their_links(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    reading = read(monkeypatch, FakeDriver(a100(0), a100(1), a100(2)))
    assert [gpu.index for gpu in reading.gpus] == [2, 1]
    assert [link.gpus for link in reading.gpu_links] == [("GPU-a1000001", "GPU-a1000002")]


@pytest.mark.parametrize("wanted", ["2", "GPU-b", "MIG-7", "x,0"])
def test_names_of_no_gpu_are_an_error_and_no_run_on_cores(monkeypatch, wanted):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    with pytest.raises(InventoryError) as caught:
        read(monkeypatch, FakeDriver(a100(0), a100(1)))
    assert str(caught.value) == (
        f"CUDA_VISIBLE_DEVICES={wanted}: its first entry is none of the GPUs that CUDA has here: "
        "0 (GPU-a1000000), 1 (GPU-a1000001). Name some of them, or set it empty to run without GPUs."
    )
    assert read(monkeypatch, FakeDriver()).gpus == ()  # a host without GPUs


def test_processes_and_the_mps_server_are_found(monkeypatch):
    driver = FakeDriver(
        a100(0, pids={41: 3 * 2**30, 42: None}), a100(1, pids={43: 1}), a100(2, mps_pids=[44])
    )
    driver.process_names = {41: "python", 43: "/usr/bin/nvidia-cuda-mps-server"}
    first, second, third = read(monkeypatch, driver).gpus
    assert first.processes == (GpuProcess(pid=41, memory_used_bytes=3 * 2**30), GpuProcess(pid=42))
    assert (first.mps_running, second.mps_running, third.mps_running) == (False, True, True)


def test_rays_workers_are_known_by_their_title(monkeypatch, tmp_path):
    monkeypatch.setattr(nvml_queries, "PROC", tmp_path)
    for pid, title in ((41, b"ray::Gmi.iterate\0"), (42, b"python\0train.py\0--name\0ray::x\0")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(title)
    (only,) = read(monkeypatch, FakeDriver(a100(0, pids={41: 1, 42: 2, 43: 3}))).gpus
    assert [(one.pid, one.of_ray) for one in only.processes] == [(41, True), (42, False), (43, False)]


def test_memory_is_reported_by_process_including_mps_clients(monkeypatch):
    driver = FakeDriver(a100(0, pids={41: 3 * 2**30, 42: None}, mps_pids=[44, 45], mps_bytes={44: 2**30}))
    driver.install(monkeypatch)
    assert memory_by_process(driver.gpus[0].uuid) == {41: 3 * 2**30, 44: 2**30}
    assert memory_by_process("GPU-of-nobody") == {}
    driver.gpus[0].lost = True
    assert memory_by_process(driver.gpus[0].uuid) == {}
    assert driver.open_sessions == 0


def test_near_cores_and_numa_nodes_are_read(monkeypatch):
    (gpu,) = read(monkeypatch, FakeDriver(a100(0, near_cores=(0, 63, 64, 130), numa_node=1))).gpus
    assert (gpu.cores, gpu.numa_node) == ((0, 63, 64, 130), 1)


def test_links_count_those_between_two_gpus(monkeypatch):
    # 0 and 1: four links between them, one NUMA node; 2 is alone on another
    driver = FakeDriver(
        a100(0, numa_node=0, nvlinks=["GPU-a1000001"] * 4),
        a100(1, numa_node=0, nvlinks=["GPU-a1000000"] * 4),
        a100(2, numa_node=1),
    )
    assert read(monkeypatch, driver).gpu_links == (
        GpuLink(gpus=("GPU-a1000000", "GPU-a1000001"), nvlinks=4, path="PHB"),
        GpuLink(gpus=("GPU-a1000000", "GPU-a1000002"), nvlinks=0, path="SYS"),
        GpuLink(gpus=("GPU-a1000001", "GPU-a1000002"), nvlinks=0, path="SYS"),
    )


def test_through_a_switch_every_pair_has_all_links(monkeypatch):
    reading = read(monkeypatch, FakeDriver(*(a100(i, nvlinks=["switch"] * 18) for i in range(3))))
    assert [link.nvlinks for link in reading.gpu_links] == [18, 18, 18]


def test_mig_instances_are_read_over_gaps(monkeypatch):
    gpu = a_free_mig_gpu(memory=(40 * 2**30, 0))
    gpu.make(9, 4, pids=(77,))
    hidden = gpu.make(19, 0)
    double = gpu.make(15, 2)
    del gpu.instances[2]  # a gap between the first and the third
    (read_gpu,) = read(monkeypatch, FakeDriver(gpu)).gpus
    assert hidden not in [one.uuid for one in read_gpu.mig_instances]
    three, ten = read_gpu.mig_instances
    assert (three.profile, three.start, three.size, three.sm_count, three.in_use) == (
        "3g.20gb",
        4,
        4,
        42,
        True,
    )
    # one compute slice like 1g.5gb, but 9984 MiB: the one with double memory
    assert (ten.uuid, ten.profile, ten.start, ten.size, ten.in_use) == (double, "1g.10gb", 2, 2, False)
    assert ten.memory_bytes == 9984 * 2**20


def test_placements_are_unknown_without_permission(monkeypatch):
    gpu = a_free_mig_gpu()
    gpu.make(14, 2)
    (read_gpu,) = read(monkeypatch, FakeDriver(gpu, privileged=False)).gpus
    (instance,) = read_gpu.mig_instances
    assert (instance.profile, instance.start, instance.size) == ("2g.10gb", None, None)


@pytest.mark.parametrize("privileged", [True, False])
def test_root_in_a_container_may_lack_the_permission_for_mig(monkeypatch, privileged):
    """There the driver's device files are missing, and so is what would say so under /proc."""
    monkeypatch.setattr("placement.inventory.local.may_configure_mig", lambda: True)  # as root
    gpu = a_free_mig_gpu()
    gpu.make(14, 2)
    FakeDriver(gpu, privileged=privileged).install(monkeypatch)
    assert local_node().may_configure_mig is privileged


def test_a_compute_instance_that_does_not_fill_its_gpu_instance_says_so(monkeypatch):
    gpu = a_free_mig_gpu(mig_profiles=H100, name="NVIDIA H100 80GB HBM3", memory=(80 * 2**30, 0))
    gpu.make(9, 0, compute=False)
    gpu.fill(gpu.instances[1], 1)
    (read_gpu,) = read(monkeypatch, FakeDriver(gpu)).gpus
    assert [one.profile for one in read_gpu.mig_instances] == ["1c.3g.40gb"]


FOUR = tuple(Gpu(index=i, uuid=f"GPU-{i}{i}ab", name="fake", memory_total_bytes=1) for i in range(4))


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        ("0,2", [0, 2]),
        ("3, 1", [3, 1]),
        ("GPU-22", [2]),
        ("1,7,2", [1]),  # CUDA stops at the first that does not exist
        ("GPU-", []),  # ambiguous
        ("1,1,2", [1]),
        ("MIG-1234", []),
    ],
)
def test_visible_devices_are_chosen_as_cuda_does(wanted, indices):
    assert [gpu.index for gpu in select_visible(FOUR, wanted)] == indices


def test_mig_instances_that_are_named_count_as_gpus_of_their_own():
    one, two = (
        MigInstance(uuid=f"MIG-{i}", profile="3g.20gb", memory_bytes=20 * 2**30, sm_count=42) for i in (1, 2)
    )
    owner = replace(FOUR[0], mig_enabled=True, mig_instances=(one, two), compute_capability=(8, 0))
    visible = select_visible((owner, *FOUR[1:]), "MIG-2,MIG-1,MIG-1")
    assert visible == (as_gpu(owner, two, index=0), as_gpu(owner, one, index=1))
    assert (visible[0].uuid, visible[0].name, visible[0].sm_count) == ("MIG-2", "fake MIG 3g.20gb", 42)
    assert (visible[0].memory_total_bytes, visible[0].compute_capability) == (20 * 2**30, (8, 0))
