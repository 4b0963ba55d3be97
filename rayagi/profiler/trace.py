"""Reads a profile: processes, their threads, and each thread's events as a mapped array."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayagi.profiler.layout import (
    END,
    EVENTS,
    GPU_CALLS,
    HEADER,
    MAGIC,
    MAX_NAME,
    NAMES,
    PROCESS,
    PROFILE,
    RECORD,
    VERSION,
    Category,
)

__all__ = [
    "EVENT",
    "Category",
    "Clock",
    "Events",
    "ProcessTrace",
    "Profile",
    "ThreadTrace",
    "TraceError",
    "join",
    "read_profile",
    "select",
]

EVENT = np.dtype(
    [
        ("start", "<i8"),
        ("end", "<i8"),
        ("name", "<u4"),
        ("category", "u1"),
        ("depth", "u1"),
        ("flags", "<u2"),
    ]
)
"""One record: layout.RECORD as a dtype."""
_BYTES = f"V{EVENT.itemsize}"
LATEST_NS = 2**61
"""Largest time of a clock: the year 2043 in Unix time."""

Events = NDArray[np.void]
"""Records of dtype EVENT. Shape (n,)"""


def select(events: Events, which: NDArray[np.bool_] | NDArray[np.intp]) -> Events:
    """``events[which]``, thirty times as fast: NumPy copies a record with fields field by field."""
    return events.view(_BYTES)[which].view(EVENT)


def join(several: Iterable[Events]) -> Events:
    """Events of several arrays, one after the other; none of none."""
    return np.concatenate([np.empty(0, _BYTES), *(each.view(_BYTES) for each in several)]).view(EVENT)


class TraceError(Exception):
    """A folder is not a profile, or one of its files is damaged or of another version."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Without characters that control a terminal: names, also those of files, may be anybody's."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


@dataclass(frozen=True)
class Clock:
    """One moment on both clocks of a process: ``unix_ns`` is right within ``error_ns``."""

    monotonic_ns: int
    unix_ns: int
    error_ns: int


@dataclass(frozen=True, eq=False)
class ThreadTrace:
    """What one thread recorded between two starts of recording.

    Attributes:
        path: the file
        thread_id: of the kernel
        start_ns: start of the file
        dropped: events that were not kept, because of the limit on disk or a full disk
        dropped_from_ns: start of the first of them, after which nothing is known of the thread; 0 if none was dropped, or an
            earlier version recorded
        num_events: committed records
        read: records ``first`` to ``last``, without that one; dtype EVENT, shape (last - first,)
    """

    path: Path
    thread_id: int
    start_ns: int
    dropped: int
    num_events: int
    read: Callable[[int, int], Events]
    dropped_from_ns: int = 0

    @property
    def events(self) -> Events:
        """All of them, read from disk each time.

        Raises:
            TraceError: the file has been cut off or deleted since.
        """
        return self.read(0, self.num_events)


@dataclass(frozen=True)
class ProcessTrace:
    """One process: who it was, its names, its threads in the order of their start."""

    path: Path
    name: str
    pid: int
    parent: int
    argv: tuple[str, ...]
    metadata: dict[str, Any]
    python: str
    clock: Clock
    names: dict[int, str]
    threads: tuple[ThreadTrace, ...]
    lost: int = 0
    """Events of threads that could not make a file; known once the session has ended."""
    cores: Mapping[str, int] = field(default_factory=dict)
    """While it was recorded, what ``core_times`` names; empty for a process that died meanwhile."""
    nvml_utilization: Mapping[str, float] = field(default_factory=dict)
    """What NVML calls utilisation while a GPU was recorded: percent by device, mean of samples."""
    iterations: int = 0
    """Begun while it was profiled, recorded or not; as far as it lived to write it."""
    end_ns: int = 0
    """When it ended, as it wrote itself, or who watched it; 0 if that is not known."""
    has_ended: bool = False
    """Whether it wrote its end itself: it was not killed."""
    intercepted: Mapping[str, int] = field(default_factory=dict)
    """Number of functions by package that was imported; empty for a process that was killed."""
    is_replaced: bool = False
    """Whether it ended by replacing its program through os.exec*."""

    def name_of(self, name: int) -> str:
        """The text of a name; a number where the process could not write it, as on a full disk."""
        return self.names.get(name, f"name {name}")


@dataclass(frozen=True)
class Profile:
    """A whole profile, processes in the order of their folders' names."""

    path: Path
    command: tuple[str, ...]
    start_unix_ns: int
    intercepted: dict[str, Any]
    processes: tuple[ProcessTrace, ...]
    machine: dict[str, Any] = field(default_factory=dict)
    """On which it was recorded: ``machine.this_machine()``; empty where an earlier version did not write it."""
    undescribed: int = 0
    """Processes that could not write who they are, as on a full disk, or died before: nothing of them can be read."""
    iterations: int = 0
    """Of the program, recorded or not, as far as it is known."""
    skipped: int | None = None
    """Iterations before the first recorded one, warm-up included; None where everything is recorded, or an earlier version
    did not write it."""
    script: str = ""
    """Path of the program's file; empty if it has none, or an earlier version did not write it."""


def read_profile(folder: Path | str) -> Profile:
    """Read a profile's small files; its events are read from disk when they are used.

    Profiles of running processes are fine: what is committed so far is read.

    Raises:
        TraceError: the folder is not a profile, or a file of it is damaged or of another version.
    """
    path = Path(folder)
    if not (path / PROFILE).is_file():
        raise TraceError(f"{path} is not a profile: it has no {PROFILE}")
    about = _read_json(path / PROFILE)
    if about.get("version") != VERSION:
        raise TraceError(
            f"{path / PROFILE} is of version {repr(about.get('version'))[:20]}; this rayagi reads version {VERSION}"
        )
    try:
        folders = [each for each in sorted(path.iterdir()) if each.is_dir()]
        described = [each for each in folders if (each / PROCESS).is_file()]
        processes = tuple(map(_read_process, described))
        return Profile(
            path=path,
            command=tuple(map(str, about["command"])),
            start_unix_ns=int(about["start_unix_ns"]),
            intercepted=dict(about["intercepted"]),
            processes=processes,
            machine=dict(about.get("machine", {})),
            undescribed=len(folders) - len(described),
            iterations=max([int(about.get("iterations", 0)), *(each.iterations for each in processes)]),
            skipped=_skipped(about.get("schedule")),
            script=str(about.get("script", "")),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path / PROFILE} is damaged: {_reason(error)}") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error


def _skipped(schedule: Any) -> int | None:
    return None if schedule is None else int(schedule["skip"]) + int(schedule["warm_up"])


def _read_process(path: Path) -> ProcessTrace:
    about = _read_json(path / PROCESS)
    try:
        return ProcessTrace(
            path=path,
            name=str(about["name"])[:MAX_NAME],
            pid=_process_id(about["pid"]),
            parent=int(about["parent"]),
            argv=tuple(map(str, about["argv"])),
            metadata=dict(about["metadata"]),
            python=str(about["python"]),
            clock=Clock(**{key: int(about["clock"][key]) for key in ("monotonic_ns", "unix_ns", "error_ns")}),
            names=_read_names(path / NAMES),
            threads=_read_threads(path),
            lost=int(about.get("lost", 0)),
            cores={str(key): int(value) for key, value in about.get("cores", {}).items()},
            nvml_utilization={
                str(key): float(value) for key, value in about.get("nvml_utilization", {}).items()
            },
            iterations=int(about.get("iterations", 0)),
            end_ns=_end_ns(path, about),
            has_ended="end_monotonic_ns" in about,
            is_replaced=bool(about.get("is_replaced", False)),
            intercepted={
                str(package): int(counts["recorded"])
                for package, counts in about.get("intercepted", {}).items()
            },
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path / PROCESS} is damaged: {_reason(error)}") from error


def _end_ns(path: Path, about: dict[str, Any]) -> int:
    file, key = path / PROCESS, "end_monotonic_ns"
    if key not in about and (path / END).is_file():
        file, key = path / END, "monotonic_ns"
        about = _read_json(file)
    end = int(about.get(key, 0))
    if not 0 <= end <= LATEST_NS:
        raise TraceError(f"{file} is damaged: it has an end at {str(end)[:20]} ns")
    return end


def _process_id(value: Any) -> int:
    if not 0 <= int(value) < 1 << 31:
        raise ValueError(f"process id {str(value)[:20]}")
    return int(value)


def _read_threads(path: Path) -> tuple[ThreadTrace, ...]:
    found, calls = (
        [each for file in sorted(path.glob(f"*{suffix}")) if (each := _read_thread(file)) is not None]
        for suffix in (EVENTS, GPU_CALLS)
    )
    for each in calls:
        last = int(each.read(each.num_events - 1, each.num_events)["start"][0]) if each.num_events else 0
        own = [
            at
            for at, thread in enumerate(found)
            if thread.thread_id == each.thread_id and thread.start_ns <= last
        ]
        if (
            own
        ):  # of several recordings the latest; it may begin after the first call, with the event around it
            latest = max(own, key=lambda at: found[at].start_ns)
            found[latest] = _together(found[latest], each)
        else:  # torch's backward threads run no Python, and have no other file
            found.append(each)
    return tuple(sorted(found, key=lambda each: (each.start_ns, each.path.name)))


def _together(thread: ThreadTrace, calls: ThreadTrace) -> ThreadTrace:
    count = thread.num_events

    def read(first: int, last: int) -> Events:
        own = thread.read(min(first, count), min(last, count))
        return join([own, calls.read(max(0, first - count), max(0, last - count))])

    return replace(
        thread,
        dropped=thread.dropped + calls.dropped,
        num_events=count + calls.num_events,
        read=read,
    )


def _read_thread(path: Path) -> ThreadTrace | None:
    """None for a file without a record: its process died before or while it warmed up, or the disk was full."""
    with path.open("rb") as file:
        head = file.read(HEADER.size)
        num_bytes = file.seek(0, 2)
    if not any(head):
        return None
    if len(head) < HEADER.size:
        raise TraceError(f"{path} is cut off: {len(head)} of the header's {HEADER.size} bytes")
    magic, version, record_size, thread_id, *counts, start_ns, dropped_from_ns = HEADER.unpack(head)
    capacity, committed, dropped = counts
    if magic != MAGIC:
        raise TraceError(f"{path} does not hold events of rayagi's profiler")
    if version != VERSION:
        raise TraceError(f"{path} is of version {version}; this rayagi reads version {VERSION}")
    room = (num_bytes - HEADER.size) // RECORD.size
    if record_size != RECORD.size or committed > min(capacity, room):
        raise TraceError(
            f"{path} is damaged: {committed} records of {record_size} bytes, but room for {min(capacity, room)}"
        )
    if not committed:
        return None
    read = partial(_read_events, path)
    return ThreadTrace(path, thread_id, start_ns, dropped, committed, read, dropped_from_ns)


def _read_events(path: Path, first: int, last: int) -> Events:
    """Not mapped: a file that is cut off meanwhile would end the reader with SIGBUS."""
    try:
        events = np.fromfile(path, EVENT, last - first, offset=HEADER.size + first * RECORD.size)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(events) < last - first:
        raise TraceError(f"{path} was cut off while it was read: {first + len(events)} of {last} records")
    return events


def _read_names(path: Path) -> dict[int, str]:
    """By id. A last line without an end is ignored: the process died, or the disk became full, while it was written."""
    names: dict[int, str] = {}
    if not path.exists():
        return names
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            names[int(entry["id"])] = str(entry["name"])[:MAX_NAME]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise TraceError(f"{path} is damaged in line {number}: {_reason(error)}") from error
    return names


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is damaged: {_reason(error)}") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    if not isinstance(content, dict):
        raise TraceError(f"{path} is damaged: it holds no JSON object")
    return content


def _reason(error: Exception) -> str:
    """A KeyError's text is only its key."""
    return f"no {error}" if isinstance(error, KeyError) else str(error)
