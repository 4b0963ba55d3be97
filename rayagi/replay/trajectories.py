"""Trajectories between files and replay stores: the names of their columns, and what a reader of a format offers.

| column | steps | what |
|---|---|---|
| obs, or obs.PART for each part | L + 1 | observations; the last is the one after the last action |
| action | L | |
| reward | L | where a format has one |
| terminated, truncated | L | bool; a trajectory cut by the end of a recording has neither on its last step |
| log_prob, policy_version | L | where a format has them |

Further columns have L steps, and are read only if they are named; one of a taken name is ``infos/NAME``. If parts of the
observation are named, the others are not read.

Readers and writers pass ``TrajectoryBatch``es on: a dataset may have a million trajectories of one step.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from actors.replay import Column, ReplaySchema
from actors.replay.errors import ReplayError
from placement.errors import counted
from placement.inventory import limits
from rayagi.run.quantities import bytes_text
from rayagi.serving.errors import DatasetError, ExportError

Trajectory = dict[str, NDArray[Any]]
"""By column, (L + extra, *shape)."""
Value = TypeVar("Value")
"""Of a column: an array, or its name in a file."""
Progress = Callable[[int, int], object]
"""Called with the steps that are done and all steps."""
_LARGE_BYTES = 2**26
"""From which on it is looked up how much memory there is."""
BATCH_BYTES = 2**20
"""Of a batch, about; a longer trajectory is one alone."""
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


@dataclass(frozen=True, slots=True)
class TrajectoryBatch:
    """Trajectories that follow each other, end to end in each column.

    Attributes:
        columns: by name, (steps of all + extra steps of each, *shape)
        lengths: steps of each, (n,)
    """

    columns: Trajectory
    lengths: NDArray[np.int64]

    @property
    def num_steps(self) -> int:
        """Of all trajectories."""
        return int(self.lengths.sum())

    @property
    def begins(self) -> NDArray[np.int64]:
        """Number of each trajectory's first step among all steps, (n,)."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def owners(self) -> NDArray[np.int64]:
        """Number of the trajectory of each step, from 0 in this batch, (steps,)."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int64), self.lengths)

    @property
    def times(self) -> NDArray[np.int64]:
        """Number of each step in its trajectory, (steps,)."""
        return np.arange(self.num_steps, dtype=np.int64) - np.repeat(self.begins, self.lengths)

    @property
    def lasts(self) -> NDArray[np.int64]:
        """Number of each trajectory's last step among all steps, (n,)."""
        return np.cumsum(self.lengths) - 1

    def shifted(self, name: str, offset: int = 0) -> NDArray[Any]:
        """Values of a column ``offset`` steps after each step, (steps, *shape). Extra steps are the most that it can be."""
        values = self.columns[name]
        if len(self.lengths) == 1:
            return values[offset : offset + self.num_steps]
        return values[np.arange(self.num_steps) + self._extra(name) * self.owners + offset]

    def returns(self) -> NDArray[np.float64]:
        """Sum of rewards of each trajectory, (n,)."""
        each_step = self.shifted("reward").reshape(self.num_steps, -1).sum(1, dtype=np.float64)
        return np.asarray(np.add.reduceat(each_step, self.begins))

    def trajectories(self) -> Iterator[Trajectory]:
        """One by one, as views."""
        extras = {name: self._extra(name) for name in self.columns}
        for number, (begin, end) in enumerate(zip(self.begins.tolist(), self.lasts.tolist(), strict=True)):
            yield {
                name: values[begin + number * extras[name] : end + 1 + (number + 1) * extras[name]]
                for name, values in self.columns.items()
            }

    def _extra(self, name: str) -> int:
        return (len(self.columns[name]) - self.num_steps) // len(self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A dataset that is read as a stream.

    Attributes:
        path: file or folder
        kind: name of the format
        schema: columns that are read; ``max_length`` is that of the longest trajectory
        lengths: steps of each trajectory, (n,)
        begin: begins a pass over all trajectories; ``batches`` and ``read`` are those to use
        left_out: columns of the dataset that are not read
        is_live: others may overwrite trajectories meanwhile, which are then left out
    """

    path: Path
    kind: str
    schema: ReplaySchema
    lengths: NDArray[np.int64]
    begin: Callable[[], Iterator[TrajectoryBatch]]
    left_out: tuple[str, ...] = ()
    is_live: bool = False

    @property
    def num_steps(self) -> int:
        """Of all trajectories."""
        return int(self.lengths.sum())

    def batches(self) -> Iterator[TrajectoryBatch]:
        """All trajectories in the order of ``lengths``. Needs memory for a few megabytes of them, or one.

        Raises:
            DatasetError: a file is damaged, a trajectory does not fit the schema, or they are not those of ``lengths``.
        """
        number = 0
        with reading(self.path, self.kind):
            for batch in self.begin():
                self._check(number, batch)
                number += len(batch.lengths)
                yield batch
            if number != len(self.lengths) and not self.is_live:
                announced = counted(len(self.lengths), "trajectory", "trajectories")
                raise DatasetError(str(self.path), f"is damaged: {number:,} of its {announced} can be read")

    def read(self) -> Iterator[Trajectory]:
        """The same, one by one."""
        return one_by_one(self.batches())

    def _check(self, number: int, batch: TrajectoryBatch) -> None:
        """Refuse a batch that is not of this schema, or not of ``lengths``; ``number``: of its first trajectory."""
        self._check_lengths(number, batch.lengths)
        count = len(batch.lengths)
        for column in self.schema.columns:
            values = batch.columns[column.name]
            shape = (batch.num_steps + count * column.extra, *column.shape)
            if values.dtype != column.dtype or values.shape != shape:
                which = (
                    f"trajectory {number} has"
                    if count == 1
                    else f"trajectories {number} to {number + count - 1} have"
                )
                raise DatasetError(
                    str(self.path),
                    f"{which} {column.name} of {values.dtype}{list(values.shape)} where "
                    f"{column.dtype}{list(shape)} is expected",
                )

    def _check_lengths(self, number: int, lengths: NDArray[np.int64]) -> None:
        if self.is_live:
            is_wrong = (lengths < 1) | (lengths > self.schema.max_length)
        else:
            expected = self.lengths[number : number + len(lengths)]
            if len(expected) < len(lengths):
                reason = f"is damaged: it has more trajectories than the {len(self.lengths):,} of its index"
                raise DatasetError(str(self.path), reason)
            is_wrong = lengths != expected
        for wrong in np.flatnonzero(is_wrong)[:1].tolist():
            steps, announced = counted(int(lengths[wrong]), "step"), int(self.lengths[number + wrong])
            reason = f"is damaged: trajectory {number + wrong} has {steps} where its index says {announced:,}"
            raise DatasetError(str(self.path), reason)


def one_by_one(batches: Iterable[TrajectoryBatch]) -> Iterator[Trajectory]:
    """The trajectories of batches."""
    for batch in batches:
        yield from batch.trajectories()


def packed(trajectories: Iterable[Trajectory]) -> Iterator[TrajectoryBatch]:
    """Batches of trajectories that have an action for each step, and columns of the same types and shapes."""
    waiting: list[Trajectory] = []
    kinds: list[Any] = []
    size = 0
    for trajectory in trajectories:
        steps = len(trajectory["action"])
        own = [
            (name, values.dtype, values.shape[1:], len(values) - steps) for name, values in trajectory.items()
        ]
        if waiting and own != kinds:
            yield _joined(waiting)
            waiting, size = [], 0
        kinds = own
        waiting.append(trajectory)
        size += sum(values.nbytes for values in trajectory.values())
        if size >= BATCH_BYTES:
            yield _joined(waiting)
            waiting, size = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(trajectories: Sequence[Trajectory]) -> TrajectoryBatch:
    lengths = np.array([len(each["action"]) for each in trajectories], np.int64)
    if len(trajectories) == 1:
        return TrajectoryBatch(trajectories[0], lengths)
    columns = {name: np.concatenate([each[name] for each in trajectories]) for name in trajectories[0]}
    return TrajectoryBatch(columns, lengths)


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Convert what libraries raise for a bad file, or one that needs too much memory, to a ``DatasetError``."""
    try:
        yield
    except ReplayError:  # of a store or a saved replay: it says what is wrong
        raise
    except MemoryError as error:
        raise DatasetError(str(path), f"needs more memory to be read than there is: {error}") from error
    except _DAMAGE as error:
        first_line = (str(error).splitlines() or [""])[0]
        reason = f"cannot be read as {kind} ({type(error).__name__}: {first_line}): is it whole, and of this layout?"
        raise DatasetError(str(path), reason) from error


def check_fits(path: Path, size: int, what: str) -> None:
    """Refuse what a file announces if it is more than this process may have in memory, before it is read.

    Args:
        path: for the error
        size: bytes
        what: of which they are

    Raises:
        DatasetError: there is not so much memory.
    """
    if size > _LARGE_BYTES and size > (most := limits.memory_bytes()):
        reason = f"announces {bytes_text(size)} {what}, where this process may use {bytes_text(most)}: is it damaged?"
        raise DatasetError(str(path), reason)


def native(dtype: Any) -> np.dtype[Any]:
    """The type in this machine's byte order."""
    return np.dtype(dtype).newbyteorder("=")


def is_obs(name: str) -> bool:
    """Whether a column is the observation or a part of it."""
    return name == "obs" or name.startswith("obs.")


def further_columns(taken: Iterable[str], others: Mapping[str, Value]) -> dict[str, Value]:
    """Further columns of a dataset by names that its format's own columns, ``taken``, do not have.

    One of a taken name, or of a part of the observation that is taken, is named ``infos/NAME``.
    """
    taken = set(taken)
    has_obs = any(map(is_obs, taken))
    return {
        f"infos/{name}" if name in taken or (has_obs and is_obs(name)) else name: value
        for name, value in others.items()
    }


def listed(names: Iterable[str]) -> str:
    """Names for a message: a dozen, and how many there are."""
    names = list(names)
    return f"{', '.join(names[:12])}{f', ... ({len(names):,} in all)' if len(names) > 12 else ''}"


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
    for batch in source.batches():
        actions = batch.columns["action"]
        least, most = min(least, actions.min()), max(most, actions.max())
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
    path: Path, known: Iterable[str], wanted: Sequence[str], theirs: Mapping[str, str] = MappingProxyType({})
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns to read, ``wanted`` beyond the usual ones, and those to leave out, of those that a dataset has.

    Parts of the observation in ``wanted`` are read in place of all of its parts.

    ``theirs``: the format's own names of columns, for messages.

    Raises:
        DatasetError: a wanted or required column is missing.
    """
    known = tuple(known)
    required = () if any(map(is_obs, known)) else ("obs",)
    for name in (*required, "action", *wanted):
        if name not in known:
            also = f" or {theirs[name]!r}" if theirs.get(name, name) != name else ""
            reason = f"has no column {name!r}{also}: its columns are {listed(known)}"
            raise DatasetError(str(path), reason)
    parts = tuple(name for name in dict.fromkeys(wanted) if name.startswith("obs."))
    read = parts or tuple(name for name in known if name.startswith("obs."))
    read += tuple(name for name in _USUAL if name in known)
    read += tuple(name for name in dict.fromkeys(wanted) if name not in read)
    return read, tuple(name for name in known if name not in read)


def closed(batch: TrajectoryBatch, next_obs: Mapping[str, NDArray[Any]]) -> TrajectoryBatch:
    """Trajectories with the observation after their last action.

    Learners bootstrap from that observation, unless the step terminated. Where a file does not have it, the last observation
    is repeated after a terminated step. Else the last step is left out: its own observation is then the one after the step
    before, which takes its truncation.

    Args:
        batch: all columns, ``obs`` or all its parts included, with as many rows as steps
        next_obs: the observation after the last action of each, by column, (n, *shape); empty: not known

    Returns:
        The trajectories that have a step left: there may be none.

    Raises:
        ValueError: an observation's ``next_obs`` is of another type.
    """
    ends = batch.lasts + 1
    is_known = batch.columns["terminated"][batch.lasts] | bool(next_obs)
    lengths = batch.lengths - ~is_known
    kept = lengths > 0
    begins, ends, lengths = batch.begins[kept], ends[kept], lengths[kept]
    # Step t of a trajectory is its row t. Its observation t is that of row t, or of its last row.
    rows = _ranges(begins, lengths)
    obs_rows = np.minimum(_ranges(begins, lengths + 1), np.repeat(ends - 1, lengths + 1))
    columns = {name: values[obs_rows if is_obs(name) else rows] for name, values in batch.columns.items()}
    for name, after in next_obs.items():
        if not np.can_cast(after.dtype, columns[name].dtype, "same_kind"):
            raise ValueError(f"next_{name} is of {after.dtype} where {name} is of {columns[name].dtype}")
        columns[name][np.cumsum(lengths + 1) - 1] = after[kept]
    # Steps that are left out were the last ones: those before them are now.
    columns["truncated"][np.cumsum(lengths) - 1] |= batch.columns["truncated"][ends - 1]
    return TrajectoryBatch(columns, lengths)


def closed_all(episodes: Iterable[Trajectory]) -> Iterator[TrajectoryBatch]:
    """``closed`` of those that have a step left; the last of each one's ``next_obs`` is the one after its last action."""
    for batch in packed(episodes):
        columns = dict(batch.columns)
        after = columns.pop("next_obs", None)
        next_obs = {} if after is None else {"obs": after[batch.lasts]}
        found = closed(TrajectoryBatch(columns, batch.lengths), next_obs)
        if len(found.lengths):
            yield found


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

    def begin() -> Iterator[TrajectoryBatch]:
        episodes = (episode for episode in read() if len(episode["action"]))
        return packed({name: episode[name] for name in names} for episode in episodes)

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


def cut(
    batch: TrajectoryBatch, schema: ReplaySchema, most: int
) -> Iterator[tuple[Trajectory, NDArray[np.int64]]]:
    """Rows of a store: the trajectories of a batch, in pieces of at most ``max_length`` steps.

    Returns:
        At most ``most`` rows at a time: (n, steps of the longest + extra, *shape) of each column, and their lengths (n,).
        Nothing is said of values beyond the length.
    """
    size, first = schema.max_length, batch.begins
    pieces = -(-batch.lengths // size)
    owners = np.repeat(np.arange(len(pieces)), pieces)
    # Piece p of a trajectory begins with its step p * size.
    begins = size * _ranges(np.zeros_like(pieces), pieces)
    lengths = np.minimum(size, batch.lengths[owners] - begins)
    begins += first[owners]
    for at in range(0, len(owners), most):
        part = slice(at, at + most)
        longest, rows = int(lengths[part].max()), Trajectory()
        for column in schema.columns:
            values = batch.columns[column.name]
            places = (begins[part] + column.extra * owners[part])[:, None] + np.arange(longest + column.extra)
            rows[column.name] = values[np.minimum(places, len(values) - 1)]
        yield rows, lengths[part]


def split_at_flags(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Trajectories that end where they terminate or are truncated: each goes on as another one behind such a step.

    The observation after that step is the first one of the next piece too.
    """
    ends = np.zeros(batch.num_steps, bool)
    for name in FLAGS:
        if name in batch.columns:
            ends |= batch.columns[name]
    ends[batch.lasts] = True
    lasts = np.flatnonzero(ends)
    if len(lasts) == len(batch.lengths):
        return batch
    lengths = np.diff(lasts, prepend=-1)
    begins = lasts + 1 - lengths
    # Row of a piece's first observation: each trajectory before it has one row more than steps.
    obs_rows = _ranges(begins + batch.owners[begins], lengths + 1)
    columns = {name: values[obs_rows] if is_obs(name) else values for name, values in batch.columns.items()}
    return TrajectoryBatch(columns, lengths)


def _ranges(begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """``sizes[0]`` numbers from ``begins[0]`` on, then ``sizes[1]`` from ``begins[1]`` on, and so forth."""
    ends = np.cumsum(sizes)
    return np.arange(sizes.sum(), dtype=np.int64) + np.repeat(begins - (ends - sizes), sizes)
