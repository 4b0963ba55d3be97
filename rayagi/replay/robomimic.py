"""Reads robomimic's HDF5: a group per demonstration.

    data/demo_0/actions, rewards, dones            (N, ...)     rewards and dones where there are some
    data/demo_0/obs/NAME, next_obs/NAME            (N, ...)     next_obs where there is one
    mask/NAME                                      names of demonstrations, such as those of training

``dones`` counts as terminated. Without ``next_obs``, what ``trajectories.closed`` says of the last step is done.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayagi.replay.flat import import_h5py
from rayagi.replay.trajectories import (
    FLAGS,
    Source,
    Trajectory,
    TrajectoryBatch,
    check_fits,
    chosen_columns,
    further_columns,
    is_obs,
    listed,
    make_schema,
    native,
    packed,
)
from rayagi.serving.errors import DatasetError

_OURS = {"actions": "action", "rewards": "reward", "dones": "terminated"}


def has_demonstrations(path: Path) -> bool:
    """Whether an HDF5 file has robomimic's layout.

    Raises:
        OSError: it is no HDF5 file.
        DatasetError: h5py is not installed.
    """
    h5py = import_h5py(path)
    with h5py.File(path, "r") as file:
        return bool(_demonstrations(file, h5py))


def open_robomimic(path: Path, columns: Sequence[str], mask: str | None = None) -> Source:
    """A file of demonstrations, or those of a mask, in the order of their numbers. Observations are the columns obs.NAME.

    Raises:
        DatasetError: h5py is not installed, a column is missing or not of numbers, there is no whole step, or no such mask.
    """
    h5py = import_h5py(path)
    file = h5py.File(path, "r")
    demonstrations = _demonstrations(file, h5py)
    if mask is not None:
        demonstrations = _masked(path, demonstrations, file.get("mask", {}), mask)
    entries = _entries(demonstrations[0], h5py)
    known = dict.fromkeys([*entries, *FLAGS])  # flags that are missing are False
    names, left_out = chosen_columns(path, known, columns, {ours: theirs for theirs, ours in _OURS.items()})
    kept = [(demo, steps) for demo in demonstrations if (steps := _num_steps(demo))]
    lengths = np.array([steps for _, steps in kept], np.int64)

    def read() -> Iterator[Trajectory]:
        for demo, steps in kept:
            yield {name: _values(path, demo, name, entries, steps) for name in names}

    def begin() -> Iterator[TrajectoryBatch]:
        return packed(read())

    kinds = {name: _kind(demonstrations[0], name, entries) for name in names}
    schema = make_schema(path, kinds, int(lengths.max(initial=0)))
    return Source(path=path, kind="robomimic", schema=schema, lengths=lengths, begin=begin, left_out=left_out)


def _demonstrations(file: Any, h5py: Any) -> list[Any]:
    """Their groups, in the order of their numbers; empty: the layout is another."""
    data = file.get("data")
    if not isinstance(data, h5py.Group):
        return []
    names = [name for name in data if re.fullmatch(r"demo_\d+", name) and "actions" in data[name]]
    return [data[name] for name in sorted(names, key=lambda name: int(name.removeprefix("demo_")))]


def _masked(path: Path, demonstrations: Sequence[Any], masks: Mapping[str, Any], mask: str) -> list[Any]:
    """Those demonstrations that a mask lists.

    Raises:
        DatasetError: there is no such mask, or it lists none of them, or others.
    """
    if mask not in masks:
        raise DatasetError(str(path), f"has no mask {mask!r}: its masks are {listed(masks) or 'none'}")
    chosen = {name.decode() for name in masks[mask][()].tolist()}
    found = {demo.name.rpartition("/")[2]: demo for demo in demonstrations}
    if missing := sorted(chosen - found.keys()):
        raise DatasetError(str(path), f"has no demonstrations {listed(missing)}, which mask/{mask} lists")
    if not chosen:
        raise DatasetError(str(path), f"has no demonstration in mask/{mask}")
    return [demo for name, demo in found.items() if name in chosen]


def _entries(demo: Any, h5py: Any) -> dict[str, str]:
    """Names of a demonstration's arrays of numbers, by our names."""
    found, others = dict[str, str](), dict[str, str]()

    def add(name: str, entry: Any) -> None:
        is_array = isinstance(entry, h5py.Dataset) and entry.shape and entry.dtype.kind in "biuf"
        if not is_array or name.startswith("next_obs/"):
            return
        if name.startswith("obs/"):
            found[f"obs.{name.removeprefix('obs/')}"] = name
        elif name in _OURS:
            found[_OURS[name]] = name
        else:
            others[name] = name

    demo.visititems(add)
    return found | further_columns(found, others)


def _num_steps(demo: Any) -> int:
    """Steps whose next observation is known, or that ended the task."""
    count = len(demo["actions"])
    is_known = "next_obs" in demo or ("dones" in demo and count > 0 and bool(demo["dones"][-1]))
    return count if is_known else max(0, count - 1)


def _kind(demo: Any, name: str, entries: Mapping[str, str]) -> tuple[Any, tuple[int, ...]]:
    """Type and shape of one step."""
    if name in FLAGS:
        return bool, ()
    array = demo[entries[name]]
    return native(array.dtype), () if name == "reward" else array.shape[1:]


def _values(path: Path, demo: Any, name: str, entries: Mapping[str, str], steps: int) -> NDArray[Any]:
    """A column of a demonstration, (steps + 1 of an observation, ...)."""
    if name in FLAGS and name not in entries:
        return np.zeros(steps, bool)
    array = demo[entries[name]]
    check_fits(path, array.nbytes, f"of {array.name}")
    if not is_obs(name):
        values = _rows(array, 0, steps)
        if name == "reward":
            return values.reshape(-1)
        return _flags(path, demo, values) if name in FLAGS else values
    values = _rows(array, 0, steps + 1)
    if len(values) > steps:  # the last step is left out
        return values
    after = _rows(demo[f"next_{entries[name]}"], steps - 1, steps) if "next_obs" in demo else values[-1:]
    return np.concatenate([values, after])


def _rows(array: Any, begin: int, end: int) -> NDArray[Any]:
    return np.asarray(array[begin:end]).astype(native(array.dtype), copy=False)


def _flags(path: Path, demo: Any, values: NDArray[Any]) -> NDArray[np.bool_]:
    if not np.isin(values, (0, 1)).all():
        raise DatasetError(str(path), f"{demo.name}/dones has values other than 0 and 1")
    return values.reshape(-1).astype(bool)
