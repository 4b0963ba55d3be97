"""Files that are either whole or not there: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rayagi.run.errors import disk_errors


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it.

    Raises:
        DiskError: the disk is full or read-only.
    """
    with disk_errors(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows the folder's entries, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one step: a reader, or a crash, sees the old content or the new, never a part.

    Raises:
        DiskError: the disk is full or read-only; the old content stands.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_bytes(beside, content)
        with disk_errors(path):
            beside.replace(path)
            sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """``replace_bytes`` with text."""
    replace_bytes(path, text.encode())


def replace_json(path: Path, value: Any) -> None:
    """``replace_text`` with JSON."""
    replace_text(path, json.dumps(value, indent=2) + "\n")
