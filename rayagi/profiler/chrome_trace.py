"""Reads Chrome's trace format, in which torch.profiler (Kineto) and ``ray timeline`` write, as processes of a profile.

Times are microseconds of Unix time, or since ``baseTimeNanoseconds``. Only complete events (``"ph": "X"``) have a duration;
the others are left out.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayagi.profiler.trace import EVENT, Category, Events, TraceError

_CATEGORIES = {
    "kernel": Category.GPU_KERNEL,
    "gpu_memcpy": Category.GPU_COPY,
    "gpu_memset": Category.GPU_COPY,
    "cuda_runtime": Category.GPU_RUNTIME,
    "cuda_driver": Category.GPU_RUNTIME,
    "cpu_op": Category.BACKEND,
}
"""By Kineto's categories; what has another one is other native code."""
_LATEST_US = 2**61 / 1e3


@dataclass(frozen=True)
class ForeignProcess:
    """A process of another tracer.

    Attributes:
        label: its name
        pid: its number, which need not be a process id
        threads: name and events of each thread, dtype EVENT; times in ns of Unix time
        texts: names by their number
    """

    label: str
    pid: int
    threads: tuple[tuple[str, Events], ...]
    texts: tuple[str, ...]

    def name_of(self, number: int) -> str:
        """The text of a name."""
        return self.texts[number]


def read_chrome_trace(path: Path) -> list[ForeignProcess]:
    """All processes of a file with a list of events, or with ``traceEvents``.

    Raises:
        TraceError: it cannot be read, or is no such trace.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is no trace in Chrome's format: {error}") from error
    about: Mapping[str, Any] = found if isinstance(found, dict) else {"traceEvents": found}
    events, base = about.get("traceEvents"), about.get("baseTimeNanoseconds", 0)
    if not isinstance(events, list) or not isinstance(base, int) or not 0 <= base < 2**61:
        raise TraceError(f"{path} is no trace in Chrome's format: it has no list of traceEvents")
    try:
        return _processes([event for event in events if isinstance(event, dict)], base)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(
            f"{path} is damaged: an event has {type(error).__name__}: {str(error)[:80]}"
        ) from error


def _processes(events: list[dict[str, Any]], base: int) -> list[ForeignProcess]:
    names: dict[tuple[str, Any, Any], str] = {}
    rows: dict[Any, dict[Any, list[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(list))
    texts: dict[str, int] = {}
    for event in events:
        pid, tid = str(event.get("pid")), str(event.get("tid"))
        if event.get("ph") == "M" and event.get("name") in ("process_name", "thread_name"):
            names[event["name"], pid, tid if event["name"] == "thread_name" else None] = str(
                event["args"]["name"]
            )
        if event.get("ph") != "X":
            continue
        start, lasted = float(event["ts"]), float(event.get("dur", 0))
        if not (abs(start) < _LATEST_US and 0 <= lasted < _LATEST_US) or math.isnan(start):
            raise ValueError(f"a time of {start} us for {lasted} us")
        begin = base + round(start * 1e3)
        category = _CATEGORIES.get(str(event.get("cat")), Category.OTHER_NATIVE)
        name = texts.setdefault(str(event.get("name")), len(texts))
        rows[pid][tid].append((begin, begin + round(lasted * 1e3), name, category, 0, 0))
    return [
        ForeignProcess(
            label=names.get(("process_name", pid, None), f"process {pid}"),
            pid=number,
            threads=tuple(
                (names.get(("thread_name", pid, tid), f"thread {tid}"), np.array(found, EVENT))
                for tid, found in threads.items()
            ),
            texts=tuple(texts),
        )
        for number, (pid, threads) in enumerate(rows.items(), 1)
    ]
