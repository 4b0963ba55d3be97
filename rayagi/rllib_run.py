"""The run folder in an Algorithm's checkpoint: `rayagi evaluate`, `report`, `serve` and `train --resume` take it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.fs
import yaml

from actors.protocols import EnvInfo
from placement.plan import PlacementPlan
from rayagi.config.convert import run_spec_to_dict
from rayagi.config.spec import RunSpec
from rayagi.monitoring.catalogue import reward_column
from rayagi.run.atomic import replace_json, replace_text, replacing_run
from rayagi.run.csv_log import cell_text
from rayagi.run.errors import RunFolderError, disk_errors
from rayagi.run.folder import SCHEMA_VERSION, RunFolder, RunRecord
from rayagi.run.trained_env import env_to_dict
from rayagi.run.versions import collect_versions, rayagi_version

_logger = logging.getLogger(__name__)


class CsvText:
    """Rows of a CSV file, kept in memory as text: they belong to every checkpoint."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns, self._lines = tuple(columns), list[str]()

    def add(self, row: Mapping[str, float | None]) -> None:
        """Add a row. Reward terms become columns when they first appear."""
        new = [name for name in row if name.startswith(reward_column("")) and name not in self._columns]
        if new:
            self._columns += tuple(new)
            self._lines = [line + "," * len(new) for line in self._lines]
        self._lines.append(",".join(cell_text(row.get(column)) for column in self._columns))

    def text(self) -> str:
        """The whole file."""
        return "\n".join([",".join(self._columns), *self._lines]) + "\n"

    def load(self, text: str) -> None:
        """Inverse of ``text``."""
        header, *self._lines = text.splitlines()
        self._columns = tuple(header.split(","))


@contextmanager
def replaced_checkpoint(path: str, filesystem: pyarrow.fs.FileSystem) -> Iterator[Path]:
    """A temporary folder, whose files go into a checkpoint's folder when the block succeeds.

    On a local file system as ``replacing_run``; else each replaces the one of before as that file system can. Then the
    checkpoints of before are removed.

    Raises:
        DiskError: it cannot be written.
        RunFolderError: the folder is none of a checkpoint, and has files of the same names.
    """
    with disk_errors(path, "free space there, or save to another folder"):
        if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            with replacing_run(Path(path).absolute()) as folder:
                yield folder
                _refuse_others_files(path, folder, filesystem)
            return
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
            _refuse_others_files(path, Path(name), filesystem)
            written = {each.name for each in Path(name).glob("checkpoints/*")}
            filesystem.create_dir(path)
            local = pyarrow.fs.LocalFileSystem()
            pyarrow.fs.copy_files(name, path, source_filesystem=local, destination_filesystem=filesystem)
            _remove_others(f"{path}/checkpoints", written, filesystem)


def _refuse_others_files(path: str, new: Path, filesystem: pyarrow.fs.FileSystem) -> None:
    """Raise RunFolderError: a folder that is none of a checkpoint has entries that a new one would replace."""

    def those_of(names: Collection[str]) -> list[str]:
        infos = filesystem.get_file_info([f"{path}/{name}" for name in sorted(names)])
        return [info.base_name for info in infos if info.type != pyarrow.fs.FileType.NotFound]

    if not those_of(_MARKS) and (found := those_of({entry.name for entry in new.iterdir()})):
        reason = (
            f"has {', '.join(found)}, which a checkpoint would replace, and is none: save to another folder"
        )
        raise RunFolderError(path, reason)


_MARKS = ("run.json", "rllib_checkpoint.json")
"""Files of which a checkpoint's folder has one at least: without YAML for its settings it is no run folder."""


def _remove_others(folder: str, kept: Collection[str], filesystem: pyarrow.fs.FileSystem) -> None:
    """Remove what a folder has besides some names."""
    for entry in filesystem.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True)):
        if entry.base_name not in kept:
            is_folder = entry.type == pyarrow.fs.FileType.Directory
            (filesystem.delete_dir if is_folder else filesystem.delete_file)(entry.path)


def write_run(
    path: Path,
    spec: RunSpec,
    info: EnvInfo,
    plan: PlacementPlan,
    state: Mapping[str, Any],
    counters: Mapping[str, Any],
    tables: Mapping[str, str],
) -> None:
    """Write a run folder with one checkpoint.

    Args:
        path: a folder without a run
        spec: of the run
        info: of its environment
        plan: of the session
        state: of the session, ``{"shared", "local", "num_gmis"}``
        counters: of rayagi.run.training_loop
        tables: content of files by name, such as progress.csv

    Raises:
        DiskError: a file cannot be written.
    """
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        rayagi_version=rayagi_version(),
        task=spec.env.id,
        seed=spec.seed,
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        status="finished",
        reason="a checkpoint of RLlib's Algorithm",
        counters={name: counters[name] for name in ("iteration", "env_steps", "train_s", "best_return")},
        environment=env_to_dict(info),
    )
    folder = RunFolder(path, record)
    try:
        folder.write_config(run_spec_to_dict(spec))
    except yaml.YAMLError as error:
        _logger.warning("the checkpoint is no run folder: YAML cannot hold its settings (%s)", error)
        return
    replace_text(path / "plan.txt", plan.table() + "\n")
    replace_json(path / "plan.json", plan.to_dict())
    replace_json(path / "versions.json", _versions())
    for name, text in tables.items():
        replace_text(path / name, text)
    folder.checkpoints.save(state, counters)
    folder.update()


@cache
def _versions() -> dict[str, str | int | None]:
    return collect_versions()
