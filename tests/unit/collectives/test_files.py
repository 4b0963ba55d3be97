"""Files are replaced whole or not at all, and an error names them instead of the temporary ones beside them."""

import errno
import os

import pytest

from collectives.files import cache_folder, replacing, sync_path


def test_the_cache_is_where_the_desktop_standard_puts_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("search") == tmp_path / "rayagi" / "search"
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # the standard: as if it were not set
    assert str(cache_folder("kernels")) == "/home/someone/.cache/rayagi/kernels"


def test_a_file_has_its_old_content_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as beside:
        beside.write_text("n")
        assert path.read_text() == "old"
        beside.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_content_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def on_a_full_disk():
        with replacing(path) as beside:
            beside.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as raised:
        on_a_full_disk()
    assert raised.value.filename is None
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_there", [True, False])
def test_an_error_names_the_file_that_cannot_be_replaced(tmp_path, is_there):
    path = tmp_path / "a.json" if is_there else tmp_path / "missing" / "a.json"
    if is_there:
        path.mkdir()
    with pytest.raises(OSError) as raised, replacing(path) as beside:
        beside.write_text("new")
    assert raised.value.errno == (errno.EISDIR if is_there else errno.ENOENT)
    assert raised.value.filename == str(path)


def test_an_error_of_another_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError) as raised, replacing(tmp_path / "a.json"):
        (tmp_path / "source").read_text()
    assert str(raised.value.filename) == str(tmp_path / "source")


def test_files_and_folders_reach_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    path = tmp_path / "a"
    path.touch()
    sync_path(path)
    sync_path(tmp_path)
    assert synced == [str(path), str(tmp_path)]
