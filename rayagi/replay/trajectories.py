"""Trajectories between files and replay stores: the names of their columns, and what a reader of a format offers.

| column | steps | what |
|---|---|---|
| obs, or obs.PART for each part | L + 1 | observations; the last is the one after the last action |
| action | L | |
| reward | L | where a format has one |
| terminated, truncated | L | bool; a trajectory cut by the end of a recording has neither on its last step |
| log_prob, policy_version | L | where a format has them |

Further columns have L steps, and are read only if they are named.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from actors.replay import Column, ReplaySchema
from actors.replay.errors import ReplayError
from rayagi.serving.errors import DatasetError, ExportError

Trajectory = dict[str, NDArray[Any]]
"""By column, (L + extra, *shape)."""
Progress = Callable[[int, int], object]
"""Called with the steps that are done and all steps."""
FLAGS = ("terminated", "truncated")
_USUAL = ("obs", "action", "reward", *FLAGS, "log_prob", "policy_version")
"""Columns that are read without being named."""
_DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    RuntimeError,
    pickle.UnpicklingError,
    pa.ArrowException,
)
"""What libraries raise for files that are damaged or of another layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A dataset that is read as a stream.

    Attributes:
        path: file or folder
        kind: name of the format
        schema: columns that are read; ``max_length`` is that of the longest trajectory
        lengths: steps of each trajectory, (n,)
        begin: begins a pass over all trajectories; ``read`` is the one to use
        left_out: columns of the dataset that are not read
    """

    path: Path
    kind: str
    schema: ReplaySchema
    lengths: NDArray[np.int64]
    begin: Callable[[], Iterator[Trajectory]]
    left_out: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """Of all trajectories."""
        return int(self.lengths.sum())

    def read(self) -> Iterator[Trajectory]:
        """All trajectories in the order of ``lengths``. Needs memory for one, or a few.

        Raises:
            DatasetError: a file is damaged, or a trajectory does not fit the schema.
        """
        with reading(self.path, self.kind):
            for number, trajectory in enumerate(self.begin()):
                self._check(number, trajectory)
                yield trajectory

    def _check(self, number: int, trajectory: Trajectory) -> None:
        steps = steps_of(trajectory, self.schema)
        if not 0 < steps <= self.schema.max_length:
            announced = f"{self.schema.max_length:,} are the most that its index has"
            raise DatasetError(
                str(self.path), f"is damaged: trajectory {number} has {steps:,} steps where {announced}"
            )
        for column in self.schema.columns:
            values, shape = trajectory[column.name], (steps + column.extra, *column.shape)
            if values.dtype != column.dtype or values.shape != shape:
                raise DatasetError(
                    str(self.path),
                    f"trajectory {number} has {column.name} of {values.dtype}{list(values.shape)} where "
                    f"{column.dtype}{list(shape)} is expected",
                )


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Convert what libraries raise for a bad file to a ``DatasetError``."""
    try:
        yield
    except ReplayError:  # of a store or a saved replay: it says what is wrong
        raise
    except _DAMAGE as error:
        first_line = (str(error).splitlines() or [""])[0]
        reason = f"cannot be read as {kind} ({type(error).__name__}: {first_line}): is it whole, and of this layout?"
        raise DatasetError(str(path), reason) from error


def steps_of(trajectory: Trajectory, schema: ReplaySchema) -> int:
    """Steps of a trajectory with any columns."""
    first = schema.columns[0]
    return len(trajectory[first.name]) - first.extra


def is_obs(name: str) -> bool:
    """Whether a column is the observation or a part of it."""
    return name == "obs" or name.startswith("obs.")


def check_kept(source: Source, to: str) -> None:
    """Refuse what datasets of rayagi serve and RLlib's episodes do not have; ``to`` names the format in errors.

    Raises:
        ExportError: there are further columns, or several numbers a step in ``log_prob`` or ``policy_version``.
    """
    others = "export it to lerobot, minari, d4rl or torch"
    further = [
        column.name
        for column in source.schema.columns
        if column.name not in _USUAL and not is_obs(column.name)
    ]
    if further:
        reason = f"has the columns {', '.join(further)}, which {to} does not keep: {others}"
        raise ExportError(str(source.path), reason)
    for column in source.schema.columns:
        if column.name in ("log_prob", "policy_version") and column.shape:
            reason = f"has {column}, where {to} has one number a step: {others}"
            raise ExportError(str(source.path), reason)


def num_choices(source: Source) -> int:
    """Options of a column of single choices, by a pass over it. Raises ExportError: one is below 0."""
    least = most = 0
    for trajectory in source.read():
        least, most = min(least, trajectory["action"].min()), max(most, trajectory["action"].max())
    if least < 0:
        reason = f"has the action {least}, where choices count from 0: export it to lerobot, d4rl or torch"
        raise ExportError(str(source.path), reason)
    return int(most) + 1


def make_schema(
    path: Path, columns: Mapping[str, tuple[Any, tuple[int, ...]]], max_length: int
) -> ReplaySchema:
    """Schema of columns given as name: (type, shape of one step).

    Raises:
        DatasetError: there is no trajectory, or a column is not of numbers.
    """
    if max_length < 1:
        raise DatasetError(str(path), "has no trajectory with a step whose next observation is known")
    try:
        return ReplaySchema(
            tuple(
                Column(name=name, dtype=dtype, shape=shape, extra=int(is_obs(name)))
                for name, (dtype, shape) in columns.items()
            ),
            max_length,
        )
    except ReplayError as error:
        raise DatasetError(str(path), str(error)) from error


def chosen_columns(
    path: Path, known: Iterable[str], wanted: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns to read, ``wanted`` beyond the usual ones, and those to leave out, of those that a dataset has.

    Raises:
        DatasetError: a wanted or required column is missing.
    """
    known = tuple(known)
    required = () if any(map(is_obs, known)) else ("obs",)
    for name in (*required, "action", *wanted):
        if name not in known:
            raise DatasetError(str(path), f"has no column {name!r}: its columns are {', '.join(known)}")
    read = tuple(name for name in known if is_obs(name) and name not in _USUAL)
    read += tuple(name for name in _USUAL if name in known)
    read += tuple(name for name in dict.fromkeys(wanted) if name not in read)
    return read, tuple(name for name in known if name not in read)


def closed(steps: Trajectory, next_obs: Mapping[str, NDArray[Any]]) -> Trajectory | None:
    """A trajectory with the observation after its last action.

    Learners bootstrap from that observation, unless the step terminated. Where a file does not have it, the last observation
    is repeated after a terminated step. Else the last step is left out: its own observation is then the one after the step
    before, which takes its truncation.

    Args:
        steps: (L, ...) of each column, ``obs`` or all its parts included
        next_obs: the observation after the last action by column, (*shape) each; empty: not known

    Returns:
        The trajectory; None if no step remains.
    """
    obs = {name: values for name, values in steps.items() if is_obs(name)}
    if next_obs or steps["terminated"][-1]:
        lasts = {name: next_obs.get(name, values[-1]) for name, values in obs.items()}
        return {**steps, **{name: np.concatenate([obs[name], lasts[name][None]]) for name in obs}}
    if len(steps["action"]) < 2:
        return None
    shortened = {name: values if name in obs else values[:-1].copy() for name, values in steps.items()}
    shortened["truncated"][-1] |= steps["truncated"][-1]
    return shortened


def closed_all(episodes: Iterable[Trajectory]) -> Iterator[Trajectory]:
    """``closed`` of each that has a step left; the last of its ``next_obs`` is the one after the last action."""
    for steps in episodes:
        after = steps.pop("next_obs", None)
        trajectory = closed(steps, {} if after is None else {"obs": after[-1]})
        if trajectory is not None:
            yield trajectory


def episode_source(
    path: Path,
    kind: str,
    known: Trajectory,
    wanted: Sequence[str],
    lengths: Sequence[int],
    read: Callable[[], Iterator[Trajectory]],
) -> Source:
    """A source of whole episodes, without those that have no step.

    Args:
        path, kind: as of ``Source``
        known: columns of the first episode; empty: there is none
        wanted: columns beyond the usual ones
        lengths: steps of each episode
        read: begins a pass over all episodes

    Raises:
        DatasetError: a column is missing or not of numbers, or there is no step.
    """
    names, left_out = chosen_columns(path, known, wanted) if known else ((), ())

    def begin() -> Iterator[Trajectory]:
        for episode in read():
            if len(episode["action"]):
                yield {name: episode[name] for name in names}

    found = np.array([length for length in lengths if length], np.int64)
    kinds = {name: (known[name].dtype, known[name].shape[1:]) for name in names}
    schema = make_schema(path, kinds, int(found.max(initial=0)))
    return Source(path=path, kind=kind, schema=schema, lengths=found, begin=begin, left_out=left_out)


def closed_lengths(lengths: NDArray[np.int64], is_known: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Steps of each trajectory after ``closed``, those without any left out.

    Args:
        lengths: before
        is_known: whether the last step terminated, or the observation after it is known
    """
    after = lengths - ~is_known
    return after[after > 0]


def cut(trajectory: Trajectory, schema: ReplaySchema) -> Iterator[Trajectory]:
    """Rows of a store, (n, steps + extra, *shape) each: all whole pieces of ``max_length`` steps, then the rest."""
    size = schema.max_length
    whole, rest = divmod(steps_of(trajectory, schema), size)
    if whole:
        yield {
            column.name: _pieces(trajectory[column.name], size, size + column.extra, whole)
            for column in schema.columns
        }
    if rest:
        yield {column.name: trajectory[column.name][None, whole * size :] for column in schema.columns}


def _pieces(values: NDArray[Any], stride: int, length: int, count: int) -> NDArray[Any]:
    """(count, length, *shape): windows that begin every ``stride`` steps."""
    windows = np.lib.stride_tricks.sliding_window_view(values, length, axis=0)[::stride][:count]
    return np.moveaxis(windows, -1, 1)
