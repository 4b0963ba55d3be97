"""CPU time of a program and of all processes that it starts, whether or not their parents wait for them.

It runs as a process of its own, with the standard library only: ``python process_tree.py SETTINGS``. It adopts orphans, so
that the kernel adds up the time of everything that it waits for. Children of a process that ignores SIGCHLD, such as the
workers of Ray's raylet, are in nobody's sum: their time is read from /proc until they end.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_INTERVAL_S = 0.1
"""Between two readings of /proc: how much of its last time can be missing of a process that nobody waits for."""
_GRACE_S = 10.0
"""How long to wait for processes that outlive the program."""
_DEATH_SIGNAL, _SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class _Stat(NamedTuple):
    """A line of /proc/PID/stat: parent, start, CPU time with that of children that were waited for."""

    parent: int
    start_ticks: int
    cpu_ticks: int


class Tree:
    """The processes below this one.

    Attributes:
        unwaited: CPU time in ticks of those that no process will wait for, by process id and start
    """

    def __init__(self) -> None:
        self.unwaited: dict[tuple[int, int], int] = {}

    def read(self) -> None:
        """Update ``unwaited``."""
        stats = _read_stats()
        children: dict[int, list[int]] = {}
        for pid, stat in stats.items():
            children.setdefault(stat.parent, []).append(pid)
        waiting = [os.getpid()]
        while waiting:
            parent = waiting.pop()
            below = children.get(parent, [])
            waiting += below
            ignores = bool(below) and parent != os.getpid() and _ignores_children(parent)
            for pid in below:
                key = pid, stats[pid].start_ticks
                if ignores:
                    self.unwaited[key] = stats[pid].cpu_ticks
                else:  # its parent has ended: this process waits for it now
                    self.unwaited.pop(key, None)


def _read_stats() -> dict[int, _Stat]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):  # it has ended
                # The name of the program, in parentheses, may contain anything.
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                found[int(name)] = _Stat(int(fields[1]), int(fields[19]), sum(map(int, fields[11:15])))
    return found


def _ignores_children(pid: int) -> bool:
    """Whether the kernel drops this process's children when they end, and their times with them."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGCHLD - 1) & 1)
    return False


def run_program(program: list[str], environment: dict[str, str]) -> dict[str, int]:
    """Run it and everything that it starts to the end; returns its ``code``, ``cpu_ns`` and ``wall_ns``.

    SIGTERM is passed on, and sent when the caller dies. Processes that outlive the program by ten seconds are left running,
    and not counted.

    Raises:
        OSError: it cannot be run.
    """
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    tree, start = Tree(), time.monotonic_ns()
    no_input = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    child = os.posix_spawnp(program[0], program, environment, file_actions=no_input)
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    status, end, deadline = None, start, None
    while deadline is None or time.monotonic() < deadline:
        tree.read()
        ended = _wait_for_any()
        if ended is None:
            break
        if ended[0] == child:
            status, end = ended[1], time.monotonic_ns()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            deadline = time.monotonic() + _GRACE_S
        elif ended[0] == 0:
            time.sleep(_INTERVAL_S)
    tree.read()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_ns = round((usage.ru_utime + usage.ru_stime) * 1e9) + sum(tree.unwaited.values()) * _NS_PER_TICK
    assert status is not None
    return {"code": os.waitstatus_to_exitcode(status), "cpu_ns": cpu_ns, "wall_ns": end - start}


def _wait_for_any() -> tuple[int, int] | None:
    """A child that has ended, with its status; process id 0 if none has; None if there is none."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None


def main() -> None:
    """Settings are JSON: ``program``, ``environment`` (added to this one's), and ``result``, the file to write."""
    settings = json.loads(sys.argv[1])
    try:
        found: dict[str, int | str] = {
            **run_program(settings["program"], {**os.environ, **settings["environment"]})
        }
    except OSError as error:
        found = {"error": error.strerror or str(error)}
    Path(settings["result"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
