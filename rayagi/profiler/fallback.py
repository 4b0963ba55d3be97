"""The recorder in Python, where C cannot be compiled: the same files, several times slower."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rayagi.profiler.layout import (
    COMMITTED_AT,
    DROPPED_AT,
    DROPPED_FROM_AT,
    END_AT,
    EVENTS,
    FROM_PYTHON,
    HEADER,
    MAGIC,
    MAX_DEPTH,
    RECORD,
    VERSION,
    Category,
)
from rayagi.profiler.native import OFF, WARM_UP
from rayagi.profiler.native import RECORD as RECORDING

_SEGMENT_RECORDS = 4096
_MAX_SEGMENT_RECORDS = 65536


_write_record = RECORD.pack_into
_write_count = struct.Struct("<Q").pack_into


class _FullError(Exception):
    """No space for another record."""


class _Lane:
    """The file of one thread in one window, mapped as a whole."""

    def __init__(self, recorder: PythonRecorder, start: int) -> None:
        self.used, self.room, self.dropped, self._is_full = 0, 0, 0, False
        thread = threading.get_native_id()
        self.path = Path(recorder.folder) / f"{thread}-{recorder.next_number()}{EVENTS}"
        self.start = start
        self._recorder = recorder
        with self.path.open("xb"):
            pass
        try:
            self._grow()
        except _FullError:
            self.path.unlink(missing_ok=True)
            raise
        capacity = self.room + max(0, recorder.bytes_left) // RECORD.size
        HEADER.pack_into(self.map, 0, MAGIC, VERSION, RECORD.size, thread, capacity, 0, 0, self.start, 0)

    def put(self, start: int, end: int, name: int, category: int, depth: int, flags: int) -> int:
        """The record's index, -1 if it was not kept."""
        if self._recorder.mode == WARM_UP:
            return -1
        if self.used == self.room and not self._has_grown(start):
            self.dropped += 1
            _write_count(self.map, DROPPED_AT, self.dropped)
            return -1
        index, self.used = self.used, self.used + 1
        depth = depth if depth < MAX_DEPTH else MAX_DEPTH
        _write_record(self.map, HEADER.size + index * RECORD.size, start, end, name, category, depth, flags)
        _write_count(self.map, COMMITTED_AT, index + 1)
        return index

    def complete(self, index: int, end: int) -> None:
        """Write the end of an open record, unless its thread has ended."""
        if index >= 0 and not self.map.closed:
            at = HEADER.size + index * RECORD.size + END_AT
            self.map[at : at + 8] = end.to_bytes(8, "little")

    def delete_if_empty(self) -> None:
        """Delete the file of a window that warmed up: it has no records."""
        if not self.used and not self.dropped:
            self.path.unlink(missing_ok=True)

    def cut_off(self) -> None:
        """Give back the space that no record took. Its thread has ended."""
        self.map.close()
        with suppress(OSError):
            os.truncate(self.path, HEADER.size + self.used * RECORD.size)
            self._recorder.reserve((self.used - self.room) * RECORD.size)

    def _has_grown(self, start: int) -> bool:
        """Whether there is space for an event that began at ``start``. No event pays for a second try."""
        if self._is_full:
            return False
        try:
            self._grow()
        except _FullError:
            self._is_full = True
            _write_count(self.map, DROPPED_FROM_AT, start)
            return False
        return True

    def _grow(self) -> None:
        """Allocate disk space before it is mapped: a store to a page without space would end the process."""
        records = min(max(self.room, _SEGMENT_RECORDS), _MAX_SEGMENT_RECORDS)
        if not self._recorder.reserve(records * RECORD.size):
            raise _FullError
        size = HEADER.size + (self.room + records) * RECORD.size
        try:
            with self.path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                self.map = mmap.mmap(file.fileno(), size)
        except OSError as error:
            self._recorder.reserve(-records * RECORD.size)
            raise _FullError from error
        self.room += records


@dataclass
class _Scope:
    category: int
    name: int
    flags: int
    index: int = -1


@dataclass
class _Thread:
    session: int
    lane: _Lane | None = None
    window: int = -1
    scopes: list[_Scope] = field(default_factory=list)


class PythonRecorder:
    """Implements Recorder."""

    def __init__(self) -> None:
        self.folder, self.bytes_left, self.mode = "", 0, OFF
        self._lock = threading.RLock()
        self._local = threading.local()
        self._window_start = self._session = self._window = self._lost = self._num_lanes = 0
        self._lanes: list[_Lane] = []
        self._process: tuple[_Lane, int] | None = None
        os.register_at_fork(after_in_child=self._forget)

    def setup(self, folder: str, limit_bytes: int, /) -> None:
        """See Recorder."""
        self.folder, self.bytes_left = folder, limit_bytes
        self._lost = self._num_lanes = 0
        self._session += 1

    def start(self, mode: int, process_name: int, /) -> None:
        """See Recorder."""
        self._lanes.clear()
        self._window_start = time.monotonic_ns()
        self._window += 1
        self.mode = mode
        lane = self._lane_for_event(self._thread())
        self._process = None
        if lane is not None:
            self._process = lane, lane.put(lane.start, 0, process_name, Category.PROCESS, 0, 0)

    def stop(self) -> None:
        """See Recorder."""
        was, self.mode, end = self.mode, OFF, time.monotonic_ns()
        if was == OFF:
            return
        with self._lock:
            for lane in self._lanes:
                lane.complete(0 if lane.used else -1, end)
                lane.delete_if_empty()
            self._lanes.clear()
            if was == RECORDING and self._process is not None:
                self._process[0].complete(self._process[1], end)

    def begin(self, category: int, name: int, flags: int, /) -> None:
        """See Recorder."""
        thread = self._thread()
        scope = _Scope(category, name, flags)
        if self.mode != OFF and (lane := self._lane_for_event(thread)) is not None:
            scope.index = lane.put(time.monotonic_ns(), 0, name, category, len(thread.scopes), flags)
        thread.scopes.append(scope)

    def end(self, category: int, name: int, /) -> int | None:
        """See Recorder."""
        thread = self._thread()
        if not thread.scopes:
            return None
        innermost = thread.scopes[-1]
        at = len(thread.scopes) - 1
        while (thread.scopes[at].category, thread.scopes[at].name) != (category, name):
            if at == 0:
                return innermost.name
            at -= 1
        lane = None if self.mode == OFF else self._lane(thread)
        end = time.monotonic_ns()
        while len(thread.scopes) > at:
            scope = thread.scopes.pop()
            if lane is not None:
                lane.complete(scope.index, end)
        return None if scope is innermost else innermost.name

    def record(self, start: int, end: int, category: int, name: int, depth: int, /) -> None:
        """See Recorder."""
        if self.mode == OFF or start < self._window_start:
            return
        lane = self._lane_for_event(self._thread(), start)
        if lane is not None and start >= lane.start:
            lane.put(start, end, name, category, depth, FROM_PYTHON)

    def lost(self) -> int:
        """See Recorder."""
        return self._lost

    def reserve(self, num_bytes: int) -> bool:
        """Take disk space from the process's limit."""
        with self._lock:
            if self.bytes_left < num_bytes:
                return False
            self.bytes_left -= num_bytes
            return True

    def next_number(self) -> int:
        """Numbers of the session's files."""
        with self._lock:
            self._num_lanes += 1
            return self._num_lanes - 1

    def _thread(self) -> _Thread:
        thread: _Thread | None = getattr(self._local, "thread", None)
        if thread is None or thread.session != self._session:
            thread = self._local.thread = _Thread(self._session)
        return thread

    def _lane_for_event(self, thread: _Thread, start: int | None = None) -> _Lane | None:
        lane = self._lane(thread, start)
        if lane is None:
            with self._lock:
                self._lost += 1
        return lane

    def _lane(self, thread: _Thread, start: int | None = None) -> _Lane | None:
        """The thread's lane of this window; made at the first event, with the scopes that are already open."""
        if thread.window == self._window:
            return thread.lane
        thread.window, thread.lane = self._window, None
        with suppress(_FullError, OSError):
            lane = thread.lane = _Lane(self, time.monotonic_ns() if start is None else start)
            with self._lock:
                self._lanes.append(lane)
            # The thread's local objects end with it.
            weakref.finalize(thread, self._release, lane).atexit = False
            lane.put(lane.start, 0, 0, Category.THREAD, 0, 0)
            for depth, scope in enumerate(thread.scopes):
                scope.index = lane.put(lane.start, 0, scope.name, scope.category, depth, scope.flags)
        return thread.lane

    def _release(self, lane: _Lane) -> None:
        """End the record of a thread that has ended, unless the window has, and forget its lane."""
        end = time.monotonic_ns()
        with self._lock:
            if lane not in self._lanes:
                return
            lane.complete(0 if lane.used else -1, end)
            lane.delete_if_empty()
            self._lanes.remove(lane)
            if (
                self._process is None or self._process[0] is not lane
            ):  # the process's record has no end so far
                lane.cut_off()

    def _forget(self) -> None:
        """In a forked child: the mappings are the parent's files."""
        self._lock, self._lanes = (
            threading.RLock(),
            [],
        )  # first: what the other threads had must not be released
        self._local = threading.local()
        self.mode, self._process, self._window = OFF, None, self._window + 1
