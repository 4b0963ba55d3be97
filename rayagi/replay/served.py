"""Reads datasets of ``rayagi serve``, Parquet or Arrow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset

from rayagi.replay.trajectories import Source, Trajectory, chosen_columns, make_schema, packed
from rayagi.serving.dataset import Dataset, Episode, open_dataset
from rayagi.serving.row_batches import row_batches

_COLUMNS = ("obs", "action", "reward", "terminated", "truncated", "log_prob", "policy_version")


def open_served(path: Path, columns: Sequence[str]) -> Source:
    """A dataset of ``rayagi serve``. Episodes cut by the end of the recording have neither flag on their last step.

    Raises:
        DatasetError: there is none, it is empty or damaged, or it lacks a column.
    """
    dataset = open_dataset(path)
    layout = dataset.folder.description.layout
    names, _ = chosen_columns(path, _COLUMNS, columns)
    lengths = np.array(list(_lengths(dataset)), np.int64)
    kinds: dict[str, tuple[Any, tuple[int, ...]]] = {
        "obs": (np.float32, (layout.obs_dim,)),
        "action": (np.int64 if layout.action.is_discrete else np.float32, layout.action.shape),
        "reward": (np.float32, ()),
        "terminated": (bool, ()),
        "truncated": (bool, ()),
        "log_prob": (np.float32, ()),
        "policy_version": (np.int64, ()),
    }
    return Source(
        path=path,
        kind="rayagi",
        schema=make_schema(path, {name: kinds[name] for name in names}, int(lengths.max(initial=0))),
        lengths=lengths,
        begin=lambda: packed(map(_trajectory, dataset.episodes())),
    )


def _trajectory(episode: Episode) -> Trajectory:
    last = np.arange(len(episode.rewards)) == len(episode.rewards) - 1
    return {
        "obs": episode.obs,
        "action": episode.actions,
        "reward": episode.rewards,
        "terminated": last & episode.terminated,
        "truncated": last & episode.truncated,
        "log_prob": episode.log_probs,
        "policy_version": episode.policy_versions,
    }


def _lengths(dataset: Dataset) -> Iterator[int]:
    """Steps of each episode in the order of ``Dataset.episodes``, from the two columns that say so."""
    schema = dataset.folder.description.layout.arrow({})
    kind = "parquet" if dataset.folder.description.format == "parquet" else "ipc"
    for _, files in groupby(dataset.files, key=lambda file: (file.session, file.gmi)):
        running: dict[int, int] = defaultdict(int)
        for file in files:
            rows = pyarrow.dataset.dataset(str(file.path), format=kind, schema=schema)
            for batch in row_batches(rows, ["episode", "final_obs"]):
                for number, steps, is_last in _runs(batch):
                    running[number] += steps
                    if is_last:
                        yield running.pop(number)
        # As in Dataset.episodes: the last row's next observation is lost.
        yield from (steps - 1 for steps in running.values() if steps > 1)


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[int, int, bool]]:
    """Number, rows and end of each run of rows of one episode."""
    if not batch.num_rows:
        return
    numbers = batch.column("episode").to_numpy()
    is_last = batch.column("final_obs").is_valid().to_numpy(zero_copy_only=False)
    ends = np.append(np.flatnonzero(np.diff(numbers)) + 1, batch.num_rows)
    for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        yield int(numbers[begin]), end - begin, bool(is_last[end - 1])
