"""Writes Parquet with a row per step: datasets as of ``rayagi serve``, and LeRobot v3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from actors.protocols import ActionSpec
from rayagi.replay.tables import LEROBOT_INDEX, LEROBOT_NAMES
from rayagi.replay.trajectories import FLAGS, Source, TrajectoryBatch, check_kept, num_choices
from rayagi.serving.column_layout import ColumnLayout, EndedEpisode
from rayagi.serving.errors import ExportError
from rayagi.serving.files import RotatingFiles, finished_folder
from rayagi.serving.manifest import UNNAMED_TASK, DatasetFolder, Description

_ROWS_PER_FILE, _BYTES_PER_FILE = 2**20, 256 * 2**20
_FPS = 30
"""LeRobot needs a rate, which replays do not have."""
_TASK = "replay"
_GROUP_ROWS = 8192


def write_served(
    source: Source,
    out: Path,
    batches: Iterator[TrajectoryBatch],
    file_format: Literal["parquet", "arrow"] = "parquet",
) -> None:
    """Write a dataset as ``rayagi serve`` does. Floats of 64 bits become float32; the ranges of actions are not known.

    Raises:
        ExportError: the folder exists, columns are not those of such a dataset, or a choice is below 0.
        DiskError: it cannot be written; nothing of it is left.
    """
    layout = _layout(source)
    with finished_folder(out) as unfinished:
        folder = DatasetFolder.create(
            unfinished, Description(task=UNNAMED_TASK, format=file_format, layout=layout)
        )
        files = RotatingFiles(
            folder.data,
            "s000-g000",
            file_format,
            layout.arrow({"task": UNNAMED_TASK}),
            rows_per_file=_ROWS_PER_FILE,
            bytes_per_file=_BYTES_PER_FILE,
            complete=lambda name, statistics: folder.list_file(name, session=0, gmi=0, statistics=statistics),
        )
        count = 0
        for batch in batches:
            files.write(_served_rows(source.path, batch, count, layout), _ended(batch, count))
            count += len(batch.lengths)
        files.close()
        folder.write_statistics()


def _layout(source: Source) -> ColumnLayout:
    columns = {column.name: column for column in source.schema.columns}
    path = str(source.path)
    check_kept(source, "a dataset of rayagi serve")
    if "reward" not in columns:
        raise ExportError(path, "has no rewards, which a dataset of rayagi serve has: export it to lerobot")
    if "obs" not in columns or len(columns["obs"].shape) != 1 or columns["obs"].dtype.kind != "f":
        raise ExportError(path, "has observations that are no vectors of floats: export it to minari")
    action = columns["action"]
    if action.dtype.kind == "f" and len(action.shape) == 1:
        dim = action.shape[0]
        spec = ActionSpec(kind="continuous", dim=dim, low=(-np.inf,) * dim, high=(np.inf,) * dim)
    elif action.dtype.kind in "iu" and not action.shape:
        spec = ActionSpec(kind="discrete", dim=1, num_choices=num_choices(source))
    else:
        raise ExportError(
            path, f"has actions ({action}) that a dataset of rayagi serve does not have: use minari"
        )
    return ColumnLayout(obs_dim=columns["obs"].shape[0], action=spec)


def _ended(batch: TrajectoryBatch, first: int) -> list[EndedEpisode]:
    """Episodes that were not cut; ``first``: number of the batch's first."""
    lasts, totals = batch.lasts, batch.returns()
    is_ended = batch.columns["terminated"][lasts] | batch.columns["truncated"][lasts]
    return [
        EndedEpisode(number=first + own, total=float(totals[own]), length=int(batch.lengths[own]))
        for own in np.flatnonzero(is_ended).tolist()
    ]


def _served_rows(path: Path, batch: TrajectoryBatch, first: int, layout: ColumnLayout) -> pa.RecordBatch:
    steps, schema, given = batch.num_steps, layout.arrow({}), batch.columns
    action = given["action"].astype(np.int64 if layout.action.is_discrete else np.float32)
    versions = given.get("policy_version", np.zeros(steps, int))
    if not (np.isfinite(versions) & (versions == np.floor(versions))).all():
        raise ExportError(str(path), "has policy_version other than whole numbers: export it to lerobot")
    found = {
        "episode": first + batch.owners,
        "step": batch.times,
        **dict.fromkeys(("env", "gmi", "session"), np.zeros(steps, int)),
        "policy_version": versions.astype(np.int64),
        "obs": _lists(batch.shifted("obs").astype(np.float32)),
        "action": _lists(action),
        "reward": given["reward"].astype(np.float32),
        "terminated": given["terminated"],
        "truncated": given["truncated"],
        "log_prob": given["log_prob"].astype(np.float32)
        if "log_prob" in given
        else pa.nulls(steps, pa.float32()),
        "final_obs": _final_obs(batch),
    }
    columns = [
        found[field.name]
        if isinstance(found[field.name], pa.Array)
        else pa.array(found[field.name]).cast(field.type)
        for field in schema
    ]
    return pa.record_batch(columns, schema=schema)


def _final_obs(batch: TrajectoryBatch) -> pa.Array:
    """The observation after each episode's last step; null for the other steps."""
    obs = batch.shifted("obs", 1)[batch.lasts].astype(np.float32)
    is_last = np.zeros(batch.num_steps, bool)
    is_last[batch.lasts] = True
    ends = np.append(0, np.cumsum(is_last) * obs.shape[1]).astype(np.int32)
    return pa.ListArray.from_arrays(ends, obs.reshape(-1), mask=pa.array(~is_last))


def _lists(values: NDArray[Any]) -> pa.Array:
    """(rows, dim) as fixed-size lists, (rows,) as numbers."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def write_lerobot(source: Source, out: Path, batches: Iterator[TrajectoryBatch]) -> None:
    """Write LeRobot v3: each step a frame of one task, at a nominal rate. Arguments and errors as of ``write_served``.

    ``next.truncated`` and ``next.observation.state`` are rayagi's own features.
    """
    features = _features(source)
    with finished_folder(out) as folder:
        files = _FrameFiles(folder)
        try:
            statistics = {name: _Range() for name in features if name not in FLAGS}
            for batch in batches:
                frames = _frames(batch, len(files.episodes), files.num_frames)
                for name, values in frames.items():
                    statistics[name].add(values)
                files.write(frames, batch.lengths)
            files.close()
        except BaseException:
            files.discard()
            raise
        _write_meta(folder, features, files, {name: each.to_json() for name, each in statistics.items()})


def _features(source: Source) -> dict[str, Any]:
    theirs_only = {*LEROBOT_NAMES.values(), "next_obs", *LEROBOT_INDEX} - {"action"}
    if taken := [column.name for column in source.schema.columns if column.name in theirs_only]:
        reason = (
            f"has the columns {', '.join(taken)}, names that LeRobot has for its own: export it to minari"
        )
        raise ExportError(str(source.path), reason)
    found: dict[str, Any] = {}
    for column in source.schema.columns:
        if len(column.shape) > 1 or column.name.startswith("obs."):
            raise ExportError(
                str(source.path), f"has {column}, where LeRobot's tables have vectors: export it to minari"
            )
        theirs = LEROBOT_NAMES.get(column.name, column.name)
        found[theirs] = {"dtype": column.dtype.name, "shape": list(column.shape or (1,)), "names": None}
    found[LEROBOT_NAMES["next_obs"]] = dict(found[LEROBOT_NAMES["obs"]])
    for name in LEROBOT_INDEX:
        found[name] = {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None}
    return found


def _frames(batch: TrajectoryBatch, first_episode: int, first_frame: int) -> dict[str, NDArray[Any]]:
    """Columns of trajectories' frames by LeRobot's names, (steps, ...)."""
    steps, times = batch.num_steps, batch.times
    ours = {**batch.columns, "obs": batch.shifted("obs"), "next_obs": batch.shifted("obs", 1)}
    frames = {LEROBOT_NAMES.get(name, name): values for name, values in ours.items()}
    return frames | {
        "timestamp": (times / _FPS).astype(np.float32),
        "frame_index": times,
        "episode_index": first_episode + batch.owners,
        "index": first_frame + np.arange(steps),
        "task_index": np.zeros(steps, np.int64),
    }


class _FrameFiles:
    """The Parquet files of frames, each of whole episodes, and the table of episodes."""

    def __init__(self, folder: Path) -> None:
        self.num_frames = 0
        self.episodes: list[dict[str, Any]] = []
        self._folder, self._file, self._bytes = folder / "data" / "chunk-000", 0, 0
        self._writer: Any = None
        self._waiting: list[pa.Table] = []
        self._folder.mkdir(parents=True)

    def write(self, frames: dict[str, NDArray[Any]], lengths: NDArray[np.int64]) -> None:
        """Add episodes of so many frames."""
        # LeRobot stores vectors of size 1 as numbers.
        columns = {
            name: values.reshape(-1) if values[0].size == 1 else values for name, values in frames.items()
        }
        table = pa.table({name: _lists(values) for name, values in columns.items()})
        for length in lengths.tolist():
            self.episodes.append(
                {
                    "episode_index": len(self.episodes),
                    "tasks": [_TASK],
                    "length": length,
                    "data/chunk_index": 0,
                    "data/file_index": self._file,
                    "dataset_from_index": self.num_frames,
                    "dataset_to_index": self.num_frames + length,
                    "meta/episodes/chunk_index": 0,
                    "meta/episodes/file_index": 0,
                }
            )
            self.num_frames += length
        self._waiting.append(table)
        self._bytes += table.nbytes
        if sum(each.num_rows for each in self._waiting) >= _GROUP_ROWS:
            self._flush()
        if self._bytes >= _BYTES_PER_FILE:
            self.close()
            self._file, self._bytes = self._file + 1, 0

    def close(self) -> None:
        """Complete the current file."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def discard(self) -> None:
        """Close the current file, incomplete as it is."""
        with suppress(Exception):  # fails if the file failed
            if self._writer is not None:
                self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            table = pa.concat_tables(self._waiting)
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._folder / f"file-{self._file:03d}.parquet", table.schema)
            self._writer.write_table(table, row_group_size=_GROUP_ROWS)
            self._waiting.clear()


class _Range:
    """Minimum, maximum, mean and standard deviation of a feature's elements."""

    def __init__(self) -> None:
        self._count, self._total, self._squares = 0, np.float64(0), np.float64(0)
        self._min, self._max = np.inf, -np.inf

    def add(self, values: NDArray[Any]) -> None:
        """Add rows, (n, ...)."""
        rows = values.reshape(len(values), -1).astype(np.float64)
        self._count += len(rows)
        self._total, self._squares = self._total + rows.sum(0), self._squares + (rows**2).sum(0)
        self._min, self._max = np.minimum(self._min, rows.min(0)), np.maximum(self._max, rows.max(0))

    def to_json(self) -> dict[str, Any]:
        """As LeRobot's stats.json has it."""
        mean = self._total / max(1, self._count)
        variance = np.maximum(self._squares / max(1, self._count) - mean**2, 0)
        found = {"min": self._min, "max": self._max, "mean": mean, "std": np.sqrt(variance)}
        return {
            **{name: np.asarray(values).tolist() for name, values in found.items()},
            "count": [self._count],
        }


def _write_meta(
    folder: Path, features: dict[str, Any], files: _FrameFiles, statistics: dict[str, Any]
) -> None:
    meta = folder / "meta"
    (meta / "episodes" / "chunk-000").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(files.episodes), meta / "episodes" / "chunk-000" / "file-000.parquet")
    pandas.DataFrame({"task_index": [0]}, index=[_TASK]).to_parquet(meta / "tasks.parquet")
    count = len(files.episodes)
    info = {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": count,
        "total_frames": files.num_frames,
        "total_tasks": 1,
        "chunks_size": 1000,
        "data_files_size_in_mb": _BYTES_PER_FILE // 2**20,
        "video_files_size_in_mb": 200,
        "fps": _FPS,
        "splits": {"train": f"0:{count}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "features": features,
    }
    (meta / "info.json").write_text(json.dumps(info, indent=2))
    (meta / "stats.json").write_text(json.dumps(statistics))
