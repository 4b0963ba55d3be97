"""A profile's events as a table, read back by pyarrow."""

import io
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayagi.cli import main
from rayagi.profiler.arrow import write_arrow
from rayagi.profiler.trace import Category as C
from tests.unit.profiler.traces import process, profile, write

FIRST = [
    (C.THREAD, 0, 100, "main", 0),
    (C.ITERATION, 0, 50, "iteration", 0, 7),
    (C.SIMULATOR, 10, 20, "mj_step", 1),
]
SECOND = [(C.THREAD, 1000, 1100, "main", 0), (C.BACKEND, 1010, 1030, "torch\ud800add", 2)]


def two():
    """On two hosts, whose clocks show 0 and 1000 ns at the Unix time 5000."""
    return profile(
        process([FIRST], "act", pid=1, clock=(0, 5000)),
        process([SECOND], "learn", pid=2, host="b", clock=(1000, 5000)),
    )


def read(file, form):
    file.seek(0)
    return pq.read_table(file) if form == "parquet" else pa.ipc.open_file(file).read_all()


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_every_event_is_a_row_on_one_clock(form):
    file = io.BytesIO()
    assert write_arrow(two(), file, form) == 5
    table = read(file, form)
    assert table.schema.metadata[b"unix_minus_monotonic_ns"] == b"5000"
    assert table.schema.metadata[b"command"] == b"python x.py"
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        ("act", 1, "thread", "main", 0, 100, 0, None),
        ("act", 1, "iteration", "iteration", 0, 50, 0, 7),
        ("act", 1, "simulator", "mj_step", 10, 20, 1, None),
        ("learn", 1, "thread", "main", 0, 100, 0, None),
        ("learn", 1, "backend", "torch?add", 10, 30, 2, None),
    ]


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_an_empty_profile_is_an_empty_table(form):
    file = io.BytesIO()
    assert write_arrow(profile(), file, form) == 0
    assert read(file, form).num_rows == 0


def test_the_suffix_of_the_file_chooses(tmp_path, capsys):
    folder = write(tmp_path / "profile", two())
    assert main(["profile", "export", str(folder), str(tmp_path / "a.parquet")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.parquet'}: 5 events\n"
    assert pq.read_table(tmp_path / "a.parquet").num_rows == 5
    assert main(["profile", "export", str(folder), str(tmp_path / "a.arrow")]) == 0
    assert pa.ipc.open_file(tmp_path / "a.arrow").read_all().num_rows == 5


def test_a_pipe_is_not_replaced_by_a_file(tmp_path, capsys):
    folder, pipe = write(tmp_path / "profile", two()), tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["profile", "export", str(folder), str(pipe)]) == 2
    assert "is a pipe or a device" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_other_traces_are_not_merged_into_a_table(tmp_path, capsys):
    folder, other = write(tmp_path / "profile", two()), tmp_path / "a.json"
    other.write_text("[]")
    assert main(["profile", "export", str(folder), str(tmp_path / "a.arrow"), "--merge", str(other)]) == 2
    assert "--merge is for Perfetto traces; a.arrow is a table" in capsys.readouterr().err
    assert not (tmp_path / "a.arrow").exists()
