"""Runs a program and tells the CPU time of all its processes: ``python -I supervisor.py DESCRIPTOR PROGRAM ...``.

A process of its own, because it becomes the parent of descendants whose parent ends, and waits for whatever child ends.
Standard library only.
"""

import ctypes
import json
import os
import subprocess
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_ORPHANS_S = 20.0
"""How long processes that outlive the program may take to end; later ones do not count."""


def run(program: list[str]) -> dict[str, object]:
    """CPU and wall-clock time in ns, and the exit code; or why it cannot be run."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    begin = time.monotonic_ns()
    try:
        child = subprocess.Popen(program, stdin=subprocess.DEVNULL)
    except OSError as error:
        return {"error": error.strerror}
    _, status, usage = os.wait4(child.pid, 0)
    wall_ns = time.monotonic_ns() - begin
    cpu_s = usage.ru_utime + usage.ru_stime + _orphans_cpu_s()
    return {"code": os.waitstatus_to_exitcode(status), "wall_ns": wall_ns, "cpu_ns": int(cpu_s * 1e9)}


def _orphans_cpu_s() -> float:
    used, deadline = 0.0, time.monotonic() + _ORPHANS_S
    while time.monotonic() < deadline:
        try:
            pid, _, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid:
            used += usage.ru_utime + usage.ru_stime
        else:
            time.sleep(0.02)
    return used


if __name__ == "__main__":
    os.write(int(sys.argv[1]), json.dumps(run(sys.argv[2:])).encode())
