"""Reads a dataset, as a pyarrow dataset or episode by episode.

::

    dataset = open_dataset("data/ant")
    dataset.arrow().to_table(columns=["obs", "action"])
    for episode in dataset.episodes():
        print(episode.number, episode.rewards.sum())

Without this code, ``pyarrow.dataset.dataset("data/ant/data")`` has the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.dataset
from numpy.typing import NDArray

from rayagi.serving.column_layout import ColumnLayout
from rayagi.serving.errors import DatasetError
from rayagi.serving.manifest import CompleteFile, DatasetFolder
from rayagi.serving.row_batches import row_batches
from rayagi.serving.statistics import FileStatistics

_COLUMNS = (
    "episode",
    "step",
    "env",
    "policy_version",
    "obs",
    "action",
    "log_prob",
    "reward",
    "terminated",
    "truncated",
    "final_obs",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One episode of L steps, whole or cut by the end of the recording.

    Attributes:
        number: unique in the dataset
        env: environment, counted over all GMIs
        obs: observations, the one after the last step included            (L + 1, obs_dim) float32
        actions: as the simulator used them                                (L, dim) float32, or (L,) int64
        rewards: of each step                                              (L,) float32
        terminated: whether the task ended on the last step
        truncated: whether the time limit ended it on the last step; both are false where the recording ended
        policy_versions: number of updates of the policy                   (L,) int64
        log_probs: of the actions under the policy; NaN in old files       (L,) float32
    """

    number: int
    env: int
    obs: NDArray[np.float32]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]
    terminated: bool
    truncated: bool
    policy_versions: NDArray[np.int64]
    log_probs: NDArray[np.float32]

    @property
    def is_whole(self) -> bool:
        """Whether it terminated or reached the time limit."""
        return self.terminated or self.truncated


class Dataset:
    """The complete files of a dataset's folder."""

    def __init__(self, folder: DatasetFolder) -> None:
        self.folder = folder
        self.files: list[CompleteFile] = folder.files()
        """Complete files, as listed when the dataset was opened."""

    @property
    def statistics(self) -> FileStatistics:
        """Merged statistics of all complete files."""
        return self.folder.statistics()

    def arrow(self) -> pyarrow.dataset.Dataset:
        """All rows as a pyarrow dataset."""
        return self._arrow([file.path for file in self.files])

    def _arrow(self, paths: list[Path]) -> pyarrow.dataset.Dataset:
        description = self.folder.description
        return pyarrow.dataset.dataset(
            [str(path) for path in paths],
            format="parquet" if description.format == "parquet" else "ipc",
            schema=description.layout.arrow({}),
        )

    def episodes(self, *, whole_only: bool = False) -> Iterator[Episode]:
        """Each episode once, GMI by GMI in the order of their ends; episodes cut by the end of the recording come last.

        If the last rows of an episode were lost (a full disk), it ends with the last row whose next observation is known.
        Memory is that of the running episodes.

        Raises:
            DatasetError: a file is damaged.
        """
        for _, files in groupby(self.files, key=lambda file: (file.session, file.gmi)):
            for episode in self._of_one_writer([file.path for file in files]):
                if episode.is_whole or not whole_only:
                    yield episode

    def _of_one_writer(self, paths: list[Path]) -> Iterator[Episode]:
        running: dict[int, list[Episode]] = {}
        """Parts of each episode that may have more rows."""
        for path in paths:
            for batch in self._batches(path):
                for part, final_obs in _runs_of(batch):
                    running.setdefault(part.number, []).append(part)
                    if final_obs is not None:
                        yield _joined(running.pop(part.number), [final_obs[None]])
        for parts in running.values():
            if sum(len(part.rewards) for part in parts) > 1:
                yield _joined(parts, [])

    def _batches(self, path: Path) -> Iterator[pa.RecordBatch]:
        """Rows of a file. Raises DatasetError: it cannot be read."""
        try:
            yield from row_batches(self._arrow([path]), _COLUMNS)
        except (OSError, pa.ArrowException) as error:
            first_line = (str(error).splitlines() or [""])[0]
            reason = f"data/{path.name} cannot be read ({type(error).__name__}: {first_line}): is it whole?"
            raise DatasetError(str(self.folder.path), reason) from error


def open_dataset(path: Path | str) -> Dataset:
    """Open a dataset that ``rayagi serve`` wrote.

    Raises:
        DatasetError: there is no dataset, or its layout version differs.
    """
    return Dataset(DatasetFolder.open(Path(path)))


def _joined(parts: list[Episode], final_obs: list[NDArray[np.float32]]) -> Episode:
    """The episode of these parts. Without the observation after it, its last step, whose result is unknown, is left out."""
    obs = np.concatenate([*(part.obs for part in parts), *final_obs])
    steps = len(obs) - 1
    return replace(
        parts[-1],
        obs=obs,
        actions=np.concatenate([part.actions for part in parts])[:steps],
        rewards=np.concatenate([part.rewards for part in parts])[:steps],
        policy_versions=np.concatenate([part.policy_versions for part in parts])[:steps],
        log_probs=np.concatenate([part.log_probs for part in parts])[:steps],
    )


def _runs_of(batch: pa.RecordBatch) -> Iterator[tuple[Episode, NDArray[np.float32] | None]]:
    """Split a batch into runs of rows of one episode, which have the observations before their steps only.

    The last run of an episode comes with the observation after it.
    """
    if not batch.num_rows:
        return
    numbers = batch.column("episode").to_numpy()
    obs, actions = _matrix(batch.column("obs")), _matrix(batch.column("action"))
    terminated = batch.column("terminated").to_numpy(zero_copy_only=False)
    truncated = batch.column("truncated").to_numpy(zero_copy_only=False)
    log_probs = batch.column("log_prob").to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    ends = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), batch.num_rows]
    begin = 0
    for end in ends:
        last = batch.column("final_obs")[end - 1].as_py()
        part = Episode(
            number=int(numbers[begin]),
            env=batch.column("env")[begin].as_py(),
            obs=obs[begin:end],
            actions=actions[begin:end],
            rewards=batch.column("reward").to_numpy()[begin:end],
            policy_versions=batch.column("policy_version").to_numpy()[begin:end],
            log_probs=log_probs[begin:end],
            terminated=bool(terminated[end - 1]),
            truncated=bool(truncated[end - 1]),
        )
        yield part, None if last is None else np.array(last, dtype=np.float32)
        begin = end


def _matrix(column: pa.Array) -> NDArray[Any]:
    """Fixed-size lists as (rows, dim), numbers as (rows,)."""
    if isinstance(column.type, pa.FixedSizeListType):
        return column.flatten().to_numpy().reshape(len(column), -1)
    return column.to_numpy()


def spaces_of(layout: ColumnLayout) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """Observation space and action space of the columns."""
    obs = gymnasium.spaces.Box(-np.inf, np.inf, (layout.obs_dim,), np.float32)
    action = layout.action
    if action.kind == "discrete":
        return obs, gymnasium.spaces.Discrete(action.num_choices)
    if action.kind == "multi_discrete":
        return obs, gymnasium.spaces.MultiDiscrete(list(action.choices))
    low, high = np.array(action.low, dtype=np.float32), np.array(action.high, dtype=np.float32)
    return obs, gymnasium.spaces.Box(low, high, dtype=np.float32)
