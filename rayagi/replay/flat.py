"""Datasets whose steps lie one after the other in one array per column: D4RL's HDF5, torch tensors.

    observations, actions, rewards, terminals      (N, ...)
    timeouts                                        (N,)         where there are some
    next_observations                               (N, ...)     where there are some
    obs.PART, next_obs.PART                         (N, ...)     in place of both, where observations have several parts
    infos/NAME                                      (N, ...)     further columns; infos/action_log_probs is log_prob
    infos/trajectory_number                         (N,)         in rayagi's exports

A trajectory ends with a terminal or a timeout, where its number changes, and where ``next_observations`` is not the next
row's observation: by a timeout if the file has no ``timeouts``, else by the end of a recording. ``trajectories.closed`` says
what is done without ``next_observations``.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayagi.replay.trajectories import (
    BATCH_BYTES,
    FLAGS,
    Source,
    TrajectoryBatch,
    check_fits,
    chosen_columns,
    closed,
    closed_lengths,
    further_columns,
    is_obs,
    listed,
    make_schema,
    native,
)
from rayagi.serving.errors import DatasetError

LOGGER = logging.getLogger(__name__)
D4RL_NAMES = {
    "obs": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminals",
    "truncated": "timeouts",
    "next_obs": "next_observations",
    "log_prob": "infos/action_log_probs",
}
"""D4RL's name of each of our columns."""
OUR_NAMES = {theirs: ours for ours, theirs in D4RL_NAMES.items()}
TRAJECTORY = "trajectory_number"
"""Column with the number of each step's trajectory, in rayagi's exports."""
_SCALARS = ("reward", *FLAGS, TRAJECTORY)
_LIKE_TERMINATED = ("done", "dones", "terminal", "termination", "terminations", "terminateds", "is_terminal")
"""Others' names of ``terminated``, or of that and ``truncated`` in one."""
_MOST_JUMPS = 0.9
"""Of the steps that nothing else ends: with more of them, it is said that observations do not follow each other."""
_INDEX_BYTES = 32
"""Of a row, about: flags, and what is worked out from them."""
_ROWS = 4096
"""That are compared at a time, at most."""
_BLOCK_BYTES = 8 * 2**20
"""Of one column that are read at a time."""


def by_our_names(path: Path, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by our names, of arrays by ours or D4RL's. Raises DatasetError: two are one column."""
    for theirs, ours in OUR_NAMES.items():
        if theirs in arrays and ours in arrays:
            raise DatasetError(
                str(path),
                f"has {theirs!r} and {ours!r}, two names of one column: rename or remove one of them",
            )
    return {OUR_NAMES.get(name, name): array for name, array in arrays.items()}


def flat_source(path: Path, kind: str, arrays: Mapping[str, Any], wanted: Sequence[str]) -> Source:
    """A source of arrays by our column names, with ``next_obs`` (or ``next_obs.PART`` of all parts) where there is one.

    Args:
        path, kind: as of ``Source``
        arrays: anything with ``shape``, ``dtype`` and slices that become arrays: (N, ...) each
        wanted: columns beyond the usual ones

    Raises:
        DatasetError: a column is missing, has another number of rows, or is not of numbers; or there is no whole step.
    """
    nexts = _nexts(path, arrays)
    known = dict.fromkeys([*arrays, *FLAGS])  # flags that are missing are False
    for name in (*nexts.values(), TRAJECTORY):
        known.pop(name, None)
    names, left_out = chosen_columns(path, known, wanted, D4RL_NAMES)
    used = {*names, *nexts.values(), *FLAGS, TRAJECTORY}
    _check_rows(path, {name: array for name, array in arrays.items() if name in used}, nexts)
    _check_ends(path, arrays, nexts)
    kinds = {name: _kind(name, arrays) for name in names}
    row_bytes = sum(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in kinds.values())
    check_fits(path, arrays["action"].shape[0] * _INDEX_BYTES, "of flags and ends")
    check_fits(path, row_bytes, "a step")
    flags = {name: _flags(path, name, arrays) for name in FLAGS}
    ends = _ends(path, arrays, nexts, flags)
    begins = np.append(0, ends[:-1])
    is_known = flags["terminated"][ends - 1] | bool(nexts)
    lengths = closed_lengths(ends - begins, is_known)
    # Trajectories of about a mebibyte in all, at least one.
    most_rows = max(1, BATCH_BYTES // max(1, row_bytes))

    def read() -> Iterator[TrajectoryBatch]:
        columns = {name: _Ahead(flags.get(name, arrays.get(name)), kinds[name][1]) for name in names}
        after = {
            name: _Ahead(arrays[other], kinds[name][1]) for name, other in nexts.items() if name in names
        }
        first = 0
        while first < len(ends):
            begin = int(begins[first])
            last = max(first + 1, int(np.searchsorted(ends, begin + most_rows, "right")))
            own, end = slice(first, last), int(ends[last - 1])
            rows = TrajectoryBatch(
                {name: column(begin, end) for name, column in columns.items()}, (ends - begins)[own]
            )
            last_rows, first = ends[own] - 1, last
            lowest = int(last_rows[0])
            next_obs = {name: column(lowest, end)[last_rows - lowest] for name, column in after.items()}
            trajectories = closed(rows, next_obs)
            if len(trajectories.lengths):
                yield trajectories

    schema = make_schema(path, kinds, int(lengths.max(initial=0)))
    return Source(path=path, kind=kind, schema=schema, lengths=lengths, begin=read, left_out=left_out)


class _Ahead:
    """Reads increasing ranges of an array, in blocks: compressed chunks are decompressed once."""

    def __init__(self, array: Any, shape: tuple[int, ...]) -> None:
        self._array, self._shape, self._begin, self._rows = array, shape, 0, np.empty(0)
        self._size = max(1, _BLOCK_BYTES // max(1, math.prod(shape) * array.dtype.itemsize))

    def __call__(self, begin: int, end: int) -> NDArray[Any]:
        if end > self._begin + len(self._rows):
            rows = np.asarray(self._array[begin : max(end, begin + self._size)])
            self._begin = begin
            self._rows = rows.reshape(-1, *self._shape).astype(native(rows.dtype), copy=False)
        return self._rows[begin - self._begin : end - self._begin]


def _nexts(path: Path, arrays: Mapping[str, Any]) -> dict[str, str]:
    """Column of the next observation, by that of the observation; empty: there is none."""
    parts = [name for name in arrays if is_obs(name)]
    nexts = {name: f"next_{name}" for name in parts if f"next_{name}" in arrays}
    if nexts and (missing := next((name for name in parts if name not in nexts), None)):
        found = next(iter(nexts.values()))
        raise DatasetError(str(path), f"has {found!r} but no 'next_{missing}': add it, or remove {found!r}")
    return nexts


def _check_rows(path: Path, arrays: Mapping[str, Any], nexts: Mapping[str, str]) -> None:
    rows = {name: array.shape[0] if array.shape else 0 for name, array in arrays.items()}
    count = rows["action"]
    if other := next((name for name, found in rows.items() if found != count), None):
        raise DatasetError(
            str(path), f"is damaged: {other} has {rows[other]:,} rows where action has {count:,}"
        )
    if not count:
        raise DatasetError(str(path), "is empty: it has no rows")
    for name, other in nexts.items():
        found, expected = list(arrays[other].shape), list(arrays[name].shape)
        if found != expected:
            raise DatasetError(
                str(path), f"is damaged: {other} has shape {found} where {name} has {expected}"
            )
        if not np.can_cast(arrays[other].dtype, arrays[name].dtype, "same_kind"):
            reason = f"{other} is of {arrays[other].dtype} where {name} is of {arrays[name].dtype}"
            raise DatasetError(str(path), reason)
    for name in _SCALARS:
        if name in arrays and arrays[name].shape not in ((count,), (count, 1)):
            raise DatasetError(
                str(path), f"{name} has shape {list(arrays[name].shape)} where [{count}] is expected"
            )


def _check_ends(path: Path, arrays: Mapping[str, Any], nexts: Mapping[str, str]) -> None:
    """Refuse a file that says under other names where trajectories end: without them, it would have no ends."""
    other = next((name for name in _LIKE_TERMINATED if name in arrays), None)
    if "terminated" not in arrays and other is not None:
        reason = (
            f"has {other!r}, and no 'terminated' (or 'terminals'), after which nothing is bootstrapped: rename it, or add "
            "'terminated', all false if no task ended"
        )
        raise DatasetError(str(path), reason)
    if not nexts and not any(name in arrays for name in (*FLAGS, TRAJECTORY)):
        reason = (
            f"says nowhere where trajectories end: add 'terminated' (all false: it is one), 'truncated', 'next_obs' or "
            f"'{TRAJECTORY}'; its columns are {listed(arrays)}"
        )
        raise DatasetError(str(path), reason)


def _kind(name: str, arrays: Mapping[str, Any]) -> tuple[Any, tuple[int, ...]]:
    """Type and shape of one step."""
    if name in FLAGS:
        return bool, ()
    shape = arrays[name].shape[1:]
    is_scalar = name in _SCALARS or (name in ("log_prob", "policy_version") and shape == (1,))
    return native(arrays[name].dtype), () if is_scalar else shape


def _flags(path: Path, name: str, arrays: Mapping[str, Any]) -> NDArray[np.bool_]:
    if name not in arrays:
        return np.zeros(arrays["action"].shape[0], bool)
    values = np.asarray(arrays[name][:])
    if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        raise DatasetError(str(path), f"{name} has values other than 0 and 1")
    return values.reshape(-1).astype(bool)


def _ends(
    path: Path, arrays: Mapping[str, Any], nexts: Mapping[str, str], flags: Mapping[str, NDArray[np.bool_]]
) -> NDArray[np.int64]:
    """Row after each trajectory's last. Logs if ``nexts`` say that of nearly every step."""
    is_last = flags["terminated"] | flags["truncated"]
    is_last[-1] = True
    if TRAJECTORY in arrays:
        numbers = np.asarray(arrays[TRAJECTORY][:]).reshape(-1)
        if (numbers != numbers).any():  # NaN, which differs from itself
            raise DatasetError(str(path), f"{TRAJECTORY} has NaN, which is the number of no trajectory")
        is_last[:-1] |= numbers[1:] != numbers[:-1]
    is_open = ~is_last
    for name, other_name in nexts.items():
        jumps = _jumps(arrays[name], arrays[other_name])
        is_last[:-1] |= jumps
        if "truncated" not in arrays:
            flags["truncated"][:-1] |= jumps & ~flags["terminated"][:-1]
    found, steps = int((is_open & is_last).sum()), int(is_open.sum())
    if found > _MOST_JUMPS * steps:
        LOGGER.warning(
            "%s: behind %s of %s steps that nothing else ends, next_obs is not the next row's obs: each ends a trajectory",
            path,
            f"{found:,}",
            f"{steps:,}",
        )
    return np.flatnonzero(is_last) + 1


def _jumps(obs: Any, next_obs: Any) -> NDArray[np.bool_]:
    """Whether each row's next observation is not the next row's observation, (N - 1,). Floats: as the narrower type."""
    count, kind = obs.shape[0], obs.dtype
    if {obs.dtype.kind, next_obs.dtype.kind} == {"f"}:
        kind = min(obs.dtype, next_obs.dtype, key=lambda dtype: dtype.itemsize)
    found = np.zeros(count - 1, bool)
    before, after = (_Ahead(each, obs.shape[1:]) for each in (next_obs, obs))
    rows = max(1, min(_ROWS, _BLOCK_BYTES // max(1, math.prod(obs.shape[1:]) * obs.dtype.itemsize)))
    for begin in range(0, count - 1, rows):
        end = min(begin + rows, count - 1)
        with np.errstate(over="ignore"):
            this, other = before(begin, end).astype(kind), after(begin + 1, end + 1).astype(kind)
        differs = (this != other) & ~((this != this) & (other != other))  # NaN is NaN
        found[begin:end] = differs.reshape(end - begin, -1).any(1)
    return found


def open_d4rl(path: Path, columns: Sequence[str]) -> Source:
    """A D4RL file.

    Raises:
        OSError: it is no HDF5 file.
        DatasetError: h5py is not installed, or as of ``flat_source``.
    """
    h5py = import_h5py(path)
    arrays = _arrays(path, h5py.File(path, "r"), h5py)
    return flat_source(path, "d4rl", arrays, columns)


def import_h5py(path: Path) -> Any:
    """The module h5py, which is an optional extra. Raises DatasetError: it cannot be imported."""
    try:
        import h5py
    except ImportError as error:
        raise DatasetError(str(path), f"HDF5 needs h5py ({error}): pip install 'rayagi[hdf5]'") from error
    return h5py


def _arrays(path: Path, file: Any, h5py: Any) -> dict[str, Any]:
    """Arrays by our names; ``metadata`` is about the file. If a name is taken, an info keeps its own: ``infos/NAME``."""
    entries: dict[str, Any] = {}

    def add(name: str, entry: Any) -> None:
        if isinstance(entry, h5py.Dataset) and not name.startswith("metadata/") and entry.shape:
            entries[name] = entry

    file.visititems(add)
    for name in {*D4RL_NAMES.values(), *D4RL_NAMES} - entries.keys():  # links, which it does not visit
        if name in file:
            add(name, file[name])
    infos = [name for name in entries if name.startswith("infos/") and name not in OUR_NAMES]
    found = by_our_names(path, {name: entry for name, entry in entries.items() if name not in infos})
    return found | further_columns(found, {name.removeprefix("infos/"): entries[name] for name in infos})


def open_tensors(path: Path, columns: Sequence[str]) -> Source:
    """A file of ``torch.save({"obs": ..., "action": ..., ...})``. It is mapped into memory, and no code of it is run.

    Raises:
        RuntimeError, pickle.UnpicklingError: it is no such file, or has more than tensors.
        DatasetError: it is no dict of tensors, or as of ``flat_source``.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:  # torch's own text advises to run the file's code
        raise pickle.UnpicklingError("it is no file of torch.save, or has more than tensors") from error
    if (
        not isinstance(found, Mapping)
        or not found
        or not all(isinstance(one, torch.Tensor) for one in found.values())
    ):
        raise DatasetError(
            str(path), "has no dict of tensors, such as {'obs': ..., 'action': ..., 'reward': ...}"
        )
    if half := next(
        (name for name, one in found.items() if one.dtype in (torch.bfloat16, torch.complex64)), None
    ):
        raise DatasetError(
            str(path), f"column {half!r} has type {found[half].dtype}, which NumPy does not have"
        )
    arrays = by_our_names(path, {str(name): one.detach().numpy() for name, one in found.items()})
    return flat_source(path, "torch", arrays, columns)
