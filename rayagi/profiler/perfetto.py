"""Writes a profile as a Perfetto trace, the protobuf file that ui.perfetto.dev opens.

Field numbers are those of Perfetto's protos/perfetto/trace/*.proto. Slices are encoded by numpy, without a protobuf library:
numbers are varints of a fixed width, so that all packets of a kind are equally long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from rayagi.profiler.chrome_trace import ForeignProcess
from rayagi.profiler.intervals import Ints
from rayagi.profiler.overlap import process_events, unix_minus_monotonic
from rayagi.profiler.trace import Category, Clock, Events, Profile, join, select

# Trace and TracePacket
_PACKET, _CLOCK_SNAPSHOT, _TIMESTAMP, _SEQUENCE_ID, _TRACK_EVENT, _INTERNED_DATA = 1, 6, 8, 10, 11, 12
_SEQUENCE_FLAGS, _DEFAULTS, _TRACK_DESCRIPTOR = 13, 59, 60
_STATE_CLEARED, _NEEDS_STATE = 1, 2
# TrackEvent
_CATEGORY_ID, _TYPE, _NAME_ID, _TRACK_ID = 3, 9, 10, 11
_BEGIN, _END, _INSTANT = 1, 2, 3
# BuiltinClock
_REALTIME, _MONOTONIC = 1, 3

_SEQUENCE = bytes([_SEQUENCE_ID << 3, 1])
_VARINT, _BYTES = 0, 2
_CHUNK = 1 << 16
_EVER = (-(2**62), 2**62)
_SCOPES = (Category.PHASE, Category.OPERATION, Category.ITERATION)
_LARGEST_PID = 1 << 22


def write_perfetto(profile: Profile, file: BinaryIO, others: Iterable[ForeignProcess] = ()) -> int:
    """Write all events of a profile, and those of other tracers' processes beside them; returns how many.

    Each thread is a track, and each process's GPU. Slices of a track nest: an event that outlasts the one in which it
    started, as in interleaved coroutines, is on a further track. GPU events that overlap are on several tracks. Times are on
    the first process's CLOCK_MONOTONIC.

    Raises:
        OSError: the file cannot be written.
    """
    tracks = _Tracks(file)
    processes, _ = process_events(profile)
    if processes:
        tracks.begin(processes[0].trace.clock)
    count = 0
    for process in processes:
        trace = process.trace
        parent = tracks.add_process(trace.pid, process.label)
        gpu = []
        for thread in process.threads:
            scopes = select(thread.scopes, np.isin(thread.scopes["category"], _SCOPES))
            events = join([scopes, thread.natives(*_EVER)])
            on_gpu = np.isin(events["category"], (Category.GPU_KERNEL, Category.GPU_COPY))
            gpu.append(select(events, on_gpu))
            count += len(events)
            tracks.write(parent, thread.trace.thread_id, select(events, ~on_gpu), trace.name_of)
        tracks.write(parent, None, join(gpu), trace.name_of)
    return count + sum(tracks.add_foreign(each, unix_minus_monotonic(profile)) for each in others)


class _Tracks:
    """Writes tracks and their events into a file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.names: dict[str, int] = {}
        self.ids: dict[tuple[int, int | None, int], int] = {}
        self.pids: dict[int, int] = {}
        self.next_id = 1

    def begin(self, clock: Clock) -> None:
        """What the times mean, and the categories' names."""
        clocks = ((_MONOTONIC, clock.monotonic_ns), (_REALTIME, clock.unix_ns))
        snapshot = b"".join(_field(1, _field(1, number) + _field(2, time)) for number, time in clocks)
        self._packet(_field(_CLOCK_SNAPSHOT, snapshot + _field(2, _MONOTONIC)))
        categories = [(int(category), category.name.lower()) for category in Category]
        self._packet(
            _field(_SEQUENCE_FLAGS, _STATE_CLEARED)
            + _field(_DEFAULTS, _field(58, _MONOTONIC))
            + _field(_INTERNED_DATA, _interned(1, [*categories, (255, "other")]))
        )

    def add_process(self, pid: int, label: str) -> int:
        """Describe a process; returns its track. Processes of two hosts may have one id: the second gets another."""
        track = self._new_track()
        shown = pid if pid not in self.pids.values() else _LARGEST_PID + track
        self.pids[track] = shown
        self._describe(track, _field(3, _field(1, shown) + _field(6, label)))
        return track

    def add_foreign(self, process: ForeignProcess, unix_minus_monotonic: int) -> int:
        """Write the events of another tracer's process, each thread by its name; returns how many."""
        parent = self.add_process(_LARGEST_PID + self.next_id + 1, process.label)
        for number, (name, events) in enumerate(process.threads, 1):
            moved = events.copy()
            moved["start"] -= unix_minus_monotonic
            moved["end"] -= unix_minus_monotonic
            self.write(parent, number, moved, process.name_of, name)
        return sum(len(events) for _, events in process.threads)

    def write(
        self,
        process: int,
        thread: int | None,
        events: Events,
        name_of: Callable[[int], str],
        title: str = "",
    ) -> None:
        """Write the events of a thread, by default shown with its number, or those of a process's GPU for None."""
        starts = events["start"]
        outer_first = np.lexsort((events["depth"], events["category"] >= 16, -events["end"], starts))
        events = select(events, outer_first)
        self._name(events, name_of)
        timed = events["end"] > events["start"]
        lanes = np.zeros(len(events), np.int64)
        lanes[timed] = assign_lanes(events["start"][timed], events["end"][timed], may_nest=thread is not None)
        number = np.unique(events["name"])
        ids = np.array([self.names[name_of(int(each))] for each in number], np.int64)
        for lane in np.flatnonzero(np.bincount(lanes)).tolist():
            some = select(events, lanes == lane)
            names = ids[np.searchsorted(number, some["name"])]
            self._write_lane(self._track(process, thread, lane, title), some, names)

    def _write_lane(self, track: int, events: Events, names: Ints) -> None:
        timed = np.flatnonzero(events["end"] > events["start"])
        instants = np.flatnonzero(events["end"] <= events["start"])
        # At one time ends come first, then instants, then begins, outer ones first: a stable sort keeps this order.
        times = np.concatenate([events["end"][timed], events["start"][instants], events["start"][timed]])
        kinds = np.repeat([_END, _INSTANT, _BEGIN], [len(timed), len(instants), len(timed)])
        which = np.concatenate([timed, instants, timed])
        order = np.argsort(times, kind="stable")
        for first in range(0, len(order), _CHUNK):
            some = order[first : first + _CHUNK]
            categories = events["category"][which[some]].astype(np.int64)
            self.file.write(_packets(times[some], kinds[some], track, names[which[some]], categories))

    def _name(self, events: Events, name_of: Callable[[int], str]) -> None:
        """Give names their numbers."""
        texts = [name_of(int(number)) for number in np.unique(events["name"])]
        new = [text for text in dict.fromkeys(texts) if text not in self.names]
        for text in new:
            self.names[text] = len(self.names) + 1
        if new:
            data = _interned(2, [(self.names[text], text) for text in new])
            self._packet(_field(_SEQUENCE_FLAGS, _NEEDS_STATE) + _field(_INTERNED_DATA, data))

    def _track(self, process: int, thread: int | None, lane: int, title: str) -> int:
        """The track of a lane; described when it is new."""
        key = process, thread, lane
        if key not in self.ids:
            self.ids[key] = self._new_track()
            if thread is not None and lane == 0:
                described = _field(
                    4,
                    _field(1, self.pids[process])
                    + _field(2, thread)
                    + _field(5, title or f"thread {thread}"),
                )
            else:
                owner = "GPU" if thread is None else title or f"thread {thread}"
                described = _field(2, f"{owner}, track {lane + 1}" if lane else owner)
            self._describe(self.ids[key], _field(5, process) + described)
        return self.ids[key]

    def _new_track(self) -> int:
        self.next_id += 1
        return self.next_id

    def _describe(self, track: int, content: bytes) -> None:
        self._packet(_field(_TRACK_DESCRIPTOR, _field(1, track) + content))

    def _packet(self, content: bytes) -> None:
        self.file.write(_field(_PACKET, content + _SEQUENCE))


def assign_lanes(starts: Ints, ends: Ints, *, may_nest: bool) -> Ints:
    """The first lane for each interval in which it overlaps no other, or nests in it if it may.

    Args:
        starts: ascending; of equal ones the longest first. Shape (n,)
        ends: after the starts. Shape (n,)
        may_nest: whether an interval may lie within another one of its lane
    """
    if _fits_one_lane(starts, ends, may_nest):
        return np.zeros(len(starts), np.int64)
    stacks: list[list[int]] = []  # ends of the open intervals of each lane
    lanes = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        for stack in stacks:
            while stack and stack[-1] <= start:
                stack.pop()
        fitting = (lane for lane, stack in enumerate(stacks) if not stack or (may_nest and end <= stack[-1]))
        lane = next(fitting, len(stacks))
        if lane == len(stacks):
            stacks.append([])
        stacks[lane].append(end)
        lanes.append(lane)
    return np.array(lanes, np.int64)


def _fits_one_lane(starts: Ints, ends: Ints, may_nest: bool) -> bool:
    if not may_nest:
        return bool((starts[1:] >= ends[:-1]).all())
    # Depth: intervals that started before, less those that have ended.
    depths = np.arange(len(starts)) - np.searchsorted(np.sort(ends), starts, "right")
    for depth in range(1, int(depths.max(initial=0)) + 1):
        level, above = np.flatnonzero(depths == depth), np.flatnonzero(depths == depth - 1)
        parents = above[np.maximum(np.searchsorted(above, level) - 1, 0)]
        if (ends[level] > ends[parents]).any():
            return False
    return True


def _packets(times: Ints, kinds: Ints, track: int, names: Ints, categories: Ints) -> bytes:
    """TracePackets of track events, in this order. An end needs neither name nor category."""
    count = len(times)
    tracks = np.full(count, track)
    event = [_column(_TYPE, kinds, 1), _column(_TRACK_ID, tracks, 4)]
    begin = [*event, _column(_NAME_ID, names, 4), _column(_CATEGORY_ID, categories, 2)]
    head = np.tile(np.frombuffer(_SEQUENCE + _field(_SEQUENCE_FLAGS, _NEEDS_STATE), np.uint8), (count, 1))
    head = np.concatenate([_column(_TIMESTAMP, np.maximum(times, 0), 9), head], axis=1)
    is_end = kinds == _END
    rows = [
        _wrapped(head[chosen], [each[chosen] for each in parts])
        for chosen, parts in ((is_end, event), (~is_end, begin))
    ]
    sizes = np.array([rows[1].shape[1], rows[0].shape[1]])[is_end.astype(np.int64)]
    offsets = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), np.uint8)
    for chosen, matrix in zip((is_end, ~is_end), rows, strict=True):
        out[offsets[chosen][:, None] + np.arange(matrix.shape[1])] = matrix
    return out.tobytes()


def _wrapped(head: NDArray[np.uint8], parts: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Packets of a head and a track event. Shape (n, bytes)"""
    event = np.concatenate(parts, axis=1)
    inner = np.frombuffer(_key(_TRACK_EVENT, _BYTES) + _varint(event.shape[1]), np.uint8)
    body = np.concatenate([head, np.tile(inner, (len(head), 1)), event], axis=1)
    outer = np.frombuffer(_key(_PACKET, _BYTES) + _varint(body.shape[1]), np.uint8)
    return np.concatenate([np.tile(outer, (len(head), 1)), body], axis=1)


def _column(field: int, values: Ints, width: int) -> NDArray[np.uint8]:
    """A number's field in each row, as a varint of ``width`` bytes: all but the last say that another follows."""
    out = np.empty((len(values), 1 + width), np.uint8)
    out[:, 0] = field << 3 | _VARINT
    for place in range(width):
        out[:, 1 + place] = (values >> (7 * place) & 127) | (128 if place < width - 1 else 0)
    return out


def _interned(field: int, entries: Iterable[tuple[int, str]]) -> bytes:
    return b"".join(_field(field, _field(1, number) + _field(2, text)) for number, text in entries)


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _key(number, _VARINT) + _varint(value)
    content = value.encode("utf-8", "replace") if isinstance(value, str) else value
    return _key(number, _BYTES) + _varint(len(content)) + content


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
