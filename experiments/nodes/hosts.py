"""Several hosts on one machine: each has a network and a name of its own, a link of limited bandwidth, a share of a core.

    host 0 --- link --- switch --- link --- host 1         (link: tbf at both ends, so each direction is limited)
                          |
                     head: Ray's head and the driver, without a limit

Needs root, the commands `ip`, `tc`, `nsenter` and `unshare`, and control groups of CPU time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 5000
"""Of a CPU quota: short, so that a host that waits for another does not wait for its whole period."""
BURST_BYTES = 65536
LATENCY = "50ms"
"""The longest that a packet waits in a link's queue; beyond, it is dropped."""
_COMMANDS = ("ip", "tc", "nsenter", "unshare")
_ENTER = """
echo $$ > "$1"; network=$2; shift 2
exec nsenter --net="$network" unshare --uts sh -c 'hostname "$0"; exec "$@"' "$@"
"""
"""A shell's: joins a control group, a network and a host name, and becomes the command."""


@dataclass(frozen=True)
class Host:
    """One host; ``name`` is its host name and its network namespace."""

    name: str
    address: str
    processes: Path
    """File of its control group that takes process ids."""

    def command(self, *command: str) -> list[str]:
        """What runs a command on this host."""
        network = f"/run/netns/{self.name}"
        return ["sh", "-c", _ENTER, "sh", str(self.processes), network, self.name, *command]


def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if absent := [name for name in _COMMANDS if shutil.which(name) is None]:
        return f"there is no command {absent[0]}: install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "network namespaces and CPU quotas need root: run this with sudo"
    if not _quota_folder().exists():
        return f"there is no {_quota_folder()}: CPU quotas need control groups"
    return ""


@contextmanager
def hosts(count: int, *, share: float, megabits: float) -> Iterator[tuple[Host, list[Host]]]:
    """Make a head and ``count`` hosts, and remove them at the end. Whoever started processes there has ended them by then.

    Args:
        count: hosts beside the head
        share: cores of each, such as 0.4; the head has no limit
        megabits: per second and direction of each link

    Raises:
        RuntimeError: there can be none here, or the system refused; the error has its words.
    """
    if why := missing():
        raise RuntimeError(f"cannot make hosts: {why}")
    mark = f"nodes{os.getpid()}"
    names = [f"{mark}-{place}" for place in ("head", *range(count))]
    made = [
        Host(name, f"10.231.79.{place + 1}", _quota_folder() / name / "cgroup.procs")
        for place, name in enumerate(names)
    ]
    try:
        for host in made:
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            _limit(host, None if host is made[0] else share)
        _connect(made, megabits)
        yield made[0], made[1:]
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, timeout=30, check=False)
            if host.processes.parent.exists():
                host.processes.parent.rmdir()


def _connect(made: Sequence[Host], megabits: float) -> None:
    """A bridge in the head's namespace has the head's address, and a cable to each host."""
    head, others = made[0], made[1:]
    _ip("-n", head.name, "link", "add", "switch", "type", "bridge")
    _ip("-n", head.name, "address", "add", f"{head.address}/24", "dev", "switch")
    _ip("-n", head.name, "link", "set", "switch", "up")
    for place, host in enumerate(others):
        port = f"port{place}"
        _ip("link", "add", port, "netns", head.name, "type", "veth", "peer", "eth0", "netns", host.name)
        _ip("-n", head.name, "link", "set", port, "master", "switch", "up")
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.name, "link", "set", "eth0", "up")
        _shape(head.name, port, megabits)
        _shape(host.name, "eth0", megabits)


def _shape(namespace: str, device: str, megabits: float) -> None:
    rate = f"{megabits:g}mbit"
    _call(
        "tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf",
        "rate", rate, "burst", str(BURST_BYTES), "latency", LATENCY,
    )  # fmt: skip


def _quota_folder() -> Path:
    """Where groups with CPU quotas are made: version 1 has a folder for CPU time, version 2 one for everything."""
    return GROUPS / "cpu" if (GROUPS / "cpu").exists() else GROUPS


def _limit(host: Host, share: float | None) -> None:
    folder = host.processes.parent
    folder.mkdir()
    quota = str(round(PERIOD_US * share)) if share is not None else None
    if (folder / "cpu.cfs_period_us").exists():
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(quota or "-1")
    elif (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{quota or 'max'} {PERIOD_US}")
    else:
        raise RuntimeError(f"{folder} takes no CPU quota: enable the cpu controller in its parent")


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if ran.returncode:
        raise RuntimeError(f"cannot make hosts: `{' '.join(command)}`: {ran.stderr.strip()}")
