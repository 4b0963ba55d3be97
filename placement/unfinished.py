"""Names of files and folders that are being written, which tell those of killed processes."""

from __future__ import annotations

import glob
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from placement.ledger import start_ticks


def unfinished_beside(out: Path) -> Path:
    """Where this process writes what is to be renamed to ``out``: beside it, hidden, with its host and process id.

    What killed processes of this host have left of the same ``out`` is removed.
    """
    prefix = f".{out.name}.{socket.gethostname()}."
    folder = out.absolute().parent
    for left in folder.glob(f"{glob.escape(prefix)}*.unfinished"):
        pid = left.name.removeprefix(prefix).removesuffix(".unfinished")
        if pid.isdecimal() and (int(pid) == os.getpid() or start_ticks(int(pid)) is None):
            remove_unfinished(left)
    return folder / f"{prefix}{os.getpid()}.unfinished"


def remove_unfinished(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()
