"""The run folder: all files of a run, from which other commands resume, evaluate or serve it.

config.yaml plan.txt plan.json versions.json    settings, plan, versions and machine
run.json                                        layout version, status, seed, limits, counters
progress.csv evaluations.csv tensorboard/       metrics, by iteration
checkpoints/                                    see rayagi.run.checkpoints
report.html *.png                               see rayagi.monitoring.report
notices.log                                     notices of the health monitor, and what followed
error.log                                       traceback of an unexpected error
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from rayagi.config.convert import run_spec_from_dict
from rayagi.config.errors import ConfigError
from rayagi.config.spec import RunSpec
from rayagi.config.trusted_modules import refuse_untrusted_modules
from rayagi.config.yaml_text import parse_yaml
from rayagi.run.atomic import complete_run, is_special, lock_folder, new_folder, replace_json, replace_text
from rayagi.run.checkpoints import CheckpointStore
from rayagi.run.errors import DiskError, RunFolderError, RunVersionError, disk_errors

_logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
"""Layout version of the run folder; increased when older folders cannot be read."""

Status = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Content of run.json."""

    schema_version: int
    rayagi_version: str
    task: str
    seed: int
    created: str
    status: Status = "running"
    reason: str = ""
    """Why the run ended; empty while it runs."""
    limits: dict[str, Any] = field(default_factory=dict)
    checkpoint_every: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    """Counters of the last checkpoint: iteration, env_steps, train_s."""
    init: str = ""
    """Run whose networks it began with; empty: none."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Sizes and actions of its environment (rayagi.run.trained_env); empty: they were not kept."""


class RunFolder:
    """One run's files. Open it with ``create_run`` or ``open_run``."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path, self.record = path, record
        self.checkpoints = CheckpointStore(path / "checkpoints")
        self._lock: int | None = None

    @property
    def progress_csv(self) -> Path:
        """One row per iteration."""
        return self.path / "progress.csv"

    @property
    def evaluations_csv(self) -> Path:
        """One row per evaluation."""
        return self.path / "evaluations.csv"

    def lock(self) -> None:
        """Lock the folder until ``unlock`` or the end of this process.

        Raises:
            RunFolderError: another process is training this run.
            DiskError: the folder is not writable, or its file system has no locks.
        """
        descriptor = lock_folder(self.path)
        if descriptor is None:
            raise RunFolderError(str(self.path), "another process is training this run; end it first")
        self._lock = descriptor

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def is_locked(self) -> bool:
        """Whether a process is training this run."""
        if self._lock is not None:
            return True
        try:
            self._lock = lock_folder(self.path)
        except DiskError:
            return False  # not writable, so no process trains here
        is_locked = self._lock is None
        self.unlock()
        return is_locked

    def update(self, **changes: Any) -> None:
        """Replace fields of run.json.

        Raises:
            DiskError: the disk is full or read-only; the old run.json stays.
        """
        record = replace(self.record, **changes)
        replace_json(self.path / "run.json", asdict(record))
        self.record = record

    def note(self, text: str) -> None:
        """Append a line with the time to notices.log.

        Raises:
            DiskError: it cannot be written.
        """
        path = self.path / "notices.log"
        with disk_errors(path), path.open("a") as log:
            log.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')}  {text}\n")

    def write_config(self, config: dict[str, Any]) -> None:
        """Write config.yaml."""
        replace_text(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False))

    def read_config(self) -> dict[str, Any]:
        """Read config.yaml.

        Raises:
            RunFolderError: it is missing or not a YAML mapping.
        """
        try:
            config = parse_yaml((self.path / "config.yaml").read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RunFolderError(str(self.path), f"config.yaml cannot be read ({error})") from error
        if not isinstance(config, dict):
            raise RunFolderError(str(self.path), "config.yaml is not a mapping")
        return config

    def read_spec(self, *, trust_modules: bool) -> RunSpec:
        """The settings of config.yaml.

        Args:
            trust_modules: whether it may name code outside of the working project (rayagi.config.trusted_modules)

        Raises:
            RunFolderError: as ``read_config``.
            ConfigError: a setting is invalid, or names code that is not trusted.
        """
        file, stored = self.path / "config.yaml", self.read_config()
        try:
            spec = run_spec_from_dict(stored)
            if not trust_modules:
                refuse_untrusted_modules(spec, file)
        except ConfigError as error:
            raise error.at(f"{file}: {error.path}") from error
        return spec


def create_run(
    out: Path,
    task: str,
    *,
    seed: int,
    rayagi_version: str,
    name: str | None = None,
    init: str = "",
    environment: Mapping[str, Any] | None = None,
) -> RunFolder:
    """Create a run folder, ``<out>/<task>-<date>-<time>`` or ``<out>/<name>``, and lock it. Arguments as of RunRecord.

    Raises:
        DiskError: the folder cannot be created.
        RunFolderError: a folder of the given name exists.
    """
    now = datetime.now().astimezone()
    named = re.sub(r"[^A-Za-z0-9_.-]+", "_", task).strip("._") or "run"
    path = out / (name or f"{named}-{now:%Y%m%d-%H%M%S}")
    with disk_errors(path, "free space there, or choose another folder with --out"):
        out.mkdir(parents=True, exist_ok=True)
        if name is None:
            path = new_folder(path)
        else:
            try:
                path.mkdir()
            except FileExistsError:
                reason = "exists already; choose another --name, or continue with --resume"
                raise RunFolderError(str(path), reason) from None
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        rayagi_version=rayagi_version,
        task=task,
        seed=seed,
        created=now.isoformat(timespec="seconds"),
        init=init,
        environment=dict(environment or {}),
    )
    folder = RunFolder(path, record)
    try:
        folder.lock()
        with disk_errors(path):
            (path / "checkpoints").mkdir()
        folder.update()
    except DiskError:
        folder.unlock()
        shutil.rmtree(path, ignore_errors=True)
        raise
    return folder


def open_run(path: Path) -> RunFolder:
    """Open an existing run folder, without locking it.

    Raises:
        RunFolderError: there is no run folder, or it is damaged.
        RunVersionError: it has another layout version.
        DiskError: as ``complete_interrupted_save``.
    """
    if not path.is_dir():
        raise RunFolderError(str(path), f"there is no such run folder{_runs_nearby(path.parent)}")
    complete_interrupted_save(path)
    for entry in (*path.iterdir(), *(path / "checkpoints").glob("*")):
        if is_special(entry):
            raise RunFolderError(
                str(entry), "is a pipe, a device or a socket, whose reader may wait forever: remove it"
            )
    try:
        stored = json.loads((path / "run.json").read_text())
    except FileNotFoundError:
        raise RunFolderError(str(path), f"not a run folder: it has no run.json{_runs_nearby(path)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(str(path), f"run.json cannot be read ({error})") from error
    if not isinstance(stored, dict):
        raise RunFolderError(str(path), "run.json is damaged: it has no object; restore it from a copy")
    found = stored.get("schema_version", "none")
    if found != SCHEMA_VERSION:
        raise RunVersionError(str(path), found, SCHEMA_VERSION, stored.get("rayagi_version", "unknown"))
    try:
        return RunFolder(path, RunRecord(**stored))
    except TypeError as error:
        raise RunFolderError(str(path), f"run.json is damaged ({error})") from error


def complete_interrupted_save(path: Path) -> None:
    """Complete the last save of an Algorithm's checkpoint if its process was killed while it replaced the one before.

    Raises:
        DiskError: the folder cannot be written.
    """
    with disk_errors(path, "the last save there was interrupted and has to be completed: make it writable"):
        if complete_run(path):
            _logger.warning(
                "%s: the last save was interrupted while it replaced files; it is complete now", path
            )


def _runs_nearby(folder: Path) -> str:
    if not folder.is_dir():
        return ""
    runs = sorted(entry.parent for entry in folder.glob("*/run.json"))[-3:]
    return f"; runs there: {', '.join(str(run) for run in runs)}" if runs else ""
