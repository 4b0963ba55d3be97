"""A recorded dataset in a replay store, one shard in each GMI, and the batches that all GMIs draw from it together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from actors.protocols import EnvInfo
from actors.replay import Gatherer, Selection, Sequences, Subscription, select
from collectives.communicator import Communicator
from collectives.objects import all_gather_objects
from collectives.statistics import Moments, merged
from rayagi.replay.loading import load, open_source
from rayagi.replay.trajectories import Source
from rayagi.serving.errors import DatasetError

ROW_STEPS = 64
"""Longest row of single timesteps. Rows are blocks of equal size: longer ones waste memory with short episodes."""
_TIMESTEPS = Sequences(1)
"""All timesteps with equal probability."""
_MOST_GATHERERS = 128
"""Of different batch sizes; beyond, they are made anew."""


class OfflineData:
    """This GMI's shard of a dataset.

    Row r of the dataset, in its order, has the global index r whatever the number of shards, so the lists that are drawn do
    not depend on it.
    """

    def __init__(
        self,
        path: str,
        info: EnvInfo,
        communicator: Communicator,
        *,
        subscriptions: Sequence[Subscription],
        seed: int,
        row_steps: int | None = ROW_STEPS,
    ) -> None:
        """Read this GMI's shard. Every GMI calls it.

        Args:
            path: of a dataset that rayagi.replay.loading knows
            info: the environment that it must be of
            communicator: of all GMIs, a shard each
            subscriptions: what a batch has: columns obs, action, reward, terminated, or windows of them
            seed: of the draws
            row_steps: longer episodes are cut into rows of so many timesteps; None: a row is an episode

        Raises:
            DatasetError: it is of another schema, has no episodes, or has values that are not finite.
            ReplayError: the shard does not fit into memory.
        """
        self._communicator, self._seed = communicator, seed
        self._subscriptions = subscriptions
        source = source_of(path, info)
        self.statistics = scan(source)
        longest = source.schema.max_length
        self.store = load(
            path,
            max_length=longest if row_steps is None else min(row_steps, longest),
            selectors=(_TIMESTEPS,),
            shard=communicator.rank,
            num_shards=communicator.world_size,
        )
        self._gatherers: dict[int, tuple[Gatherer, dict[str, Tensor]]] = {}
        self._exchange = partial(all_gather_objects, communicator=communicator)

    def select(self, batch_size: int, draw: int) -> Selection:
        """Timesteps of the whole dataset: the same list on every GMI. Collective."""
        return select(self.store, _TIMESTEPS, batch_size, seed=self._seed, draw=draw, exchange=self._exchange)

    def batch(self, batch_size: int, draw: int) -> dict[str, Tensor]:
        """This shard's part of ``select``, in its order: (n, ...) of each subscription. Valid until the next call.

        The mask of a window is named ``NAME mask``. Collective.
        """
        chosen = self.select(batch_size, draw)
        mine = self.store.owner(chosen.keys.indices) == self._communicator.rank
        keys = type(chosen.keys)(chosen.keys.indices[mine], chosen.keys.generations[mine])
        own = Selection(keys, chosen.steps[mine], chosen.probabilities[mine], chosen.weights[mine])
        gatherer, tensors = self._gatherer(len(own))
        gatherer(own)
        return tensors

    def _gatherer(self, n: int) -> tuple[Gatherer, dict[str, Tensor]]:
        if n not in self._gatherers:
            if len(self._gatherers) == _MOST_GATHERERS:
                self._gatherers.clear()
            gatherer = Gatherer(self.store, self._subscriptions, n)
            tensors = {name: torch.from_numpy(values) for name, values in gatherer.values.items()}
            masks = {
                f"{name} mask": torch.from_numpy(mask)
                for name, mask in gatherer.masks.items()
                if mask.ndim == 2
            }
            self._gatherers[n] = gatherer, {**tensors, **masks}
        return self._gatherers[n]

    def close(self) -> None:
        """Release the shard."""
        self.store.close()


@dataclass(slots=True)
class DataStatistics:
    """Of a whole dataset, equal on all GMIs.

    Attributes:
        observations: moments of the observations that actions are for, (obs_dim,)
        returns: undiscounted return of each episode
    """

    observations: Moments
    returns: list[float] = field(default_factory=list)


def scan(source: Source) -> DataStatistics:
    """Read a dataset once.

    Raises:
        DatasetError: it has values that are not finite.
    """
    (obs_dim,) = next(column.shape for column in source.schema.columns if column.name == "obs")
    found = DataStatistics(Moments.empty((obs_dim,)))
    for number, trajectory in enumerate(source.read()):
        for name, what in (("obs", "an observation"), ("action", "an action"), ("reward", "a reward")):
            if not np.isfinite(trajectory[name]).all():
                raise DatasetError(
                    str(source.path), f"episode {number} has {what} that is not finite: leave it out"
                )
        batch = Moments.from_batch(torch.from_numpy(trajectory["obs"][:-1]))
        found.observations = merged(found.observations, batch)
        found.returns.append(float(trajectory["reward"].sum(dtype=np.float64)))
    return found


def source_of(path: str, info: EnvInfo) -> Source:
    """Open a dataset of an environment's experience.

    Raises:
        DatasetError: it cannot be read, or its observations or actions are not those of the environment.
    """
    source = open_source(path)
    columns = {column.name: column for column in source.schema.columns}
    if "obs" not in columns or "reward" not in columns:
        raise DatasetError(path, f"has no columns obs and reward: it has {', '.join(columns)}")
    wanted_type = np.dtype(np.int64 if info.action.is_discrete else np.float32)
    for name, dtype, shape in (
        ("obs", np.dtype(np.float32), (info.obs_dim,)),
        ("action", wanted_type, info.action.shape),
    ):
        found = columns[name]
        if (found.dtype, found.shape) != (dtype, shape):
            raise DatasetError(
                path,
                f"has {name} of {found.dtype}{list(found.shape)}, and {info.env_id} has {dtype}{list(shape)}",
            )
    return source
