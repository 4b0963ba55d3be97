"""Notes when recorded processes end that cannot do it themselves, because they are killed.

Who starts a program watches the processes that appear in its profile, each by a descriptor of the kernel's (pidfd) that
becomes readable when the process ends. So the recorded processes pay nothing for it.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from collectives.files import replacing
from rayagi.profiler.layout import END, PROCESS
from rayagi.profiler.process_folder import host_name, memory_mark, read_stat, start_ticks

_PERIOD_S = 0.1
"""Between two looks for new processes, which is how long a process lives at least to be watched."""
_LEAST_REST = 50
"""Times as long as a look took, before the next one: hundreds of processes take 2 % of a core."""
_GRACE_S = 1.0
"""How long to wait for processes that outlive the program: Ray's workers end a little later."""


@contextmanager
def ends_noted(profile: Path) -> Iterator[None]:
    """Note the ends of this host's processes that are recorded into a profile, while the block runs and a little longer."""
    watch = ProcessWatch(profile)
    thread = threading.Thread(target=watch.run, name="rayagi-process-ends", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.finish()
        thread.join()


@dataclass
class _Watched:
    """One process, by its folder."""

    folder: Path
    pid: int
    mark: str

    def has_other_program(self) -> bool:
        """Whether it has replaced the program that was recorded; not known of one that has ended."""
        return memory_mark(self.pid) not in ("", self.mark)


class ProcessWatch:
    """The processes of a profile that run on this host."""

    def __init__(self, profile: Path) -> None:
        self._profile, self._host = profile, host_name()
        self._known: set[str] = set()
        self._watched: dict[int, _Watched] = {}
        """By descriptor."""
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.POLLIN)
        self._deadline_s: float | None = None

    def finish(self) -> None:
        """The program has ended: wait for the others for ``_GRACE_S`` only."""
        self._deadline_s = time.monotonic() + _GRACE_S
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Look until ``finish`` is called and all processes have ended, or time is over."""
        pause_s = 0.0
        while True:
            self.note_ends(pause_s)
            deadline_s = self._deadline_s  # before the look: what appeared until the end is seen
            start = time.monotonic()
            self.look()
            now = time.monotonic()
            if deadline_s is not None and (now >= deadline_s or not self._watched):
                break
            pause_s = max(_PERIOD_S, _LEAST_REST * (now - start))
        self.note_ends(0)
        for descriptor in [*self._watched, self._wake]:
            os.close(descriptor)

    def note_ends(self, timeout_s: float) -> None:
        """Wait until a process ends, or for some time, and write down the ends of those that have."""
        for descriptor, _ in self._poll.poll(1000 * timeout_s):
            if descriptor == self._wake:
                self._poll.unregister(self._wake)
                continue
            _write_end(self._watched[descriptor].folder, time.monotonic_ns())
            self._forget(descriptor)

    def look(self) -> None:
        """Watch new processes, and forget those that have replaced their program: they do not record any more."""
        for descriptor, each in list(self._watched.items()):
            if each.has_other_program():
                self._forget(descriptor)
        with suppress(OSError):  # the program may delete the profile
            for name in sorted(set(os.listdir(self._profile)) - self._known):
                self._watch(self._profile / name)

    def _watch(self, folder: Path) -> None:
        host, *numbers = folder.name.split("-")
        if host != self._host or len(numbers) < 2:
            self._known.add(folder.name)
            return
        pid, ticks = numbers[:2]
        with suppress(OSError, ValueError, KeyError):
            about = json.loads((folder / PROCESS).read_bytes())  # none yet: again at the next look
            self._known.add(folder.name)
            found = _Watched(folder, int(pid), about["mark"])
            descriptor = os.pidfd_open(found.pid)
            self._watched[descriptor] = found
            self._poll.register(descriptor, select.POLLIN)
            # Another process may have this number by now.
            if found.has_other_program() or start_ticks(read_stat(found.pid)) != int(ticks):
                self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        os.close(descriptor)
        del self._watched[descriptor]


def _write_end(folder: Path, monotonic_ns: int) -> None:
    """Unless the process has written its end itself. A full disk, or a deleted profile, is no error."""
    with suppress(OSError, ValueError):
        if "end_monotonic_ns" not in json.loads((folder / PROCESS).read_bytes()):
            with replacing(folder / END) as beside:
                beside.write_text(json.dumps({"monotonic_ns": monotonic_ns}), encoding="utf-8")
