"""New folders, folder locks, and atomic writes: to a file beside it, flushed to the disk, then renamed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from collectives.files import replacing, sync_path
from rayagi.run.errors import LOCKABLE, WRITABLE, DiskError, RunFolderError, disk_errors


def new_folder(first: Path) -> Path:
    """Make a folder of this name; with a number if there is one, as ``name-2``.

    Raises:
        OSError: it cannot be made.
    """
    first.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            break
    return path


def lock_folder(folder: Path, hint: str = WRITABLE) -> int | None:
    """Lock a folder until the descriptor is closed, or this process ends. Returns None if another process holds the lock.

    Raises:
        DiskError: the folder is not writable, or its file system has no locks.
    """
    with disk_errors(folder, hint):
        descriptor = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        with disk_errors(folder, LOCKABLE):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except DiskError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def waiting_for_lock(folder: Path, hint: str = WRITABLE) -> Iterator[None]:
    """Hold the lock of a folder during the block, for a change of a moment: waits for another process that holds it.

    Without a lock where the file system has none.

    Raises:
        DiskError: the folder is not writable.
    """
    with disk_errors(folder, hint):
        descriptor = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        with disk_errors(folder, hint), _without_locks_too():
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with _without_locks_too():  # a child that was forked meanwhile has the descriptor too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextmanager
def _without_locks_too() -> Iterator[None]:
    """Pass over the error of a file system that has no locks."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def make_writable(folder: Path, hint: str = WRITABLE) -> None:
    """Make a folder where it is missing, before the work whose result goes there.

    Raises:
        DiskError: it cannot be made, or no file can be made in it.
    """
    with disk_errors(folder, hint):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and fsync it.

    Raises:
        DiskError: the disk is full or read-only.
    """
    with disk_errors(path):
        path.write_bytes(content)
        sync_path(path)


def is_special(path: Path) -> bool:
    """Whether it is a pipe, a device or a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers and crashes see either the old content or the new.

    A pipe or a device, such as /dev/stdout, is written to: root would replace it by a file.

    Raises:
        DiskError: the disk is full or read-only; the old content stays.
    """
    with disk_errors(path):
        if is_special(path):
            path.write_bytes(content)
            return
        with replacing(path) as beside:
            beside.write_bytes(content)
            sync_path(beside)
        sync_path(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace a file by text; as ``replace_bytes``."""
    replace_bytes(path, text.encode())


@contextmanager
def replacing_run(run: Path) -> Iterator[Path]:
    """A temporary folder, whose files replace those of a run folder when the block succeeds: all of them, or none.

    If this process is killed in between, ``complete_run`` does the rest. Other files of the run folder stay, other
    checkpoints are removed.

    Raises:
        OSError: it cannot be written. A folder that was made for it is removed.
    """
    is_new = not run.exists()
    try:
        with _replacing_run(run) as folder:
            yield folder
    except BaseException:
        if is_new:
            with suppress(OSError):  # it has files: some of them were moved there
                run.rmdir()
        raise


@contextmanager
def _replacing_run(run: Path) -> Iterator[Path]:
    run.mkdir(parents=True, exist_ok=True)
    complete_run(run)
    for left in run.glob(f"{_UNFINISHED}*"):  # of a killed process
        shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=run))
    try:
        yield folder
        for file in _files_of(folder):
            sync_path(file)
        kept = sorted(entry.name for entry in folder.glob("checkpoints/*"))
        write_bytes(folder / _KEPT, json.dumps(kept).encode())
        folder.rename(run / _READY)  # from here on the new files count
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    complete_run(run)


_UNFINISHED, _READY = ".unfinished_", ".ready"
_KEPT = ".kept"
"""Lists what the folder of checkpoints has then."""


def complete_run(run: Path) -> bool:
    """Move the files of a killed ``replacing_run`` into their places. Returns whether there were some.

    Several processes may do it at the same time. The run folder may be somebody else's.

    Raises:
        OSError: it cannot be written.
        RunFolderError: its links lead out of it, or the list of what is kept is damaged; nothing was changed.
    """
    ready = run / _READY
    if not ready.is_dir():
        return False
    places = {file: run / file.relative_to(ready) for file in _files_of(ready)}
    for inside in (ready, run / "checkpoints", *(place.parent for place in places.values())):
        if not inside.resolve().is_relative_to(run.resolve()):
            raise RunFolderError(
                str(inside), "leads out of the run folder, where nothing may be moved or removed"
            )
    kept = _kept_checkpoints(ready)
    sync_path(run)
    folders = {run}
    for file, place in places.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        folders.add(place.parent)
        with suppress(FileNotFoundError):  # another process has moved it
            file.replace(place)
    for folder in folders:
        sync_path(folder)
    for entry in run.glob("checkpoints/*"):
        if kept is not None and entry.name not in kept:
            with suppress(FileNotFoundError):  # another process has removed it
                entry.unlink() if entry.is_symlink() or not entry.is_dir() else shutil.rmtree(entry)
    done = run / f"{_UNFINISHED}{os.getpid()}"
    with suppress(FileNotFoundError):
        ready.rename(done)
    shutil.rmtree(done, ignore_errors=True)
    return True


def _kept_checkpoints(ready: Path) -> list[str] | None:
    """What the folder of checkpoints has then; None: another process has just completed the run.

    Raises:
        RunFolderError: the list is damaged.
    """
    try:
        kept = json.loads((ready / _KEPT).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        kept = None
    if not (isinstance(kept, list) and all(isinstance(name, str) for name in kept)):
        raise RunFolderError(
            str(ready / _KEPT), "is damaged: remove this folder to use the checkpoint of before"
        )
    return kept


def _files_of(folder: Path) -> list[Path]:
    """Files of a folder and its folders, in order, without the list of what is kept."""
    return sorted(each for each in folder.rglob("*") if each.is_file() and each.name != _KEPT)


def replace_json(path: Path, value: Any) -> None:
    """Replace a file by JSON; as ``replace_text``."""
    replace_text(path, json.dumps(value, indent=2) + "\n")
