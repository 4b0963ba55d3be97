"""New folders, and atomic file writes: to a temporary file in the same folder, flushed to the disk, then renamed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from rayagi.run.errors import DiskError, disk_errors


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


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and fsync it.

    Raises:
        DiskError: the disk is full or read-only.
    """
    with disk_errors(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def is_special(path: Path) -> bool:
    """Whether it is a pipe, a device or a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers and crashes see either the old content or the new.

    A pipe or a device, such as /dev/stdout, is written to: root would replace it by a file.

    Raises:
        DiskError: the disk is full or read-only; the old content stays.
    """
    if is_special(path):
        with disk_errors(path), path.open("wb") as file:
            file.write(content)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            write_bytes(beside, content)
            with disk_errors(path):
                beside.replace(path)
        except DiskError as error:  # names the file beside it
            raise DiskError(str(path), error.reason) from error
        with disk_errors(path):
            sync_folder(path.parent)
    finally:
        with suppress(OSError):  # the error above says what is wrong
            beside.unlink()


def replace_text(path: Path, text: str) -> None:
    """Replace a file by text; as ``replace_bytes``."""
    replace_bytes(path, text.encode())


def replace_json(path: Path, value: Any) -> None:
    """Replace a file by JSON; as ``replace_text``."""
    replace_text(path, json.dumps(value, indent=2) + "\n")
