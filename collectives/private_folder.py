"""Private folders, which only this user and root can change: safe for files that are executed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MAX_LINKS = 40
"""Symbolic links on one path, as in Linux."""
_OPEN_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ROOT_UID = 0


class UntrustedFolderError(Exception):
    """Another user can change a folder, or one above it."""


@contextmanager
def private_folder(path: Path) -> Iterator[int]:
    """Open a folder; create it for this user only if it is missing.

    It rejects what sudo and ssh reject, on every level from the root down: folders of other users than this one and root,
    folders that others can write to (allowed above the last with a sticky bit), and symbolic links of other users. It walks
    by descriptors, so the checked folder is the opened one.

    Yields:
        A descriptor of the folder, which belongs to this user and has mode 0700.

    Raises:
        UntrustedFolderError: another user could change its contents.
        OSError: it cannot be created or opened.
    """
    descriptor = _open_trusted(path)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise UntrustedFolderError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
        if found.st_mode & _WRITABLE_BY_OTHERS:  # others may have put files there
            raise UntrustedFolderError(f"others can write to {path}; delete it, or run chmod go-w {path}")
        if stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
            os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IRWXU)
        yield descriptor
    finally:
        os.close(descriptor)


def is_private_file(folder: int, name: str) -> bool:
    """Whether a file is regular, belongs to this user, and can be written by nobody else.

    ``folder`` is of ``private_folder``: no other user can put another file there afterwards. Raises FileNotFoundError.
    """
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return is_own and not found.st_mode & _WRITABLE_BY_OTHERS


def _open_trusted(path: Path) -> int:
    """Open the folder level by level. No other user can replace any part of the path."""
    pending = list(reversed(Path(os.path.abspath(path)).parts))  # "/" comes first
    descriptor, walked, num_links = os.open("/", _OPEN_FLAGS), Path("/"), 0
    try:
        while pending:
            name = pending.pop()
            target = _link_target(descriptor, name, walked / name)
            if target is not None:
                num_links += 1
                if num_links > _MAX_LINKS:
                    raise UntrustedFolderError(f"{path} leads through more than {_MAX_LINKS} symbolic links")
                pending += reversed(target.parts)
                continue
            below = os.open(name, _OPEN_FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor, walked = below, walked / name
            _refuse_untrusted(os.fstat(descriptor), walked)
    except OSError as error:
        os.close(descriptor)
        raise OSError(error.errno, error.strerror, str(walked / name)) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _link_target(parent: int, name: str, path: Path) -> Path | None:
    """Target of a symbolic link; None for a folder, which is created if it is missing."""
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process of this user was faster
            os.mkdir(name, stat.S_IRWXU, dir_fd=parent)
        return None
    if not stat.S_ISLNK(found.st_mode):
        return None
    if found.st_uid not in (_ROOT_UID, os.geteuid()):
        raise UntrustedFolderError(f"the symbolic link {path} belongs to user {found.st_uid}")
    return Path(os.readlink(name, dir_fd=parent))


def _refuse_untrusted(found: os.stat_result, path: Path) -> None:
    if found.st_uid not in (_ROOT_UID, os.geteuid()):
        raise UntrustedFolderError(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & _WRITABLE_BY_OTHERS and not found.st_mode & stat.S_ISVTX:
        raise UntrustedFolderError(f"others can write to {path}, and so can replace what is below it")
