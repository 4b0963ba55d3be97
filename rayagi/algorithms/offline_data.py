"""A recorded dataset in a replay store, one shard in each GMI, and the batches that all GMIs draw from it together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.protocols import EnvInfo
from actors.replay import (
    Column,
    Gatherer,
    ReplaySchema,
    ReplayStore,
    Selection,
    Subscription,
    SubSequences,
    select,
)
from actors.rollout import obs_type
from collectives.communicator import Communicator
from collectives.objects import all_gather_objects
from rayagi.algorithms.action_range import RangeCheck, clipped, refuse_other_units
from rayagi.algorithms.normalisers import Moments, merged
from rayagi.algorithms.transitions import TransitionLayout, TransitionRows, recorded_rows
from rayagi.config.errors import ConfigError
from rayagi.config.off_policy import OffPolicySpec
from rayagi.config.offline import OfflineSpec
from rayagi.config.spec import RunSpec
from rayagi.models.heads import Head
from rayagi.replay.loading import fill, open_source
from rayagi.replay.trajectories import Source, TrajectoryBatch, is_obs, listed
from rayagi.serving.errors import DatasetError
from rayagi.serving.manifest import UNNAMED_TASK, DatasetFolder

_SHORT_STEPS = 16
"""Of the trajectories of a batch, on average, below which their statistics are computed together."""
ROW_STEPS = 64
"""Longest row of single timesteps. Rows are blocks of equal size: longer ones waste memory with short episodes."""
_TIMESTEPS = SubSequences(1)
"""All timesteps with equal probability."""


class OfflineData:
    """This GMI's shard of a dataset.

    Row r of the dataset, in its order, has the global index r whatever the number of shards, so the lists that are drawn do
    not depend on it.
    """

    def __init__(
        self,
        source: Source,
        communicator: Communicator,
        *,
        subscriptions: Sequence[Subscription],
        seed: int,
        row_steps: int | None = ROW_STEPS,
        local_shards: int = 1,
    ) -> None:
        """Read this GMI's rows. Every GMI calls it.

        Args:
            source: a dataset, as of ``source_of``
            communicator: of all GMIs
            subscriptions: what a batch has: columns of the source, or windows of them
            seed: of the draws
            row_steps: longer episodes are cut into rows of so many timesteps; None: a row is an episode
            local_shards: shards in this GMI; more than 1 only if it is alone

        Raises:
            DatasetError: the dataset is damaged.
            ReplayError: the rows do not fit into memory.
        """
        self._communicator, self._seed = communicator, seed
        longest = source.schema.max_length
        schema = ReplaySchema(
            source.schema.columns, longest if row_steps is None else min(row_steps, longest)
        )
        rows = int((-(-source.lengths // schema.max_length)).sum())
        num_shards = communicator.world_size * local_shards
        self.stores: list[ReplayStore] = []
        for shard in range(communicator.rank, num_shards, communicator.world_size):
            store = ReplayStore.create(
                schema, -(-rows // num_shards), selectors=(_TIMESTEPS,), shard=shard, num_shards=num_shards
            )
            self.stores.append(store)
            fill(store, source)
        self._own = OwnRows(self.stores, subscriptions)
        self._exchange = (
            partial(all_gather_objects, group=communicator) if communicator.world_size > 1 else None
        )

    def select(self, batch_size: int, draw: int) -> Selection:
        """Timesteps of the whole dataset: the same list on every GMI. Collective."""
        stores = self.stores if self._exchange is None else self.stores[0]
        return select(stores, _TIMESTEPS, batch_size, seed=self._seed, draw=draw, exchange=self._exchange)

    def batch(self, batch_size: int, draw: int) -> dict[str, Tensor]:
        """What this GMI has of ``select``: (n, ...) of each subscription, in the list's order within each shard. Collective.

        The mask of a window is named ``NAME mask``; ``step`` has the selected timesteps, ``position`` their places in the
        list. Valid until the next call.
        """
        return self._own(self.select(batch_size, draw))

    def close(self) -> None:
        """Release the rows."""
        for store in self.stores:
            store.close()


@dataclass(slots=True)
class DataStatistics:
    """Of a whole dataset, equal on all GMIs.

    Attributes:
        observations: moments of the observations that actions are for, (obs_dim,)
        returns: undiscounted return of each episode; empty without rewards
        notes: what to say of actions beyond the environment's range, if there are some
    """

    observations: Moments
    returns: list[float] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def scan(source: Source, info: EnvInfo) -> DataStatistics:
    """Read a dataset once, before its actions are ``clipped``.

    Raises:
        DatasetError: it has values that are not finite, or a component is beyond the environment's range in every action.
    """
    (obs_dim,) = next(column.shape for column in source.schema.columns if column.name == "obs")
    found, episodes, ranges = DataStatistics(Moments.empty((obs_dim,))), 0, RangeCheck(info)
    for batch in source.batches():
        for name, what in (("obs", "an observation"), ("action", "an action"), ("reward", "a reward")):
            if name in batch.columns:
                _refuse_nonfinite(source, episodes, batch, name, what)
        ranges.add(batch.columns["action"])
        # Short trajectories together: merging each would take longer than reading them.
        are_short = batch.num_steps < _SHORT_STEPS * len(batch.lengths)
        each_obs = (each["obs"][:-1] for each in batch.trajectories())
        for obs in [batch.shifted("obs")] if are_short else each_obs:
            found.observations = merged(found.observations, Moments.from_batch(torch.from_numpy(obs)))
        if "reward" in batch.columns:
            found.returns += batch.returns().tolist()
        episodes += len(batch.lengths)
    ranges.refuse_other_units(source)
    found.notes = ranges.notes(source)
    return found


def _refuse_nonfinite(source: Source, first: int, batch: TrajectoryBatch, name: str, what: str) -> None:
    """Raise DatasetError: a value is not finite. ``first``: number of the batch's first episode."""
    values = batch.columns[name]
    if not np.isfinite(values).all():
        bad = next(n for n, each in enumerate(batch.trajectories()) if not np.isfinite(each[name]).all())
        reason = f"episode {first + bad} has {what} that is not finite as {values.dtype}: leave it out"
        raise DatasetError(str(source.path), reason)


def source_of(path: str, info: EnvInfo, *, imitation: bool = False, obs_keys: Sequence[str] = ()) -> Source:
    """Open a dataset of an environment's experience, with the columns and types that learning needs.

    Args:
        path, info: of the dataset and of the environment
        imitation: without rewards, and flags of ends
        obs_keys: parts of the dataset's observations to join, in this order; empty: as the environment joins its own

    Raises:
        DatasetError: it cannot be read, or its observations or actions are not those of the environment; reading it raises
            one too, for an action that is none of the environment's choices.
    """
    source, wanted, parts = _fitting(path, info, imitation=imitation, obs_keys=obs_keys)

    def converted(batch: TrajectoryBatch) -> TrajectoryBatch:
        given = dict(batch.columns)
        if parts:
            given["obs"] = np.concatenate([given[name].reshape(len(given[name]), -1) for name in parts], 1)
        with np.errstate(over="ignore"):  # beyond float32 it is infinite, which ``scan`` refuses
            found = {
                each.name: given[each.name].reshape(-1, *each.shape).astype(each.dtype, copy=False)
                for each in wanted
            }
        if info.action.is_discrete:
            _refuse_other_choices(path, found["action"], info)
        return TrajectoryBatch(found, batch.lengths)

    return replace(
        source,
        schema=ReplaySchema(wanted, source.schema.max_length),
        begin=lambda: map(converted, source.begin()),
    )


def _fitting(
    path: str, info: EnvInfo, *, imitation: bool, obs_keys: Sequence[str]
) -> tuple[Source, tuple[Column, ...], tuple[str, ...]]:
    """A dataset; the columns that learning needs; and those that are parts of the observation, if they are to be joined.

    Raises:
        DatasetError: it has others.
    """
    source = open_source(path, columns=[f"obs.{key}" for key in obs_keys])
    columns = {column.name: column for column in source.schema.columns}
    parts = _parts(path, columns, info, obs_keys)
    if parts and len(parts) < sum(map(is_obs, columns)) and source.kind != "replay":  # which is read whole
        # The others, such as images, are not to be read.
        source = open_source(path, columns=parts)
    if parts:
        size = sum(math.prod(columns[name].shape) for name in parts)
        dtype = np.result_type(*(columns[name].dtype for name in parts))
        columns["obs"] = Column(name="obs", dtype=dtype, shape=(size,), extra=1)
    action_type = np.int64 if info.action.is_discrete else np.float32
    wanted: tuple[Column, ...] = (
        Column(name="obs", dtype=np.float32, shape=(info.obs_dim,), extra=1),
        Column(name="action", dtype=action_type, shape=info.action.shape),
    )
    if not imitation:
        wanted += (Column(name="reward", dtype=np.float32), Column(name="terminated", dtype=np.bool_))
    for column in wanted:
        found = columns.get(column.name)
        if found is None:
            raise DatasetError(path, f"has no column {column.name}: it has {listed(columns)}")
        if found.extra != column.extra:
            raise DatasetError(
                path,
                f"has {found.extra} {column.name} beyond a row's last step, where {column.extra} is needed",
            )
        fits = found.shape == column.shape or {found.shape, column.shape} == {(), (1,)}
        is_choice = column.name == "action" and found.dtype.kind in "iu" and not found.shape
        is_other = is_choice and not info.action.is_discrete
        if is_other or not fits or not np.can_cast(found.dtype, column.dtype, "same_kind"):
            raise DatasetError(
                path,
                f"has {column.name} of {found.dtype}{list(found.shape)}, and {info.env_id} has "
                f"{column.dtype}{list(column.shape)}",
            )
    return source, wanted, parts


def _parts(
    path: str, columns: Mapping[str, Column], info: EnvInfo, obs_keys: Sequence[str]
) -> tuple[str, ...]:
    """Columns that make up the observation, in this order: as the user says, else as the environment has them.

    Raises:
        DatasetError: they are not those of the environment, or it does not say which ones they are.
    """
    given = tuple(f"obs.{key}" for key in obs_keys)
    members = tuple(f"obs.{key}" for key, _ in info.obs_members)
    sizes = {name: math.prod(column.shape) for name, column in columns.items() if name.startswith("obs.")}
    if given and members and [sizes[name] for name in given] != [size for _, size in info.obs_members]:
        has = ", ".join(f"{key}[{size}]" for key, size in info.obs_members)
        named = ", ".join(f"{key}[{sizes[name]}]" for key, name in zip(obs_keys, given, strict=True))
        raise DatasetError(path, f"has {named} of obs_keys where {info.env_id} has {has}, in this order")
    if given or "obs" in columns:
        return given
    if members and sizes.keys() >= {*members}:
        return members
    if len(sizes) == 1 and not members:
        return tuple(sizes)
    has = listed(f"{name.removeprefix('obs.')}[{size}]" for name, size in sizes.items())
    which = "in order" if not members else f"for its {', '.join(key for key, _ in info.obs_members)}"
    reason = f"has observations of the parts {has}: say which of them are {info.env_id}'s, {which}, with --obs-keys A,B"
    raise DatasetError(path, f"{reason} (data.obs_keys)")


def refuse_unfit_dataset(path: str, spec: RunSpec, info: EnvInfo) -> None:
    """Refuse the dataset of a run before anything starts: it is opened, and a part of it is read.

    Raises:
        DatasetError: as of ``source_of`` and ``refuse_other_units``.
        ConfigError: the run's replay cannot hold it.
    """
    learning = spec.learning
    imitation = isinstance(learning, OfflineSpec) and learning.imitates
    source = source_of(path, info, imitation=imitation, obs_keys=spec.data.obs_keys)
    if isinstance(learning, OffPolicySpec) and source.num_steps > learning.capacity:
        reason, instead = (
            f"is less than the dataset's {source.num_steps:,} steps",
            f"use at least {source.num_steps}",
        )
        raise ConfigError(f"{spec.algorithm}.capacity", learning.capacity, reason, instead)
    refuse_other_units(source, info)


def other_task(path: str, task: str) -> str:
    """What to say of a dataset that was recorded in another task; empty: it was not, or does not say.

    Sizes have been compared: a task of the same sizes may be the same one renamed, or a mistake.
    """
    if not (Path(path) / "dataset.json").exists():
        return ""
    recorded = DatasetFolder.open(Path(path)).description.task
    if recorded in (task, UNNAMED_TASK):
        return ""
    return f"{path} is of {recorded}: check that its observations and actions mean the same as {task}'s."


def _refuse_other_choices(path: str, actions: NDArray[np.int64], info: EnvInfo) -> None:
    """Raise DatasetError: an action, (L,) or (L, dim), is none of the environment's."""
    options = np.array(info.action.choices or (info.action.num_choices,))
    others = actions[(actions < 0) | (actions >= options)]
    if others.size:
        has = " x ".join(map(str, options))
        reason = (
            f"has the choice {others[0]}, and {info.env_id} has {has} choices, counted from 0: if the dataset's begin with "
            "another number, subtract it"
        )
        raise DatasetError(path, reason)


_MOST_GATHERERS = 128
"""Of different batch sizes; beyond, they are made anew."""


class OwnRows:
    """Copies what this GMI's shards have of a selection, into memory that is reused."""

    def __init__(self, stores: Sequence[ReplayStore], subscriptions: Sequence[Subscription]) -> None:
        """``stores``: this GMI's shards; ``subscriptions``: what is copied of a row."""
        self._stores, self._subscriptions = stores, subscriptions
        self._gatherers: dict[tuple[int, int], tuple[Gatherer, dict[str, Tensor]]] = {}

    def __call__(self, chosen: Selection) -> dict[str, Tensor]:
        """(n, ...) of each subscription, in the list's order within each shard. Valid until the next call.

        The mask of a window is named ``NAME mask``; ``step`` has the selected timesteps, ``position`` their places in the
        list.
        """
        owners = self._stores[0].owner(chosen.keys.indices)
        parts = []
        for number, store in enumerate(self._stores):
            mine = owners == store.base // store.capacity
            keys = type(chosen.keys)(chosen.keys.indices[mine], chosen.keys.generations[mine])
            own = Selection(keys, chosen.steps[mine], chosen.probabilities[mine], chosen.weights[mine])
            gatherer, tensors = self._gatherer(number, len(own))
            gatherer(own)
            parts.append(
                {
                    **tensors,
                    "step": torch.from_numpy(own.steps),
                    "position": torch.from_numpy(np.flatnonzero(mine)),
                }
            )
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _gatherer(self, store: int, n: int) -> tuple[Gatherer, dict[str, Tensor]]:
        if (store, n) not in self._gatherers:
            if len(self._gatherers) == _MOST_GATHERERS:
                self._gatherers.clear()
            gatherer = Gatherer(self._stores[store], self._subscriptions, n)
            tensors = {name: torch.from_numpy(values) for name, values in gatherer.values.items()}
            masks = {
                f"{name} mask": torch.from_numpy(mask)
                for name, mask in gatherer.masks.items()
                if mask.ndim == 2
            }
            self._gatherers[store, n] = gatherer, {**tensors, **masks}
        return self._gatherers[store, n]


class RecordedTransitions:
    """The transitions of a dataset, shared out over the trainers."""

    def __init__(self, path: str, info: EnvInfo, obs_keys: Sequence[str] = ()) -> None:
        """Open a dataset of an environment's experience; arguments as of ``source_of``.

        Raises:
            DatasetError: it cannot be read, or is of another environment.
        """
        self._recorded, self._info = source_of(path, info, obs_keys=obs_keys), info
        self._source = clipped(self._recorded, info)

    @property
    def num_steps(self) -> int:
        """Of the whole dataset."""
        return self._source.num_steps

    def scan(self) -> DataStatistics:
        """As of the function ``scan``."""
        return scan(self._recorded, self._info)

    def num_rows(self, steps: int) -> int:
        """Rows of up to so many transitions that it needs."""
        return int((-(-self._source.lengths // steps)).sum())

    def rows(
        self, head: Head, layout: TransitionLayout, gamma: float, n_step: int, *, part: int, parts: int
    ) -> Iterator[TransitionRows]:
        """Rows ``part``, ``part + parts``, ... of the dataset's transitions, some at a time.

        ``head``: whose actions a rollout holds; ``part``: rank of the trainer; ``parts``: number of trainers.
        """
        position = 0
        device = next((each.device for each in head.buffers()), torch.device("cpu"))
        for batch in self._source.batches():
            actions = head.from_environment(torch.from_numpy(batch.columns["action"]).to(device)).cpu()
            rewards, terminated = (torch.from_numpy(batch.columns[name]) for name in ("reward", "terminated"))
            obs, next_obs = (self._as_stored(torch.from_numpy(batch.shifted("obs", i))) for i in (0, 1))
            is_last = torch.zeros_like(terminated)
            is_last[batch.lasts] = True
            rows = recorded_rows(layout, obs, next_obs, actions, rewards, terminated, is_last, gamma, n_step)
            yield rows.part((part - position) % parts, parts)
            position += len(rows.lengths)

    def _as_stored(self, obs: Tensor) -> Tensor:
        """Observations of the environment's type. Raises DatasetError: pixels are no bytes."""
        dtype = obs_type(self._info)
        stored = obs.to(dtype)
        if dtype == torch.uint8 and not torch.equal(stored, obs):
            reason = f"has pixels other than whole numbers from 0 to 255, which {self._info.env_id} has: convert them"
            raise DatasetError(str(self._source.path), reason)
        return stored
