"""Reads whole episodes of RLlib: ``SingleAgentEpisode`` states in msgpack, as RLlib and ``rayagi export`` write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow.dataset
from numpy.typing import NDArray

from rayagi.replay.tables import parquet_files
from rayagi.replay.trajectories import Source, Trajectory, chosen_columns, make_schema

_OURS = {"action_logp": "log_prob"}
_ITEMS = 16
"""Episodes that are read at a time."""


def open_episodes(path: Path, columns: Sequence[str]) -> Source:
    """Episodes in the column ``item`` of Parquet files. Extra model outputs are columns. Neither Ray nor pickles are loaded.

    An episode that a rollout cut is a trajectory for each of its parts.

    Raises:
        DatasetError: a column is missing or not of numbers, or there is no step.
    """
    rows = pyarrow.dataset.dataset(parquet_files(path), format="parquet")
    lengths, first = list[int](), None
    if "steps" in rows.schema.names:  # of rayagi's exports
        lengths = rows.to_table(columns=["steps"])["steps"].to_pylist()
        first = next(_episodes(rows), None)
    else:
        for episode in _episodes(rows):
            first = first or episode
            lengths.append(len(episode["action"]))
    known = dict(first or {})
    ours, left_out = chosen_columns(path, known, columns) if known else ((), ())

    def begin() -> Iterator[Trajectory]:
        for episode in _episodes(rows):
            if len(episode["action"]):
                yield {name: episode[name] for name in ours}

    found = np.array([length for length in lengths if length], np.int64)
    kinds = {name: (known[name].dtype, known[name].shape[1:]) for name in ours}
    schema = make_schema(path, kinds, int(found.max(initial=0)))
    return Source(
        path=path, kind="rllib episodes", schema=schema, lengths=found, begin=begin, left_out=left_out
    )


def _episodes(rows: pyarrow.dataset.Dataset) -> Iterator[Trajectory]:
    for batch in rows.to_batches(
        columns=["item"], batch_size=_ITEMS, batch_readahead=1, fragment_readahead=1
    ):
        for item in batch.column("item"):
            yield _trajectory(msgpack.unpackb(item.as_py(), object_hook=_decoded, strict_map_key=False))


def _trajectory(state: Mapping[str, Any]) -> Trajectory:
    """Columns of an episode's state."""
    action, reward = _values(state["actions"]), _numbers(state["rewards"])
    last = np.arange(len(action)) == len(action) - 1
    found = {
        "obs": _values(state["observations"]),
        "action": action,
        "reward": reward,
        "terminated": last & bool(state["is_terminated"]),
        "truncated": last & bool(state["is_truncated"]),
    }
    for name, buffer in (state["extra_model_outputs"] or {}).items():
        values = _numbers(buffer)
        if values.dtype.kind in "biuf" and len(values) == len(action):
            found[_OURS.get(name, name)] = values
    return found


def _values(buffer: Mapping[str, Any]) -> NDArray[Any]:
    """Content of an InfiniteLookbackBuffer, without its look-back."""
    return np.asarray(buffer["data"][int(buffer["lookback"]) :])


def _numbers(buffer: Mapping[str, Any]) -> NDArray[Any]:
    """The same; Python's floats become float32, which RLlib learns with."""
    values = _values(buffer)
    return values.astype(np.float32) if values.dtype == np.float64 and values.ndim == 1 else values


def _decoded(stored: dict[Any, Any]) -> Any:
    """Arrays and numbers as msgpack_numpy writes them. Its own decoder unpickles arrays of objects."""
    if b"nd" not in stored:
        return stored
    dtype = np.dtype(stored[b"type"])
    if dtype.kind not in "biuf":
        return None
    values = np.frombuffer(stored[b"data"], dtype)
    return values.reshape(stored[b"shape"]) if stored[b"nd"] else values[0]
