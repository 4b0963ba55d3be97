"""Reading traces: files written here byte by byte, and damage of every kind."""

import io
import json
import os
import struct

import numpy as np
import pytest

from rayagi.profiler import layout
from rayagi.profiler.layout import Category
from rayagi.profiler.overlap import breakdown
from rayagi.profiler.perfetto import write_perfetto
from rayagi.profiler.trace import EVENT, TraceError, read_profile

RECORDS = [(100, 900, 1, Category.THREAD, 0, 0), (200, 0, 2, Category.OPERATION, 1, 0)]


def header(committed=2, capacity=8, *, magic=b"RAYAGIEV", version=1, size=24, start=100, dropped_from=0):
    """Written out here, not with the layout's own format."""
    numbers = version, size, 77, capacity, committed, 3, start
    return magic + struct.pack("<IIQQQQqq", *numbers, dropped_from)


@pytest.fixture
def folder(tmp_path):
    """A profile of one process with one thread that recorded two events, with room for eight."""
    (tmp_path / "profile.json").write_text(
        json.dumps({"version": 1, "command": ["python", "x.py"], "start_unix_ns": 5, "intercepted": {}})
    )
    process = tmp_path / "host-41-7"
    process.mkdir()
    about = {
        "name": "trainer",
        "pid": 41,
        "parent": 40,
        "argv": ["x.py"],
        "metadata": {"seed": 1},
        "python": "3.11.7",
        "clock": {"monotonic_ns": 10, "unix_ns": 1000, "error_ns": 2},
    }
    (process / "process.json").write_text(json.dumps(about))
    (process / "names.jsonl").write_text(
        '{"id": 1, "name": "main"}\n{"id": 2, "name": "act\\u2028<b>"}\n{"id": 3, '
    )
    body = b"".join(struct.pack("<qqIBBH", *record) for record in RECORDS)
    (process / "77-0.events").write_bytes(header() + body + bytes(24))
    return tmp_path


def test_a_profile_is_read_as_it_was_written(folder):
    profile = read_profile(folder)
    (process,) = profile.processes
    (thread,) = process.threads
    assert (profile.command, profile.start_unix_ns) == (("python", "x.py"), 5)
    assert (process.name, process.pid, process.parent, process.metadata) == ("trainer", 41, 40, {"seed": 1})
    assert process.clock.unix_ns - process.clock.monotonic_ns == 990
    assert (thread.thread_id, thread.start_ns, thread.dropped) == (77, 100, 3)
    assert thread.events.tolist() == RECORDS


def test_the_end_of_a_process_is_its_own_or_the_watcher_s(folder):
    def read():
        (process,) = read_profile(folder).processes
        return process.end_ns, process.has_ended

    assert read() == (0, False)
    (folder / "host-41-7" / "end.json").write_text('{"monotonic_ns": 950}')
    assert read() == (950, False)
    about = json.loads((folder / "host-41-7" / "process.json").read_text())
    (folder / "host-41-7" / "process.json").write_text(json.dumps(about | {"end_monotonic_ns": 940}))
    assert read() == (940, True)


def test_iterations_before_the_first_recorded_one_are_known(folder):
    assert read_profile(folder).skipped is None
    about = json.loads((folder / "profile.json").read_text())
    for schedule, skipped in ((None, None), ({"skip": 2, "warm_up": 1, "record": 5, "repeat": 1}, 3)):
        (folder / "profile.json").write_text(json.dumps(about | {"schedule": schedule}))
        assert read_profile(folder).skipped == skipped


def test_a_name_that_was_cut_off_is_a_number(folder):
    (process,) = read_profile(folder).processes
    assert process.names == {1: "main", 2: "act\u2028<b>"}
    assert (process.name_of(2), process.name_of(3)) == ("act\u2028<b>", "name 3")


def test_the_dtype_is_the_record_s_layout():
    assert EVENT.itemsize == layout.RECORD.size == 24
    packed = layout.RECORD.pack(1, -2, 3, 4, 5, 6)
    assert struct.unpack_from("<q", packed, layout.END_AT) == (-2,)
    assert np.frombuffer(packed, EVENT).tolist() == [(1, -2, 3, 4, 5, 6)]


def test_the_counts_are_where_the_layout_says():
    packed = header(committed=2)
    assert struct.unpack_from("<QQ", packed, layout.COMMITTED_AT) == (2, 3)
    assert layout.DROPPED_AT == layout.COMMITTED_AT + 8
    packed = header(dropped_from=500)
    assert struct.unpack_from("<q", packed, layout.DROPPED_FROM_AT) == (500,)
    assert len(packed) == layout.HEADER.size == 64


def test_files_that_a_dying_process_left_unwritten_are_ignored(folder):
    process = folder / "host-41-7"
    (process / "78-1.events").write_bytes(b"")
    (process / "79-2.events").write_bytes(bytes(4096))
    (folder / "host-42-9").mkdir()
    (only,) = read_profile(folder).processes
    assert [thread.thread_id for thread in only.threads] == [77]


def test_a_file_without_events_is_no_thread(folder):
    """Of a process that was killed while it warmed up."""
    (folder / "host-41-7" / "77-0.events").write_bytes(header(committed=0))
    (process,) = read_profile(folder).processes
    assert process.threads == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(committed=4), "4 records of 24 bytes, but room for 0"),
        (header(committed=9, capacity=8) + bytes(24 * 9), "9 records of 24 bytes, but room for 8"),
        (header(size=25) + bytes(50), "records of 25 bytes"),
        (header(version=2), "of version 2; this rayagi reads version 1"),
        (header(magic=b"PK\3\4aaaa"), "does not hold events"),
        (header()[:40], "cut off: 40 of the header's 64 bytes"),
    ],
)
def test_damaged_events_are_named_in_one_sentence(folder, content, message):
    (folder / "host-41-7" / "77-0.events").write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        read_profile(folder)
    assert "77-0.events" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("profile.json", "{", "is damaged"),
        ("profile.json", "[1]", "holds no JSON object"),
        ("profile.json", '{"version": 7}', "of version 7; this rayagi reads version 1"),
        ("profile.json", '{"version": 1}', "no 'command'"),
        ("host-41-7/process.json", "{}", "no 'name'"),
        ("host-41-7/process.json", "[" * 100_000, "is damaged"),
        ("host-41-7/process.json", '{"name": "", "pid": Infinity}', "infinity"),
        ("host-41-7/process.json", '{"name": "", "pid": -1}', "process id -1"),
        ("host-41-7/end.json", "[]", "holds no JSON object"),
        ("host-41-7/end.json", '{"monotonic_ns": -5}', "an end at -5 ns"),
        ("host-41-7/names.jsonl", '{"id": Infinity, "name": "a"}\n', "damaged in line 1"),
        ("profile.json", '{"version": 1, "command": [], "start_unix_ns": Infinity}', "is damaged"),
        ("profile.json", '{"version": "' + 999 * "9" + '"}', "of version '9{19}; this"),
        ("host-41-7/names.jsonl", "nonsense\n", "damaged in line 1"),
        ("host-41-7/names.jsonl", '{"id": 1, "name": "a"}\n{"id": []}\n', "damaged in line 2"),
    ],
)
def test_damaged_texts_are_named_in_one_sentence(folder, file, content, message):
    (folder / file).write_text(content)
    with pytest.raises(TraceError, match=message) as caught:
        read_profile(folder)
    assert file.rpartition("/")[2] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_profile_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"is not a profile: it has no profile\.json"):
        read_profile(tmp_path / "nothing")


def test_a_file_that_is_cut_off_or_deleted_while_it_is_read_is_one_sentence(folder):
    """A mapping of it would end the reader with SIGBUS."""
    profile = read_profile(folder)
    (process,) = profile.processes
    (thread,) = process.threads
    os.truncate(thread.path, 64 + 24)
    assert thread.read(0, 1).tolist() == RECORDS[:1]
    with pytest.raises(TraceError, match=r"77-0\.events was cut off while it was read: 1 of 2 records"):
        thread.read(0, 2)
    thread.path.unlink()
    with pytest.raises(TraceError, match=r"77-0\.events cannot be read: No such file"):
        breakdown(profile)


def test_clocks_before_1970_are_damage(folder):
    about = json.loads((folder / "host-41-7" / "process.json").read_text())
    about["clock"]["unix_ns"] = -1
    (folder / "host-41-7" / "process.json").write_text(json.dumps(about))
    with pytest.raises(TraceError, match="host-41-7 is damaged: one of its clocks is at -1 ns"):
        write_perfetto(read_profile(folder), io.BytesIO())


def test_errors_do_not_control_a_terminal(folder):
    process = (folder / "host-41-7").rename(folder / "\x1b]0;title\x07\n-41-7")
    (process / "process.json").write_text("")
    with pytest.raises(TraceError) as caught:
        read_profile(folder)
    assert str(caught.value).isprintable()
