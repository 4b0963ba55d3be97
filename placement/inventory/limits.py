"""Resource limits of this process: cores by affinity and CPU quota, memory by cgroup, NUMA nodes, MIG permission."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from placement.types import NumaNode

ROOT = Path("/")

MPS_DEFAULT = "/tmp/nvidia-mps"
"""Where CUDA looks for an MPS daemon."""


def allowed_cores(root: Path = ROOT) -> tuple[tuple[int, ...], bool]:
    """Ids of the cores this process may use, and whether it may pin to them.

    A CPU quota (a container's ``--cpus=2``) grants time on all cores. As many cores as the quota covers are counted, but not
    pinned to: every container of the host would choose the same ones.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    quota = cpu_quota_cores(root)
    if quota is None or quota >= len(cores):
        return cores, True
    return cores[: max(1, int(quota))], False


def cpu_quota_cores(root: Path = ROOT) -> float | None:
    """CPU quota of the tightest cgroup, in cores; None without a limit."""
    quotas = []
    for folder in _control_groups(root, controller="cpu"):
        unified = _words(folder / "cpu.max")
        if len(unified) == 2 and unified[0] != "max":
            quotas.append(float(unified[0]) / float(unified[1]))
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and float(quota[0]) > 0:
            quotas.append(float(quota[0]) / float(period[0]))
    return min(quotas, default=None)


def memory_bytes(root: Path = ROOT) -> int:
    """Memory limit of this process: the host's memory, or less if a cgroup limits it."""
    sizes = [_host_memory_bytes(root)]
    for folder in _control_groups(root, controller="memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            words = _words(folder / name)
            if words and words[0] != "max":
                sizes.append(int(words[0]))
    return min(sizes)


def available_bytes(root: Path = ROOT) -> int:
    """Memory that this process can still allocate: the host's available memory, or less if a cgroup leaves less."""
    free = [_host_memory_bytes(root, "MemAvailable:")]
    for folder in _control_groups(root, controller="memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limited, held = _words(folder / limit), _words(folder / used)
            if limited and held and limited[0] != "max":
                free.append(int(limited[0]) - int(held[0]) + _cache_bytes(folder))
    return max(0, min(free))


def numa_nodes(root: Path = ROOT) -> tuple[NumaNode, ...]:
    """The host's NUMA nodes, by number; empty if the kernel does not list them."""
    found = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        listed, meminfo = _words(folder / "cpulist"), _words(folder / "meminfo")
        if "MemTotal:" in meminfo:
            memory = int(meminfo[meminfo.index("MemTotal:") + 1]) * 1024
            cores = _parse_ranges(listed[0]) if listed else ()
            found.append(NumaNode(index=int(folder.name[4:]), cores=cores, memory_bytes=memory))
    return tuple(sorted(found, key=lambda node: node.index))


def may_configure_mig(root: Path = ROOT) -> bool:
    """Whether this process may create and destroy MIG instances. [unverified on GPU]

    The driver requires read access to a device file; its minor number is under /proc (NVIDIA's MIG user guide, device
    nodes and capabilities). Drivers without that file require root.
    """
    minors = _words(root / "proc/driver/nvidia/capabilities/mig/config")
    if "DeviceFileMinor:" not in minors:
        return os.geteuid() == 0
    minor = minors[minors.index("DeviceFileMinor:") + 1]
    return os.access(root / f"dev/nvidia-caps/nvidia-cap{minor}", os.R_OK)


def mps_is_given(root: Path = ROOT) -> bool:
    """Whether CUDA connects this process to an MPS daemon that somebody else runs, as an administrator or a cluster does.

    It looks for the daemon in CUDA_MPS_PIPE_DIRECTORY, else in /tmp/nvidia-mps. NVML does not report one without clients. A
    socket that a dead daemon left at the default place is not listed as open. Where the variable is set, the daemon may be
    in another network namespace, which lists it there only.
    """
    given = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    if given:
        return (root / given.lstrip("/") / "control").exists()
    return f"{MPS_DEFAULT}/control" in _words(root / "proc/net/unix")


def _parse_ranges(listed: str) -> tuple[int, ...]:
    """``0-3,8`` as numbers."""
    cores: list[int] = []
    for part in listed.split(","):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _cache_bytes(folder: Path) -> int:
    """Reclaimable page cache of a cgroup (inactive_file), which counts as used memory."""
    words = _words(folder / "memory.stat")
    for name in ("inactive_file", "total_inactive_file"):
        if name in words:
            return int(words[words.index(name) + 1])
    return 0


def _host_memory_bytes(root: Path, name: str = "MemTotal:") -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _control_groups(root: Path, *, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and its ancestors, for cgroup v2 and v1.

    Inside a container the path is often the host's and not mounted: then only the root of the mount exists.
    """
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = mount / path.lstrip("/")
        while folder != mount.parent:
            if folder.is_dir():
                yield folder
            folder = folder.parent


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
