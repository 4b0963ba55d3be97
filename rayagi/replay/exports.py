"""Writes trajectories in the formats that ``loading`` reads. Each output appears when it is complete, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rayagi.replay.episode_files import write_minari, write_rllib
from rayagi.replay.flat_files import write_d4rl, write_tensors
from rayagi.replay.table_files import write_lerobot, write_served
from rayagi.replay.trajectories import FLAGS, Progress, Source, TrajectoryBatch, is_obs, split_at_flags
from rayagi.serving.errors import ExportError

_WRITERS: dict[str, Callable[[Source, Path, Iterator[TrajectoryBatch]], None]] = {
    "rayagi": write_served,
    "rayagi-arrow": partial(write_served, file_format="arrow"),
    "minari": write_minari,
    "minari-hdf5": partial(write_minari, data_format="hdf5"),
    "lerobot": write_lerobot,
    "rllib": write_rllib,
    "d4rl": write_d4rl,
    "torch": write_tensors,
}
EXPORTS = tuple(_WRITERS)
"""Formats of ``export``."""
_SUFFIXES = {"d4rl": (".hdf5", ".h5"), "torch": (".pt", ".pth")}
"""Of formats that are one file; readers know them by it."""
_WITHOUT_FLAGS = ("lerobot", "d4rl", "torch")
"""Formats that can do without terminated and truncated, which the transitions of DQN and SAC do not have."""


def export(source: Source, out: Path | str, to: str, progress: Progress | None = None) -> int:
    """Write a source's trajectories, split behind steps that terminate or are truncated. Returns how many.

    Args:
        source: of ``open_source`` or ``saved.store_source``
        out: file (d4rl, torch) or folder to create
        to: one of ``EXPORTS``
        progress: called after each batch of trajectories

    Raises:
        ExportError: ``out`` exists or has another suffix, the format cannot have such columns, or its library is not
            installed.
        DatasetError: as of ``Source.read``.
        DiskError: it cannot be written; nothing of it is left.
    """
    out = Path(out)
    _check_columns(source, to)
    if to in _SUFFIXES and out.suffix not in _SUFFIXES[to]:
        reason = f"{to} is read from files {' or '.join(_SUFFIXES[to])}: name it {out.name}{_SUFFIXES[to][0]}"
        raise ExportError(str(out), reason)
    count = steps = 0

    def counted() -> Iterator[TrajectoryBatch]:
        nonlocal count, steps
        for batch in map(split_at_flags, source.batches()):
            yield batch
            count, steps = count + len(batch.lengths), steps + batch.num_steps
            if progress is not None:
                progress(steps, source.num_steps)

    _WRITERS[to](source, out, counted())
    return count


def _check_columns(source: Source, to: str) -> None:
    """Refuse columns of a user's own store that are not as ``trajectories`` has them."""
    columns = {column.name: column for column in source.schema.columns}
    flags = () if to in _WITHOUT_FLAGS else FLAGS
    required = [*(() if any(map(is_obs, columns)) else ("obs",)), "action", *flags]
    wrong = [f"{to} needs a column {name}" for name in required if name not in columns]
    for name, column in columns.items():
        if column.extra != is_obs(name):
            wrong.append(f"{name} has extra={column.extra} where {int(is_obs(name))} is needed")
        if name in ("reward", *FLAGS) and column.shape:
            wrong.append(f"{name} has shape {list(column.shape)} where one number a step is needed")
        if name in FLAGS and column.dtype != bool:
            wrong.append(f"{name} is of {column.dtype} where bool is needed")
    if wrong:
        reason = (
            f"cannot be exported: {'; '.join(wrong)}. Insert its rows into a store with such columns first"
        )
        raise ExportError(str(source.path), reason)
