"""New folders, folder locks, and atomic writes: to a file beside it, flushed to the disk, then renamed."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from collectives.files import replacing, sync_path
from rayagi.run.errors import LOCKABLE, WRITABLE, DiskError, disk_errors


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


def replace_json(path: Path, value: Any) -> None:
    """Replace a file by JSON; as ``replace_text``."""
    replace_text(path, json.dumps(value, indent=2) + "\n")
