"""Reads what RLlib records: whole episodes, and the sample batches of its old API stack.

Episodes are ``SingleAgentEpisode`` states in msgpack, as RLlib and ``rayagi export`` write them. Batches are JSON
(``output`` a folder), one a line: a column per name, with one value per step; observations are compressed where RLlib has
LZ4. An episode that a batch ends in goes on in a later one, with those of other environments between: steps are joined by
``eps_id``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow.dataset
from numpy.typing import NDArray

from placement.errors import counted
from rayagi.replay.arrow import unpacked
from rayagi.replay.tables import RLLIB_NAMES, by_numbers, parquet_files
from rayagi.replay.trajectories import (
    FLAGS,
    Source,
    Trajectory,
    chosen_columns,
    closed_all,
    closed_lengths,
    episode_source,
    further_columns,
    make_schema,
)
from rayagi.serving.errors import DatasetError
from rayagi.serving.row_batches import row_batches

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
        first = next(_unpacked(rows), None)
    else:
        for episode in _unpacked(rows):
            first = first or episode
            lengths.append(len(episode["action"]))
    return episode_source(path, "rllib episodes", first or {}, columns, lengths, lambda: _unpacked(rows))


def _unpacked(rows: pyarrow.dataset.Dataset) -> Iterator[Trajectory]:
    for batch in row_batches(rows, ["item"], _ITEMS):
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
    outputs = {
        _OURS.get(name, name): _numbers(buffer)
        for name, buffer in (state["extra_model_outputs"] or {}).items()
    }
    further = {
        name: values
        for name, values in outputs.items()
        if values.dtype.kind in "biuf" and len(values) == len(action)
    }
    return found | further_columns(found, further)


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


_INDEX = ("type", "eps_id", "agent_index", "unroll_id", "t", "dones")
"""Columns that say which step it is."""


def batch_files(path: Path) -> list[Path]:
    """RLlib's JSON files of a folder, in the order of ``by_numbers``; or the file itself."""
    return sorted(path.glob("output-*.json"), key=by_numbers) if path.is_dir() else [path]


def open_batches(path: Path, columns: Sequence[str]) -> Source:
    """A folder of JSON files, or one. Neither Ray nor pickles of anything but arrays are loaded.

    Raises:
        DatasetError: a column is missing or not of numbers, there is no whole step, or there are several policies.
    """
    first = next(_batches(path), None)
    if first is None:
        raise DatasetError(str(path), "is empty: it has no steps")
    names = {ours: theirs for ours, theirs in RLLIB_NAMES.items() if theirs in first and ours not in FLAGS}
    values = {name: _array(first[name]) for name in first if name not in (*_INDEX, *RLLIB_NAMES.values())}
    others = further_columns(
        (*names, *FLAGS),
        {
            name: name
            for name, found in values.items()
            if found is not None and len(found) == len(first["eps_id"])
        },
    )
    read_from = names | others
    known = dict.fromkeys([*names, *FLAGS, *others])
    known.pop("next_obs", None)
    ours, left_out = chosen_columns(path, known, columns, RLLIB_NAMES)
    read_names = {name: read_from[name] for name in (*ours, "next_obs") if name in read_from}
    lengths, is_known = list[int](), list[bool]()
    for steps in _episodes(path, {}):
        lengths.append(len(steps["terminated"]))
        is_known.append("next_obs" in names or bool(steps["terminated"][-1]))
    kinds: dict[str, tuple[Any, tuple[int, ...]]] = dict.fromkeys(FLAGS, (bool, ()))
    for name in (name for name in ours if name not in FLAGS):
        found = _column(first, read_names[name])
        kinds[name] = (found.dtype, found.shape[1:])
    found_lengths = closed_lengths(np.array(lengths, np.int64), np.array(is_known, bool))
    schema = make_schema(path, {name: kinds[name] for name in ours}, int(found_lengths.max(initial=0)))
    return Source(
        path=path,
        kind="rllib batches",
        schema=schema,
        lengths=found_lengths,
        begin=lambda: closed_all(_episodes(path, read_names)),
        left_out=left_out,
    )


def _batches(path: Path) -> Iterator[dict[str, Any]]:
    """The columns of each batch that has steps."""
    for file in batch_files(path):
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                if line.strip():
                    batch = _of_one_policy(path, json.loads(line))
                    if len(batch["eps_id"]):
                        yield batch


def _of_one_policy(path: Path, batch: Mapping[str, Any]) -> dict[str, Any]:
    if batch["type"] == "MultiAgentBatch":
        policies = batch["policy_batches"]
        if len(policies) != 1:
            raise DatasetError(
                str(path),
                f"has the policies {', '.join(sorted(policies))}: one replay has one policy's steps",
            )
        return dict(next(iter(policies.values())))
    return dict(batch)


def _episodes(path: Path, names: Mapping[str, str]) -> Iterator[Trajectory]:
    """Steps of each episode, in the order of their ends; then of those that the recording cuts."""
    begun: dict[tuple[Any, ...], list[Trajectory]] = {}
    following: dict[tuple[Any, ...], Any] = {}
    """The time step with which an episode goes on."""
    for batch in _batches(path):
        found = {name: _column(batch, theirs) for name, theirs in names.items()}
        found |= {name: _flag(batch, name) for name in FLAGS}
        times = batch.get("t")
        for key, part, is_last in _parts(batch, found["terminated"] | found["truncated"]):
            if times is not None:
                if key in begun and times[part.start] != following[key]:  # steps between them are missing
                    yield _joined(begun.pop(key))
                following[key] = times[part.stop - 1] + 1
            begun.setdefault(key, []).append({name: values[part] for name, values in found.items()})
            if is_last:
                yield _joined(begun.pop(key))
    yield from map(_joined, begun.values())


def _parts(
    batch: Mapping[str, Any], ends: NDArray[np.bool_]
) -> Iterator[tuple[tuple[Any, ...], slice, bool]]:
    """Steps of one episode and agent that follow each other, and whether they are the last."""
    keys = list(zip(batch["eps_id"], batch.get("agent_index", batch["eps_id"]), strict=True))
    begin = 0
    for at, key in enumerate(keys):
        if ends[at] or at + 1 == len(keys) or keys[at + 1] != key:
            yield key, slice(begin, at + 1), bool(ends[at])
            begin = at + 1


def _joined(parts: Sequence[Trajectory]) -> Trajectory:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _column(batch: Mapping[str, Any], name: str) -> NDArray[Any]:
    """A column's values. Raises ValueError: it is not of numbers, or has another number of steps."""
    found = _array(batch[name])
    if found is None:
        raise ValueError(f"{name} is not of numbers")
    if found.shape[:1] != (len(batch["eps_id"]),):
        raise ValueError(
            f"{name} has shape {list(found.shape)}; expected {counted(len(batch['eps_id']), 'step')}"
        )
    return found


def _flag(batch: Mapping[str, Any], name: str) -> NDArray[np.bool_]:
    theirs = RLLIB_NAMES[name]
    if name == "terminated" and theirs not in batch:
        theirs = "dones"  # of Ray before 2.3
    if theirs not in batch:
        return np.zeros(len(batch["eps_id"]), bool)
    values = _column(batch, theirs)
    if values.ndim != 1 or not np.isin(values, (0, 1)).all():
        raise ValueError(f"{theirs} has values other than 0 and 1")
    return values.astype(bool)


def _array(values: Any) -> NDArray[Any] | None:
    """Numbers, compressed or in lists; None if they are none. Python's floats become float32, which RLlib learns with."""
    if isinstance(values, str):
        return unpacked(values)
    try:
        found = np.asarray(values)
    except ValueError:  # of lists of different lengths
        return None
    if found.dtype.kind not in "biuf" or not found.ndim:
        return None
    return found.astype(np.float32) if found.dtype.kind == "f" else found
