"""Ends a worker process of Ray when the raylet that started it has ended."""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

_RAYLET_PID = "RAY_RAYLET_PID"
"""Environment variable that a raylet sets for its workers."""


@cache  # one thread per process
def end_with_raylet() -> None:
    """Kill this process as soon as its raylet has ended. Does nothing where no raylet has started it.

    Ray's workers only ask whether the raylet's process id exists. It does for as long as nobody has waited for a killed
    raylet, as in containers whose first process is no init: there a GMI would keep its cores and its GPU for ever.
    """
    pid = os.environ.get(_RAYLET_PID, "")
    if not pid.isdecimal() or not _is_raylet(pid):
        return
    try:
        descriptor = os.pidfd_open(int(pid))
    except OSError:  # it has just ended, which Ray notices; or a kernel without pidfd
        return
    threading.Thread(target=_kill_after, args=(descriptor,), name="raylet watch", daemon=True).start()


def _is_raylet(pid: str) -> bool:
    """Whether the process has the raylet's name: in a process namespace of its own, the id may be another's."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"
    return False


def _kill_after(descriptor: int) -> None:
    # A pidfd is readable from the end of the process on, whether or not somebody has waited for it.
    select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
