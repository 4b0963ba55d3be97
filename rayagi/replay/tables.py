"""Reads Parquet files with a row per step: LeRobot v3, and RLlib's recordings of steps.

Rows of a trajectory follow each other, and have its number in one column. Where no column has the next observation,
``trajectories.closed`` says what is done about the last step.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
from numpy.typing import NDArray

from placement.errors import counted
from rayagi.replay.arrow import as_array, shape_in
from rayagi.replay.trajectories import (
    FLAGS,
    Source,
    Trajectory,
    chosen_columns,
    closed_all,
    closed_lengths,
    further_columns,
    listed,
    make_schema,
)
from rayagi.serving.errors import DatasetError
from rayagi.serving.row_batches import row_batches

LEROBOT_NAMES = {
    "obs": "observation.state",
    "action": "action",
    "reward": "next.reward",
    "terminated": "next.done",
    "truncated": "next.truncated",
    "next_obs": "next.observation.state",
}
"""LeRobot's name of each of our columns; those that begin with next.obs or next.trunc are of rayagi's exports only."""
LEROBOT_INDEX = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Columns of every LeRobot dataset."""
RLLIB_NAMES = {
    "obs": "obs",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminateds",
    "truncated": "truncateds",
    "next_obs": "new_obs",
    "log_prob": "action_logp",
}
"""RLlib's name of each of our columns."""


def parquet_files(path: Path) -> list[Path]:
    """Parquet files of a folder and its folders, without hidden ones, in the order of ``by_numbers``; or the file itself."""
    if path.suffix == ".parquet" and path.is_file():
        return [path]
    found = list[Path]()
    for folder, folders, names in os.walk(path):  # passes over folders that vanish or cannot be read
        folders[:] = [name for name in folders if name[0] not in "._"]
        found += [Path(folder, name) for name in names if name.endswith(".parquet") and name[0] not in "._"]
    return sorted(found, key=by_numbers)


def by_numbers(path: Path) -> tuple[Any, ...]:
    """Key to sort names with their numbers as numbers: part-2 before part-10."""
    parts = [re.split(r"(\d+)", part) for part in path.parts]
    return [[int(text) if at % 2 else text for at, text in enumerate(part)] for part in parts], str(path)


def open_lerobot(path: Path, columns: Sequence[str]) -> Source:
    """A LeRobot v3 dataset. ``next.done`` counts as terminated. Images and videos are left out.

    Raises:
        DatasetError: it is of another version, its frames do not follow each other, or as of ``_row_source``.
    """
    info = json.loads((path / "meta" / "info.json").read_text())
    version = str(info.get("codebase_version"))
    if not version.startswith("v3."):
        raise DatasetError(
            str(path), f"has LeRobot's version {version}, where v3.0 is read: convert it with lerobot"
        )
    shapes = {
        name: () if tuple(feature["shape"]) == (1,) else tuple(feature["shape"])
        for name, feature in info["features"].items()
        if feature["dtype"] not in ("image", "video", "string")
    }
    images = tuple(
        name for name, feature in info["features"].items() if feature["dtype"] in ("image", "video")
    )
    names = {ours: theirs for ours, theirs in LEROBOT_NAMES.items() if theirs in shapes}
    for theirs in ("observation.state", "next.observation.state", "action"):
        # Vectors of size 1 stay vectors, but for one discrete action.
        if theirs in shapes and info["features"][theirs]["dtype"].startswith("float"):
            shapes[theirs] = tuple(info["features"][theirs]["shape"])
    others = {name: name for name in shapes if name not in (*names.values(), *LEROBOT_INDEX)}
    files = parquet_files(path / "data")
    frames = sum(pyarrow.parquet.read_metadata(file).num_rows for file in files)
    if frames != (announced := info.get("total_frames", frames)):
        reason = f"has {counted(frames, 'frame')} where info.json says {announced:,}: is a file missing?"
        raise DatasetError(str(path), reason)
    _check_frames(path, files)
    return _row_source(path, "lerobot", files, "episode_index", names, others, columns, shapes, images)


def _check_frames(path: Path, files: Sequence[Path]) -> None:
    """Refuse frames that do not follow each other: those of an episode lie together, and count from 0."""
    if not files:
        return
    rows = pyarrow.dataset.dataset(files, format="parquet")
    if "frame_index" not in rows.schema.names:
        return
    last_episode, last_frame, first_row = -1, -1, 0
    for batch in row_batches(rows, ["episode_index", "frame_index"]):
        episodes, frames = (_values(batch, name, ()).reshape(-1) for name in ("episode_index", "frame_index"))
        follows = np.append(last_episode, episodes[:-1]) == episodes
        expected = np.where(follows, np.append(last_frame, frames[:-1]) + 1, 0)
        for row in np.flatnonzero(frames != expected)[:1].tolist():
            reason = (
                f"row {first_row + row:,} is frame {frames[row]} of episode {episodes[row]} where frame {expected[row]} is "
                "expected: the frames of an episode follow each other"
            )
            raise DatasetError(str(path), reason)
        if len(frames):
            last_episode, last_frame, first_row = episodes[-1], frames[-1], first_row + len(frames)


def open_steps(path: Path, columns: Sequence[str]) -> Source:
    """Steps that RLlib recorded (without ``output_write_episodes``). Raises DatasetError: as of ``_row_source``."""
    files = parquet_files(path)
    fields = pyarrow.dataset.dataset(files, format="parquet").schema
    names = {ours: theirs for ours, theirs in RLLIB_NAMES.items() if theirs in fields.names}
    others = {
        name: name
        for name in fields.names
        if name not in (*names.values(), "eps_id", "agent_id", "module_id")
    }
    if "eps_id" not in fields.names:
        reason = (
            "is read as steps that RLlib recorded, and has no column 'eps_id', the number of each step's trajectory: name "
            f"yours so, and the others {', '.join(RLLIB_NAMES.values())}; its columns are {listed(fields.names)}"
        )
        raise DatasetError(str(path), reason)
    shapes = {field.name: shape_in(field) for field in fields}
    return _row_source(path, "rllib steps", files, "eps_id", names, others, columns, shapes, ())


def _row_source(
    path: Path,
    kind: str,
    files: Sequence[Path],
    key: str,
    own: Mapping[str, str],
    further: Mapping[str, str],
    wanted: Sequence[str],
    shapes: Mapping[str, tuple[int, ...] | None],
    left_out: tuple[str, ...],
) -> Source:
    """A source of rows in files.

    Args:
        key: column with the trajectory's number
        own: the files' name of each of the format's own columns
        further: and of further ones
        wanted: columns beyond the usual ones
        shapes: of one step by the files' names; None: as the lists are nested

    Raises:
        DatasetError: a column is missing or not of numbers, or there is no whole step.
    """
    if not files:
        raise DatasetError(str(path), "is empty: it has no Parquet files")
    rows = pyarrow.dataset.dataset(files, format="parquet")
    names = {**own, **further_columns(own, further)}
    known = dict.fromkeys([*names, *FLAGS])
    known.pop("next_obs", None)
    ours, others = chosen_columns(path, known, wanted, LEROBOT_NAMES if kind == "lerobot" else RLLIB_NAMES)
    read_names = {name: names[name] for name in (*ours, "next_obs") if name in names}
    flags = {name: names[name] for name in FLAGS if name in names}
    lengths = _lengths(rows, key, flags, "next_obs" in names)
    batches = row_batches(rows, list(read_names.values()), most_rows=1)
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        raise DatasetError(str(path), "is empty: it has no rows")
    kinds: dict[str, tuple[Any, tuple[int, ...]]] = dict.fromkeys(FLAGS, (bool, ()))
    for name in (name for name in ours if name not in FLAGS):
        values = _values(first, names[name], shapes.get(names[name]))
        kinds[name] = (values.dtype, values.shape[1:])

    def episodes() -> Iterator[Trajectory]:
        parts: list[Trajectory] = []
        for part, is_last in _runs(rows, key, read_names, flags, shapes):
            parts.append(part)
            if is_last:
                yield {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}
                parts = []

    schema = make_schema(path, {name: kinds[name] for name in ours}, int(lengths.max(initial=0)))
    return Source(
        path=path,
        kind=kind,
        schema=schema,
        lengths=lengths,
        begin=lambda: closed_all(episodes()),
        left_out=others + left_out,
    )


def _lengths(
    rows: pyarrow.dataset.Dataset, key: str, flags: Mapping[str, str], has_next: bool
) -> NDArray[np.int64]:
    """Steps of each trajectory, from its number and flags."""
    lengths, is_known, running = list[int](), list[bool](), 0
    for part, is_last in _runs(rows, key, {}, flags, {}):
        running += len(part["terminated"])
        if is_last:
            lengths.append(running)
            is_known.append(has_next or bool(part["terminated"][-1:].any()))
            running = 0
    return closed_lengths(np.array(lengths, np.int64), np.array(is_known, bool))


def _runs(
    rows: pyarrow.dataset.Dataset,
    key: str,
    names: Mapping[str, str],
    flags: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...] | None],
) -> Iterator[tuple[Trajectory, bool]]:
    """Rows of one trajectory, flags included, and whether they are its last. A run may have no rows, but an end."""
    columns = list(dict.fromkeys([key, *flags.values(), *names.values()]))
    last_key: Any = None
    is_open = False
    empty: Trajectory | None = None
    for batch in row_batches(rows, columns):
        if not batch.num_rows:
            continue
        found = {name: _values(batch, theirs, shapes.get(theirs)) for name, theirs in names.items()}
        for name in FLAGS:
            found[name] = _flag(batch, flags[name]) if name in flags else np.zeros(batch.num_rows, bool)
        empty = {name: values[:0] for name, values in found.items()}
        numbers = np.array(batch.column(key).to_pylist())
        if batch.column(key).null_count or (numbers != numbers).any():  # NaN differs from itself
            raise ValueError(f"{key} is null or NaN: it is the number of each row's trajectory")
        if is_open and numbers[0] != last_key:
            yield empty, True
        ends = np.append(numbers[1:] != numbers[:-1], False) | found["terminated"] | found["truncated"]
        begin = 0
        for end in [*(np.flatnonzero(ends) + 1).tolist(), batch.num_rows]:
            if end > begin:
                is_last = bool(ends[end - 1])
                yield {name: values[begin:end] for name, values in found.items()}, is_last
            begin = end
        last_key, is_open = numbers[-1], not ends[-1]
    if is_open and empty is not None:
        yield empty, True


def _values(batch: pa.RecordBatch, name: str, shape: tuple[int, ...] | None) -> NDArray[Any]:
    """As of ``as_array``, whose errors do not name the column."""
    try:
        return as_array(batch.column(name), shape)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error


def _flag(batch: pa.RecordBatch, name: str) -> NDArray[np.bool_]:
    values = _values(batch, name, ()).reshape(batch.num_rows)
    if not np.isin(values, (0, 1)).all():
        raise ValueError(f"{name} has values other than 0 and 1")
    return values.astype(bool)
