"""Private folders, which only this user and root can change: safe for files that are executed."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ROOT_UID = 0


class UntrustedFolderError(Exception):
    """Another user can change a folder, or one above it."""


def private_folder(path: Path) -> Path:
    """Find a folder; create it for this user only if it is missing.

    It rejects what sudo and ssh reject, on every level from the root down: folders of other users than this one and root,
    folders that others can write to (allowed above the last with a sticky bit), and symbolic links of other users. No other
    user can replace a level that was checked, and so none below it.

    Returns:
        Its path without symbolic links. It belongs to this user and has mode 0700.

    Raises:
        UntrustedFolderError: another user could change its contents.
        OSError: it cannot be created.
    """
    own = os.geteuid()
    path = Path(os.path.abspath(path))
    for each in (path, *path.parents):
        if os.path.islink(each) and (owner := os.lstat(each).st_uid) not in (_ROOT_UID, own):
            raise UntrustedFolderError(f"the symbolic link {each} belongs to user {owner}")
    folder = Path(os.path.realpath(path))
    for each in (*reversed(folder.parents), folder):
        if not os.path.lexists(each):
            with suppress(FileExistsError):  # another process of this user was faster
                each.mkdir(stat.S_IRWXU)
        found = os.lstat(each)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(each))
        if found.st_uid != own and (found.st_uid != _ROOT_UID or each == folder):
            raise UntrustedFolderError(f"{each} belongs to user {found.st_uid}, not to {own}")
        if found.st_mode & _WRITABLE_BY_OTHERS and (each == folder or not found.st_mode & stat.S_ISVTX):
            raise UntrustedFolderError(
                f"others can write to {each}, and so replace what is in it; delete it, or run chmod go-w {each}"
            )
    if stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
        folder.chmod(stat.S_IRWXU)
    return folder


def is_private_file(path: Path) -> bool:
    """Whether it exists, is regular, belongs to this user, and can be written by nobody else.

    It is in a ``private_folder``: no other user can put another file there afterwards.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return is_own and not found.st_mode & _WRITABLE_BY_OTHERS
