"""The dataset folder: its files, and the manifest of the complete ones.

    dataset.json         layout version, format, task, sizes of the columns
    provenance.json      per session: run, checkpoint, seed, template, versions, machine, how it ended
    manifest.jsonl       a line per complete file: its name and statistics
    statistics.json      rows, episodes, returns, observations' mean and standard deviation, of all complete files
    data/                the files: s000-g001-00002.parquet is the third one of GMI 1 in the first session

Each writer appends its own lines, so the manifest stays correct when all other processes were killed. A line counts once its
file has its final name.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rayagi.run.atomic import lock_folder, replace_json
from rayagi.run.errors import DiskError, disk_errors
from rayagi.serving.column_layout import LAYOUT_VERSION, ColumnLayout
from rayagi.serving.errors import DatasetError
from rayagi.serving.program import FileFormat
from rayagi.serving.statistics import FileStatistics, merge_statistics

UNNAMED_TASK = "replay"
"""Task of datasets that are exported from other formats, which do not name theirs."""
_POLL_S = 0.05
_HINT = "free space there, or choose another folder with --out"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompleteFile:
    """A complete file of the dataset."""

    path: Path
    session: int
    gmi: int
    statistics: FileStatistics


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What dataset.json holds."""

    task: str
    format: FileFormat
    layout: ColumnLayout

    def to_dict(self) -> dict[str, Any]:
        """The JSON content of dataset.json."""
        stored = {"layout": LAYOUT_VERSION, "task": self.task, "format": self.format}
        return {**stored, **self.layout.to_dict()}


class DatasetFolder:
    """A dataset's folder. Open it with ``create`` or ``open``."""

    def __init__(self, path: Path, description: Description) -> None:
        self.path, self.description = path, description
        self._lock: int | None = None

    @classmethod
    def create(cls, path: Path, description: Description) -> DatasetFolder:
        """Create a dataset in a new or empty folder.

        Raises:
            DatasetError: the folder is not empty.
            DiskError: it cannot be created.
        """
        with disk_errors(path, _HINT):
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise DatasetError(str(path), _what_is_there(path))
            (path / "data").mkdir(parents=True, exist_ok=True)
        replace_json(path / "dataset.json", description.to_dict())
        return cls(path, description)

    @classmethod
    def open(cls, path: Path) -> DatasetFolder:
        """Open a dataset.

        Raises:
            DatasetError: there is no dataset, or its layout version differs.
        """
        try:
            stored = json.loads((path / "dataset.json").read_text())
        except FileNotFoundError:
            reason = "not a dataset: it has no dataset.json" if path.exists() else "there is no such folder"
            raise DatasetError(str(path), reason) from None
        except (OSError, ValueError) as error:
            raise DatasetError(str(path), f"dataset.json cannot be read ({error})") from error
        found = stored.get("layout") if isinstance(stored, dict) else None
        if found != LAYOUT_VERSION:
            raise DatasetError(
                str(path), f"has layout {found}; this version of rayagi reads {LAYOUT_VERSION}"
            )
        if stored.get("format") not in get_args(FileFormat):
            raise DatasetError(str(path), f"dataset.json is damaged (format {stored.get('format')!r})")
        try:
            layout = ColumnLayout.from_dict(stored)
            return cls(path, Description(task=stored["task"], format=stored["format"], layout=layout))
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(str(path), f"dataset.json is damaged ({error!r})") from error

    @property
    def data(self) -> Path:
        """Folder of the files, for pyarrow and other readers."""
        return self.path / "data"

    def lock(self, writers_s: float = 0.0) -> None:
        """Lock the dataset for this process; remove unfinished files of killed processes, and note how their sessions ended.

        Args:
            writers_s: how long to wait for writers of a killed process, which complete their files

        Raises:
            DatasetError: another process is serving into it, or a writer of a killed one still is.
        """
        descriptor = lock_folder(self.path, _HINT)
        if descriptor is None:
            raise DatasetError(str(self.path), "another process is serving into it; end it first")
        if not self.wait_for_writers(writers_s):
            os.close(descriptor)
            raise DatasetError(
                str(self.path), "writers of a process that was killed still complete their files; try again"
            )
        self._lock = descriptor
        for leftover in self.data.glob(".*.unfinished"):  # of killed writers
            leftover.unlink(missing_ok=True)
        self._end_killed_sessions()

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def being_written(self) -> Iterator[None]:
        """Hold the shared writers' lock while a writer runs; several may hold it."""
        with disk_errors(self.path, _HINT):
            descriptor = os.open(self.path / ".writers", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield
        finally:
            os.close(descriptor)

    def wait_for_writers(self, timeout_s: float) -> bool:
        """Wait until no writer runs on this host. False if one still runs after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        with disk_errors(self.path, _HINT):
            descriptor = os.open(self.path / ".writers", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= until:
                        return False
                    time.sleep(_POLL_S)
                else:
                    return True
        finally:
            os.close(descriptor)

    def list_file(self, name: str, *, session: int, gmi: int, statistics: FileStatistics) -> None:
        """Append a line to the manifest by one ``write``, since several writers append to it.

        Raises:
            DiskError: it cannot be written.
        """
        path = self.path / "manifest.jsonl"
        line = {"file": name, "session": session, "gmi": gmi, **statistics.to_dict()}
        # The leading line feed ends a partial line of another writer.
        content = f"\n{json.dumps(line)}\n".encode()
        with disk_errors(path, _HINT):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                written = os.write(descriptor, content)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if written < len(content):
            raise DiskError(str(path), "no space left on device", _HINT)

    def files(self) -> list[CompleteFile]:
        """The complete files, by session, GMI and number.

        Raises:
            DatasetError: one is missing. Only a writer's last may be: the writer was killed before it had its name.
        """
        try:
            lines = (self.path / "manifest.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        listed: dict[str, CompleteFile] = {}
        for line in lines:
            try:
                stored = json.loads(line)
                entry = CompleteFile(
                    path=self.data / stored["file"],
                    session=int(stored["session"]),
                    gmi=int(stored["gmi"]),
                    statistics=FileStatistics.from_dict(stored),
                )
            except (ValueError, KeyError, TypeError):
                continue  # a partial line
            listed[entry.path.name] = entry
        entries = [listed[name] for name in sorted(listed)]
        lasts = {(entry.session, entry.gmi): entry for entry in entries}
        found = []
        for entry in entries:
            if entry.path.exists():
                found.append(entry)
            elif entry is not lasts[entry.session, entry.gmi]:
                reason = f"data/{entry.path.name} is missing: copy the whole folder, or take its line out of manifest.jsonl"
                raise DatasetError(str(self.path), reason)
        return found

    def statistics(self) -> FileStatistics:
        """Merged statistics of all complete files."""
        return merge_statistics(file.statistics for file in self.files())

    def sessions(self) -> list[dict[str, Any]]:
        """Entries of provenance.json, one per session."""
        try:
            return list(json.loads((self.path / "provenance.json").read_text())["sessions"])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError) as error:
            raise DatasetError(str(self.path), f"provenance.json cannot be read ({error})") from error

    def write_session(self, session: int, about: Mapping[str, Any]) -> None:
        """Write a session's entry in provenance.json.

        Raises:
            DiskError: it cannot be written; the old file stays.
        """
        sessions = self.sessions()
        sessions[session:] = [dict(about)]
        replace_json(self.path / "provenance.json", {"sessions": sessions})

    def _end_killed_sessions(self) -> None:
        """Of sessions that nobody serves any more, the process could not write how they ended."""
        sessions = self.sessions()
        killed = [session for session in sessions if session.get("status") == "running"]
        for session in killed:
            session |= {"status": "failed", "reason": "its process was killed, or the disk was full"}
        if killed:
            replace_json(self.path / "provenance.json", {"sessions": sessions})

    def write_statistics(self) -> FileStatistics:
        """Rewrite statistics.json from the manifest.

        Raises:
            DiskError: it cannot be written; the manifest still has all its data.
        """
        whole = self.statistics()
        replace_json(self.path / "statistics.json", {"files": len(self.files()), **whole.summary()})
        return whole


def _what_is_there(path: Path) -> str:
    if (path / "dataset.json").exists():
        return "holds a dataset already; add to it with --append, or choose another folder with --out"
    return "exists already and is no dataset; choose another folder with --out"
