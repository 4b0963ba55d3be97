"""Reads the sample batches that RLlib's old API stack records as JSON (``output`` a folder): one batch a line.

A batch has a column per name, and one value per step in it; observations are compressed where RLlib has LZ4. An episode that
a batch ends in goes on in a later one, with those of other environments between: steps are joined by ``eps_id``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayagi.replay.arrow import unpacked
from rayagi.replay.tables import RLLIB_NAMES, by_numbers
from rayagi.replay.trajectories import (
    FLAGS,
    Source,
    Trajectory,
    chosen_columns,
    closed,
    closed_lengths,
    make_schema,
)
from rayagi.serving.errors import DatasetError

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
    others = [
        name for name, found in values.items() if found is not None and len(found) == len(first["eps_id"])
    ]
    known = dict.fromkeys([*names, *FLAGS, *others])
    known.pop("next_obs", None)
    ours, left_out = chosen_columns(path, known, columns)
    read_names = {name: names.get(name, name) for name in (*ours, "next_obs") if name in (*names, *others)}
    lengths, is_known = list[int](), list[bool]()
    for steps in _episodes(path, {}):
        lengths.append(len(steps["terminated"]))
        is_known.append("next_obs" in names or bool(steps["terminated"][-1]))
    kinds: dict[str, tuple[Any, tuple[int, ...]]] = dict.fromkeys(FLAGS, (bool, ()))
    for name in (name for name in ours if name not in FLAGS):
        found = _column(first, read_names[name])
        kinds[name] = (found.dtype, found.shape[1:])

    def begin() -> Iterator[Trajectory]:
        for steps in _episodes(path, read_names):
            after = steps.pop("next_obs", None)
            trajectory = closed(steps, None if after is None else after[-1])
            if trajectory is not None:
                yield trajectory

    found_lengths = closed_lengths(np.array(lengths, np.int64), np.array(is_known, bool))
    schema = make_schema(path, {name: kinds[name] for name in ours}, int(found_lengths.max(initial=0)))
    return Source(
        path=path, kind="rllib batches", schema=schema, lengths=found_lengths, begin=begin, left_out=left_out
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
    """A column's values.

    Raises:
        ValueError: it is not of numbers, or has another number of steps.
    """
    found = _array(batch[name])
    if found is None:
        raise ValueError(f"{name} is not of numbers")
    if found.shape[:1] != (len(batch["eps_id"]),):
        raise ValueError(
            f"{name} has shape {list(found.shape)} where {len(batch['eps_id'])} steps are expected"
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
