"""Atomic writes call fsync: on the content before the rename, on the folder after it."""

import errno
import fcntl
import os
import re

import pytest

from rayagi.run import atomic
from rayagi.run.csv_log import CsvLog
from rayagi.run.errors import DiskError


@pytest.fixture
def events(monkeypatch):
    """Calls of fsync and rename, in order."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor):
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def noted_replace(source, target, **kwargs):
        calls.append(("rename", os.path.basename(target)))
        replace(source, target, **kwargs)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return calls


def test_a_file_that_is_replaced_is_on_the_disk_before_and_after_its_rename(tmp_path, events):
    atomic.replace_text(tmp_path / "a.json", "{}")
    assert events == [
        ("fsync", f".a.json.{os.getpid()}.tmp"),
        ("rename", "a.json"),
        ("fsync", tmp_path.name),
    ]
    assert (tmp_path / "a.json").read_text() == "{}"


def test_a_file_that_is_written_is_on_the_disk(tmp_path, events):
    atomic.write_bytes(tmp_path / "a", b"content")
    assert events == [("fsync", "a")]
    assert (tmp_path / "a").read_bytes() == b"content"


def test_fsync_comes_after_all_content(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    atomic.write_bytes(tmp_path / "a", b"content")
    assert sizes == [7]


def test_a_log_that_is_closed_is_on_the_disk(tmp_path, events):
    log = CsvLog(tmp_path / "p.csv", ("iteration",))
    events.clear()
    log.append([{"iteration": 1.0}])
    log.close()
    assert events == [("fsync", "p.csv")]


def test_a_failed_replacement_names_the_file_and_not_the_temporary_one(tmp_path):
    (tmp_path / "folder").write_text("")
    path = tmp_path / "folder" / "run.json"
    with pytest.raises(DiskError, match=re.escape(f"cannot write {path}: Not a directory")):
        atomic.replace_text(path, "{}")


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    atomic.replace_text(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert pipe.is_fifo()
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_folder_of_the_files_name_is_named_and_nothing_is_left_beside_it(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(DiskError, match=r"cannot write \S+/a\.json: Is a directory"):
        atomic.replace_text(tmp_path / "a.json", "{}")
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ESTALE, "check its mount"),  # an NFS server that was restarted
        (errno.ENOTCONN, "check its mount"),  # FUSE, whose program has ended
        (errno.EMFILE, "ulimit -n"),
        (errno.ENOSPC, "free space there"),
    ],
)
def test_what_a_file_system_or_this_process_lacks_is_said_and_the_file_stays(
    tmp_path, monkeypatch, number, hint
):
    def failing(descriptor):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "run.json"
    atomic.replace_text(path, "old")
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(DiskError, match=rf"^cannot write {path}: {os.strerror(number)}.*; .*{hint}"):
        atomic.replace_text(path, "new")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_has_none_to_wait_for(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    with atomic.waiting_for_lock(tmp_path):
        pass


def test_only_one_holds_the_lock_for_a_change(tmp_path):
    with atomic.waiting_for_lock(tmp_path):
        assert atomic.lock_folder(tmp_path) is None
    descriptor = atomic.lock_folder(tmp_path)
    assert descriptor is not None
    os.close(descriptor)


def test_a_folder_is_made_before_the_work_whose_result_goes_there(tmp_path, monkeypatch):
    atomic.make_writable(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(DiskError, match=f"cannot write {re.escape(str(folder))}"):
            atomic.make_writable(folder)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DiskError, match=f"cannot write {re.escape(str(tmp_path))}: Permission denied"):
        atomic.make_writable(tmp_path)
