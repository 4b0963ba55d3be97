"""What a thread waited for on its host beside its own work: a core that others use, pages from disk."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from typing import Self


class ThreadClock:
    """Waits of the thread that opens it, by intervals. Reads two counters of the kernel: 2 us each time."""

    def __enter__(self) -> Self:
        """Begin the first interval."""
        self._file: int | None = None
        with suppress(OSError):  # a kernel without CONFIG_SCHED_INFO, or no /proc
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._last = self._read()
        return self

    def __exit__(self, *error: object) -> None:
        """Close the counters."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def lap(self) -> dict[str, float]:
        """Metrics ``queue_s`` and ``major_faults`` since the last call; no ``queue_s`` where the kernel does not count."""
        before, self._last = self._last, self._read()
        return {name: value - before[name] for name, value in self._last.items()}

    def _read(self) -> dict[str, float]:
        counts = {"major_faults": float(resource.getrusage(resource.RUSAGE_THREAD).ru_majflt)}
        if self._file is not None:
            # nanoseconds on a core, nanoseconds runnable without one, number of time slices
            counts["queue_s"] = int(os.pread(self._file, 100, 0).split()[1]) * 1e-9
        return counts
