"""The folder of what is kept between runs, and files that are replaced whole or not at all.

It imports the standard library alone: placement and the profiler use it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def cache_folder(name: str) -> Path:
    """``$XDG_CACHE_HOME/rayagi/NAME``, usually below ``~/.cache``. It is not made here, and may be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "rayagi" / name


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path``, for the block to write: it replaces ``path`` when the block ends.

    Readers find the old content or the new one, never a mixture, also if this process is killed. If the block or the
    replacement fails, the file beside it is removed, and ``path`` keeps its content.

    Raises:
        OSError: it cannot be replaced.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        beside.replace(path)
    except OSError as error:
        if str(error.filename) != str(beside):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # who reads it knows this file
    finally:
        with suppress(OSError):  # the error above says what is wrong
            beside.unlink()


def sync_path(path: Path) -> None:
    """Fsync a file's content, or a folder's names: it survives a power cut.

    Raises:
        OSError: it cannot be opened or flushed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
