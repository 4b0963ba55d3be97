from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from placement.backends import BACKENDS
from placement.inventory.limits import (
    allowed_cores,
    available_bytes,
    cpu_quota_cores,
    may_configure_mig,
    memory_bytes,
    mps_is_given,
    numa_nodes,
)
from placement.inventory.local import local_machine, local_node
from placement.types import NumaNode
from tests.fakes.gpus import FakeGpu
from tests.fakes.nvml import FakeDriver


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:        1000 kB\nMemFree: 3 kB\n"}


def test_the_tightest_of_nested_groups_counts_in_cgroup_2(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/container/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
        },
    )
    assert cpu_quota_cores(root) == 2.5


def test_the_quota_is_read_in_cgroup_1_where_the_path_is_the_hosts(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu_quota_cores(root) == 1.5


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {
            "proc/self/cgroup": "1:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    ],
)
def test_without_a_quota_there_is_none(files, tmp_path):
    assert cpu_quota_cores(write(tmp_path, files)) is None


def test_a_quota_below_the_affinity_makes_cores_count_only(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6, 7})
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"})
    assert allowed_cores(root) == ((0, 1), False)


def test_a_quota_of_less_than_a_core_still_leaves_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert allowed_cores(root) == ((3,), False)


def test_without_a_quota_the_affinity_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 4})
    assert allowed_cores(tmp_path) == ((4, 9), True)


def test_memory_is_the_hosts_or_the_groups_if_less(tmp_path):
    assert memory_bytes(write(tmp_path, MEMINFO)) == 1000 * 1024
    files = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "65536\n"}
    assert memory_bytes(write(tmp_path, files)) == 65536


def test_an_unlimited_group_in_cgroup_1_leaves_the_hosts_memory(tmp_path):
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert memory_bytes(write(tmp_path, MEMINFO | files)) == 1000 * 1024


def test_this_machine_is_one_node_within_this_process_affinity():
    machine = local_machine()
    (node,) = machine.nodes
    assert machine.origin == "local"
    assert set(node.cores) <= os.sched_getaffinity(0)
    assert node.cores
    assert node.memory_total_bytes > 2**20


def test_numa_nodes_are_read_with_their_cores_and_memory(tmp_path):
    root = write(
        tmp_path,
        {
            "sys/devices/system/node/node1/cpulist": "4-6,9\n",
            "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:  2048 kB\nNode 1 MemFree: 5 kB\n",
            "sys/devices/system/node/node0/cpulist": "\n",  # memory only
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  1024 kB\n",
            "sys/devices/system/node/online": "0-1\n",
        },
    )
    assert numa_nodes(root) == (
        NumaNode(index=0, cores=(), memory_bytes=1024 * 1024),
        NumaNode(index=1, cores=(4, 5, 6, 9), memory_bytes=2048 * 1024),
    )
    assert numa_nodes(tmp_path / "nowhere") == ()


def test_who_may_open_the_drivers_device_file_may_configure_mig(tmp_path):
    capability = {"proc/driver/nvidia/capabilities/mig/config": "DeviceFileMinor: 1\nDeviceFileMode: 256\n"}
    assert not may_configure_mig(write(tmp_path, capability))
    assert may_configure_mig(write(tmp_path, {"dev/nvidia-caps/nvidia-cap1": ""}))


@pytest.mark.parametrize(("user", "may"), [(0, True), (1000, False)])
def test_drivers_without_that_file_ask_for_root(user, may, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert may_configure_mig(tmp_path) is may


UNIX_SOCKETS = (
    "Num       RefCount Protocol Flags    Type St Inode Path\n"
    "0000000000000000: 00000002 00000000 00010000 0005 01 31337 /tmp/nvidia-mps/control\n"
)


def test_an_mps_daemon_of_somebody_else_is_found_where_cuda_looks_for_it(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    write(tmp_path, {"tmp/nvidia-mps/control": ""})
    assert not mps_is_given(tmp_path)  # left by a dead daemon
    write(tmp_path, {"proc/net/unix": UNIX_SOCKETS})
    assert mps_is_given(tmp_path)
    # In a pod the daemon is in another one, and its folder is mounted.
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/mps/nvidia.com/gpu/pipe")
    assert not mps_is_given(tmp_path)
    assert mps_is_given(write(tmp_path, {"mps/nvidia.com/gpu/pipe/control": ""}))


@pytest.mark.parametrize("given", [True, False])
def test_gpus_of_such_a_daemon_are_not_for_one_of_this_run(monkeypatch, given):
    """NVML does not say so before the daemon has a client."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("placement.inventory.local.mps_is_given", lambda: given)
    FakeDriver(FakeGpu()).install(monkeypatch)
    node = local_node()
    assert BACKENDS["mps"].availability(replace(node, mps_control=True), node.gpus[0]).usable is not given
    assert BACKENDS["direct"].availability(node, node.gpus[0]).usable


def test_what_may_still_be_taken_is_the_least_of_host_and_groups(tmp_path):
    files = {
        "proc/meminfo": "MemTotal:        1000 kB\nMemAvailable:      500 kB\n",
        "proc/self/cgroup": "0::/pod\n",
        "sys/fs/cgroup/pod/memory.max": "400000\n",
        "sys/fs/cgroup/pod/memory.current": "150000\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 1000\ninactive_file 50000\n",
    }
    assert available_bytes(write(tmp_path, files)) == 400_000 - 150_000 + 50_000
    (tmp_path / "sys/fs/cgroup/pod/memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 500 * 1024
