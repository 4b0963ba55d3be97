"""Perfetto traces, decoded by a small reader of protobuf's wire format that shares nothing with the writer."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayagi.cli import main
from rayagi.profiler.perfetto import assign_lanes, write_perfetto
from rayagi.profiler.trace import Category as C
from tests.unit.profiler.traces import process, profile, write


def fields(data):
    """{number: [values]} of a message: ints and bytes."""
    found, at = {}, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            value = varint()
        else:
            assert key & 7 == 2, "only varints and bytes are written"
            length = varint()
            value, at = data[at : at + length], at + length
            assert len(value) == length
        found.setdefault(key >> 3, []).append(value)
    return found


def decode(data):
    """Tracks {uuid: text}, events (track, time, type, name, category) in order, and the packets."""
    packets = [fields(packet) for packet in fields(data).get(1, [])]
    names, categories, tracks, events = {}, {}, {}, []
    for packet in packets:
        for interned in map(fields, packet.get(12, [])):
            for table, number in ((categories, 1), (names, 2)):
                for entry in map(fields, interned.get(number, [])):
                    table[entry[1][0]] = entry[2][0].decode()
        for described in map(fields, packet.get(60, [])):
            inner = [fields(described[n][0]) for n in (3, 4) if n in described]
            text = inner[0][6 if 3 in described else 5][0] if inner else described[2][0]
            tracks[described[1][0]] = text.decode()
        for event in map(fields, packet.get(11, [])):
            name = names[event[10][0]] if 10 in event else None
            category = categories[event[3][0]] if 3 in event else None
            events.append((event[11][0], packet[8][0], event[9][0], name, category))
    return tracks, events, packets


def written(found):
    file = io.BytesIO()
    count = write_perfetto(found, file)
    return count, *decode(file.getvalue())


def test_a_thread_s_slices_nest_in_order():
    far = 2**55
    events = [
        (C.THREAD, far, far + 90, "main", 0),
        (C.OPERATION, far + 10, far + 50, "update \N{GREEK SMALL LETTER ALPHA}", 1),
        (C.GPU_RUNTIME, far + 20, far + 30, "launch", 1),
        (C.BACKEND, far + 10, far + 50, "run", 0),
        (C.BACKEND, far + 50, far + 50, "item", 0),
        (C.BACKEND, far + 50, far + 60, "next", 0),
    ]
    count, tracks, found, packets = written(profile(process([events], clock=(5, 7))))
    assert count == 5
    (track,) = {event[0] for event in found}
    assert tracks[track] == "thread 1"
    assert "trainer" in tracks.values()
    assert [(time - far, kind, name, category) for _, time, kind, name, category in found] == [
        (10, 1, "update \N{GREEK SMALL LETTER ALPHA}", "operation"),
        (10, 1, "run", "backend"),
        (20, 1, "launch", "gpu_runtime"),
        (30, 2, None, None),
        (50, 2, None, None),
        (50, 2, None, None),
        (50, 3, "item", "backend"),
        (50, 1, "next", "backend"),
        (60, 2, None, None),
    ]
    snapshot = fields(packets[0][6][0])
    assert [(clock[1][0], clock[2][0]) for clock in map(fields, snapshot[1])] == [(3, 5), (1, 7)]
    assert snapshot[2] == [3]  # trace time is CLOCK_MONOTONIC
    assert fields(packets[1][59][0])[58] == [3]
    assert packets[1][13] == [1]
    assert all(packet[13] == [2] for packet in packets if 11 in packet)


def test_overlapping_events_of_a_gpu_are_on_several_tracks():
    events = [(C.GPU_KERNEL, 0, 10, "a", 0), (C.GPU_COPY, 5, 15, "b", 0), (C.GPU_KERNEL, 10, 20, "c", 0)]
    _, tracks, found, _ = written(profile(process([events])))
    placed = {name: tracks[track] for track, _, kind, name, _ in found if kind == 1}
    assert placed == {"a": "GPU", "b": "GPU, track 2", "c": "GPU"}


def test_processes_of_two_hosts_with_one_id_are_two():
    same = [[(C.THREAD, 0, 9, "m", 0), (C.BACKEND, 1, 2, "x", 0)]]
    _, _, _, packets = written(profile(process(same, "a"), process(same, "b", host="other")))
    pids = [
        fields(fields(packet[60][0])[3][0])[1][0]
        for packet in packets
        if 60 in packet and 3 in fields(packet[60][0])
    ]
    assert len(set(pids)) == 2


spans = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(spans, max_size=12), st.booleans())
def test_every_track_is_balanced_and_every_slice_is_there(pairs, on_gpu):
    category = C.GPU_KERNEL if on_gpu else C.BACKEND
    events = [(category, start, end, f"{start}-{end}", 0) for start, end in pairs]
    _, _, found, _ = written(profile(process([[(C.THREAD, 0, 31, "m", 0), *events]])))
    open_slices, slices, latest = {}, [], {}
    for track, time, kind, name, _ in found:
        assert latest.get(track, 0) <= time
        latest[track] = time
        if kind == 1:
            stack = open_slices.setdefault(track, [])
            assert not (on_gpu and stack)
            stack.append((name, time))
        elif kind == 2:
            name, start = open_slices[track].pop()
            slices.append((name, start, time))
        else:
            slices.append((name, time, time))
    assert not any(open_slices.values())
    assert sorted(slices) == sorted((f"{start}-{end}", start, end) for start, end in pairs)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(spans.filter(lambda span: span[0] < span[1]), min_size=1, max_size=12), st.booleans())
def test_lanes_are_needed_only_where_intervals_cross(pairs, may_nest):
    pairs = sorted(pairs, key=lambda pair: (pair[0], -pair[1]))
    starts, ends = (np.array(each) for each in zip(*pairs, strict=True))
    lanes = assign_lanes(starts, ends, may_nest=may_nest)
    for lane in range(lanes.max() + 1):
        own = [pair for pair, each in zip(pairs, lanes.tolist(), strict=True) if each == lane]
        crossing = [
            (a, b)
            for index, a in enumerate(own)
            for b in own[index + 1 :]
            if b[0] < a[1] and not (may_nest and b[1] <= a[1])
        ]
        assert crossing == []
    if not may_nest:
        assert lanes.max() + 1 == max(sum(a <= time < b for a, b in pairs) for time in range(31))


def test_the_package_of_perfetto_reads_it():
    pb = pytest.importorskip(
        "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
        reason="the extra 'dev' is incomplete: no file was read by the package perfetto",
    )
    file = io.BytesIO()
    events = [(C.THREAD, 0, 9, "m", 0), (C.OPERATION, 1, 8, "act", 1), (C.BACKEND, 1, 5, "run", 0)]
    write_perfetto(profile(process([events])), file)
    trace = pb.Trace()
    trace.ParseFromString(file.getvalue())
    kinds = [packet.track_event.type for packet in trace.packet if packet.HasField("track_event")]
    assert kinds == [1, 1, 2, 2]


def test_the_command(tmp_path, capsys):
    events = [(C.THREAD, 0, 9, "m", 0), (C.BACKEND, 1, 2, "x", 0)]
    folder = write(tmp_path / "p", profile(process([events])))
    assert main(["profile", "export", str(folder), str(tmp_path / "t")]) == 0
    assert "1 event;" in capsys.readouterr().out
    assert len(decode((tmp_path / "t").read_bytes())[1]) == 2
    assert main(["profile", "export", str(folder), str(tmp_path / "missing" / "t")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "t"]
