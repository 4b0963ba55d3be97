"""Ledger: a write-ahead log of the changes that a process makes to this host's GPUs, and of how to undo them.

If a process is killed, its ledger remains, and another process can undo the changes (``rayagi cleanup``). There is one file
per run and partitioning process, so no two processes write to the same file.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from collectives.files import cache_folder, replacing, sync_path
from placement.errors import LedgerError, PartitionError
from placement.types import BackendName

SCHEMA = 1
"""Version of the file's layout. Increase it when a field changes its meaning."""

LOCK_LIMIT_S = 30.0
"""Time limit for acquiring the lock on the ledgers."""

UndoValue = str | int | float | None
Undo = Mapping[str, UndoValue]
"""Parameters of undoing a step; JSON values."""

OwnerState = Literal["alive", "dead", "elsewhere"]
"""``elsewhere``: on another host or in another container, so unknown here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Unique identity of a process, robust against pid reuse."""

    host: str
    boot_id: str
    pid_namespace: str
    """Pids are only comparable within one namespace (containers)."""
    pid: int
    start_ticks: int
    """Start time in clock ticks since boot: tells a process from a later one with the same pid."""

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        ticks = start_ticks(pid)
        assert ticks is not None  # this process exists
        return cls(**_this_host(), pid=pid, start_ticks=ticks)

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the host has not been restarted since; False on other hosts."""
        return self.boot_id == _this_host()["boot_id"]

    def state(self) -> OwnerState:
        """Whether the process still runs, by its pid."""
        here = _this_host()
        if self.host != here["host"]:
            return "elsewhere"
        if self.boot_id != here["boot_id"]:
            return "dead"
        if self.pid_namespace != here["pid_namespace"]:
            return "elsewhere"
        return "alive" if start_ticks(self.pid) == self.start_ticks else "dead"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """One step that was done, or was about to be done when the process ended."""

    number: int
    """Sequence number within a ledger; steps are undone from the highest."""
    backend: BackendName
    gpu_uuid: str
    made: str
    """Kind of object: ``daemon``, ``folder``, ``gpu_instance``, ``borrowed`` (an existing MIG instance in use)."""
    undo: Undo = field(default_factory=dict)

    def __str__(self) -> str:
        values = " ".join(f"{key}={value}" for key, value in self.undo.items())
        return f"{self.backend} {self.made} on {self.gpu_uuid}{f' ({values})' if values else ''}"


_locks: dict[Path, int] = {}
"""Descriptors of the locks that this process holds, by ledger: they stay open if its object is dropped."""


class Ledger:
    """The steps of one process on this host's GPUs. Every change is on disk (fsync) when the call returns."""

    def __init__(self, path: Path, run: str, owner: Owner, steps: tuple[LedgerEntry, ...] = ()) -> None:
        self.path, self.run, self.owner = path, run, owner
        self._steps = steps

    @classmethod
    def open(cls, run: str, directory: Path | None = None) -> Self:
        """A new ledger of this process. Its file appears with the first step.

        Args:
            run: name of the run, for messages
            directory: folder of the ledgers; None: ``default_directory()``
        """
        owner = Owner.current()
        name = f"{owner.host}-{owner.pid}-{time.time_ns():x}.json"
        return cls((directory or default_directory()) / name, run, owner)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The ledger in a file.

        Raises:
            LedgerError: the file cannot be read, or is not a ledger of this version.
        """
        try:
            content = json.loads(path.read_text())
            if content["schema"] != SCHEMA:
                raise LedgerError(str(path), f"has schema {content['schema']}, this version reads {SCHEMA}")
            steps = tuple(LedgerEntry(**step) for step in content["steps"])
            return cls(path, str(content["run"]), Owner(**content["owner"]), steps)
        except OSError as error:
            raise LedgerError(str(path), f"cannot be read ({error.strerror})") from error
        except (ValueError, TypeError, KeyError) as error:
            raise LedgerError(str(path), f"is not a ledger ({error!r})") from error

    def owner_state(self) -> OwnerState:
        """Whether the owner still runs; in another container of this host, by the lock that it holds while it lives.

        ``elsewhere`` for MPS of another container: only there its daemon can be ended.
        """
        state = self.owner.state()
        if state != "elsewhere" or not self.owner.is_of_this_boot or self.steps(backend="mps"):
            return state
        try:
            with self._lock_path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "alive"
        except OSError:
            return "elsewhere"
        return "dead"

    def steps(
        self, gpu_uuid: str | None = None, backend: BackendName | None = None
    ) -> tuple[LedgerEntry, ...]:
        """Steps, newest first (the order of undoing); filtered by GPU and backend if given."""
        return tuple(
            step
            for step in reversed(self._steps)
            if gpu_uuid in (None, step.gpu_uuid) and backend in (None, step.backend)
        )

    def record(self, backend: BackendName, gpu_uuid: str, made: str, undo: Undo | None = None) -> LedgerEntry:
        """Record a step *before* it is done.

        Raises:
            PartitionError: it could not be written; the step must not be done.
        """
        number = max((step.number for step in self._steps), default=0) + 1
        step = LedgerEntry(
            number=number, backend=backend, gpu_uuid=gpu_uuid, made=made, undo=dict(undo or {})
        )
        self._write((*self._steps, step), locked=True)
        return step

    def amend(self, step: LedgerEntry, **known: UndoValue) -> LedgerEntry:
        """Add values that only the finished step provides, such as an id from the driver.

        Raises:
            PartitionError: it could not be written.
        """
        amended = replace(step, undo={**step.undo, **known})
        self._write(tuple(amended if kept.number == step.number else kept for kept in self._steps))
        return amended

    def erase(self, step: LedgerEntry) -> None:
        """Remove a step *after* it was undone. Removing the last step deletes the file. Idempotent."""
        self._write(tuple(kept for kept in self._steps if kept.number != step.number))

    @property
    def _lock_path(self) -> Path:
        return self.path.with_suffix(".lock")

    def _write(self, steps: tuple[LedgerEntry, ...], *, locked: bool = False) -> None:
        try:
            if locked and self.path not in _locks:  # before the ledger exists, so nobody finds it unlocked
                _locks[self.path] = _locked(self._lock_path)
            if steps:
                content = {
                    "schema": SCHEMA,
                    "run": self.run,
                    "owner": asdict(self.owner),
                    "steps": [asdict(step) for step in steps],
                }
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(self.path) as beside:
                    beside.write_text(json.dumps(content, indent=2) + "\n")
                    sync_path(beside)
                sync_path(self.path.parent)  # the rename is durable, too
            else:
                self.path.unlink(missing_ok=True)
                self._lock_path.unlink(missing_ok=True)
                if self.path in _locks:
                    os.close(_locks.pop(self.path))
        except OSError as error:
            raise PartitionError(
                f"the ledger {self.path}",
                f"could not be written ({error.strerror})",
                "Free disk space, or set XDG_CACHE_HOME to a writable folder",
            ) from error
        self._steps = steps


def default_directory() -> Path:
    """Where this user's ledgers are."""
    return cache_folder("ledgers")


def all_ledgers(directory: Path | None = None) -> tuple[list[Ledger], list[LedgerError]]:
    """All ledgers of the folder, and an error for each invalid file. Read only."""
    ledgers, errors = [], []
    for path in sorted((directory or default_directory()).glob("*.json")):
        try:
            ledgers.append(Ledger.load(path))
        except LedgerError as error:
            # A ledger whose last step was just undone may vanish between the listing and the reading.
            if path.exists():
                errors.append(error)
    return ledgers, errors


@contextmanager
def exclusive_lock(directory: Path) -> Iterator[None]:
    """Exclusive lock (flock) on a folder of ledgers, for claiming GPUs and recovering stale state.

    The kernel releases it when the process ends. One for each running host: the folder may be shared by many, and its
    containers have other names.

    Raises:
        PartitionError: other processes held the lock for ``LOCK_LIMIT_S``, or the folder cannot be written or locked.
    """
    path = directory / f"lock-{_this_host()['boot_id']}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise _no_lock(path, error) from error
    try:
        _acquire(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise PartitionError(
                    f"the lock {path}",
                    f"other processes have held it for {LOCK_LIMIT_S:.0f} s",
                    "See which process partitions GPUs or cleans up on this host (`fuser` names it)",
                ) from error
            time.sleep(0.05)
        except OSError as error:
            raise _no_lock(path, error) from error


def _no_lock(path: Path, error: OSError) -> PartitionError:
    return PartitionError(
        f"the lock {path}",
        f"cannot be had ({error.strerror})",
        "Set XDG_CACHE_HOME to a writable folder whose file system has locks",
    )


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if there is none, or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may contain anything. After it, field 0 is the state and field 19 the start time.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _this_host() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
    }


def _locked(path: Path) -> int:
    """Descriptor of a new file with an exclusive lock, which the kernel releases when this process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor
