"""Errors of a run. Each message names the value, the limit and a remedy."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from rayagi.run.quantities import bytes_text

_DISK_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EFBIG,
        errno.EIO,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EEXIST,
        errno.ENOENT,
        errno.ENOLCK,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
    }
)
"""errno values of a file that cannot be written: no space, read-only, no permission, no folder, a folder in its place, no
locks."""
_HINTS = {
    errno.ENOENT: "the folder that it belongs in is not there, or was removed or renamed",
    errno.EMFILE: "raise this process's limit of open files, as by `ulimit -n 4096`",
    errno.ENFILE: "this machine has no open file left: end other programs",
    **dict.fromkeys(
        (
            errno.ESTALE,
            errno.ENOTCONN,
            errno.EHOSTDOWN,
            errno.ETIMEDOUT,
            errno.EREMOTEIO,
            errno.ENXIO,
            errno.ENODEV,
        ),
        "its file system is gone or does not answer: check its mount",
    ),
}
"""Hint by errno, where it is no matter of this file."""

WRITABLE = "free space there, or make it writable"
LOCKABLE = "choose a folder whose file system has locks: this one is mounted without flock"


class RunError(Exception):
    """A run cannot start, continue or be read."""


class DiskError(RunError):
    """A file of the run cannot be written."""

    def __init__(self, path: str, reason: str, hint: str = WRITABLE) -> None:
        super().__init__(path, reason, hint)
        self.path, self.reason, self.hint = path, reason, hint

    def __str__(self) -> str:
        return f"cannot write {self.path}: {self.reason}; {self.hint}"


class PathError(RunError):
    """Something is wrong with a file or folder."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class RunFolderError(PathError):
    """A folder is not a run folder, or is damaged."""


class RunVersionError(RunError):
    """A run folder has the layout of another version."""

    def __init__(self, path: str, found: int | str, readable: int, written_by: str) -> None:
        super().__init__(path, found, readable, written_by)
        self.path, self.found, self.readable, self.written_by = path, found, readable, written_by

    def __str__(self) -> str:
        return (
            f"{self.path} has run folder layout {self.found}, written by rayagi {self.written_by}; this version "
            f"reads layout {self.readable} only. Use that version for it, or start a new run with its settings: "
            f"rayagi train TASK --config {quote(self.path)}/config.yaml"
        )


class CheckpointError(PathError):
    """A checkpoint is damaged."""

    def __str__(self) -> str:
        return f"checkpoint {self.path} is damaged: {self.reason}"


class NoCheckpointError(RunError):
    """A run has no usable checkpoint."""

    def __init__(self, path: str, wanted: str, available: tuple[str, ...], damaged: tuple[str, ...]) -> None:
        super().__init__(path, wanted, available, damaged)
        self.path, self.wanted, self.available, self.damaged = path, wanted, available, damaged

    def __str__(self) -> str:
        there = ", ".join(self.available) if self.available else "none"
        text = f"{self.path} has no usable checkpoint '{self.wanted}'; usable ones: {there}"
        return f"{text}; damaged: {'; '.join(self.damaged)}" if self.damaged else text


class NonFiniteResultError(RunError):
    """A loss, gradient or weight is NaN or infinite. Nothing is saved after that."""

    def __init__(self, quantity: str, value: float, iteration: int, env_steps: int) -> None:
        super().__init__(quantity, value, iteration, env_steps)
        self.quantity, self.value, self.iteration, self.env_steps = quantity, value, iteration, env_steps

    def __str__(self) -> str:
        return (
            f"{self.quantity} became {self.value} at iteration {self.iteration} ({self.env_steps:,} environment "
            "steps); the run stopped and nothing was saved after it. Lower ppo.learning_rate or ppo.max_grad_norm, "
            "or check the task's rewards"
        )


class UnstableSimulationsError(RunError):
    """Too many of a run's simulations became unstable."""

    def __init__(self, unstable: int, env_steps: int, limit: float) -> None:
        super().__init__(unstable, env_steps, limit)
        self.unstable, self.env_steps, self.limit = unstable, env_steps, limit

    def __str__(self) -> str:
        return (
            f"simulations became unstable in {self.unstable:,} of the last {self.env_steps:,} environment steps "
            f"({self.unstable / self.env_steps:.2%}; env.max_unstable_share allows {self.limit:.2%}). Lower the model's "
            "timestep or the actions' range, or check the initial state; a higher env.max_unstable_share "
            "continues in spite of it"
        )


class EnvironmentChangedError(RunError):
    """The environment of a run has other sizes or actions than when the run began."""

    def __init__(self, run: str, env_id: str, difference: str) -> None:
        super().__init__(run, env_id, difference)
        self.run, self.env_id, self.difference = run, env_id, difference

    def __str__(self) -> str:
        return (
            f"{self.run}: {self.env_id} was changed since the run began ({self.difference}), and its policy and experience "
            "mean nothing there; use the environment's code and version of then, or start a new run"
        )


class LimitReachedError(RunError):
    """A resumed run had already reached its limit."""


@contextmanager
def disk_errors(path: Path | str, hint: str = WRITABLE) -> Iterator[None]:
    """Convert an OSError of writing to a ``DiskError`` with path, free space if that is short, and hint."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*_DISK_ERRNOS, *_HINTS):
            raise
        named = error.filename if isinstance(error.filename, str) else str(path)
        reason = os.strerror(error.errno or 0) + _free_space(error, path)
        raise DiskError(named, reason, _HINTS.get(error.errno or 0, hint)) from error


def _free_space(error: OSError, path: Path | str) -> str:
    """`` (4 KiB of 3 MiB are free)`` if the disk is full; empty for other errors."""
    folder = next((each for each in Path(path).absolute().parents if each.is_dir()), None)
    if error.errno != errno.ENOSPC or folder is None:
        return ""
    disk = shutil.disk_usage(folder)
    files = os.statvfs(folder)
    if files.f_files and not files.f_favail:
        return f" (it can hold no more files, though {bytes_text(disk.free)} are free)"
    return f" ({bytes_text(disk.free)} of {bytes_text(disk.total)} are free)"
