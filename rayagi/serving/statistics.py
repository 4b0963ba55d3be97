"""Statistics of a file's rows; those of a dataset are merged exactly from its files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayagi.algorithms.normalisers import Moments, merged
from rayagi.serving.column_layout import EndedEpisode


@dataclass(slots=True)
class FileStatistics:
    """Statistics of one or several files."""

    rows: int = 0
    bytes: int = 0
    episodes: int = 0
    """Episodes whose last row is here."""
    return_sum: float = 0.0
    return_min: float = math.inf
    return_max: float = -math.inf
    length_sum: int = 0
    last_episode: int = -1
    """Largest number of an episode that has rows here."""
    obs: Moments | None = None
    """Moments of the observations; None without rows."""

    def add(self, obs: Tensor, ended: Sequence[EndedEpisode], last_episode: int) -> None:
        """Add rows, by their observations (rows, obs_dim), and the episodes that ended in them.

        ``last_episode``: the largest episode number in these rows.
        """
        self._add_obs(Moments.from_batch(obs))
        self.rows += len(obs)
        self.last_episode = max(self.last_episode, last_episode)
        for episode in ended:
            self.episodes += 1
            self.return_sum += episode.total
            self.return_min, self.return_max = (
                min(self.return_min, episode.total),
                max(self.return_max, episode.total),
            )
            self.length_sum += episode.length

    def merge(self, other: FileStatistics) -> None:
        """Add another file's statistics."""
        for name in ("rows", "bytes", "episodes", "return_sum", "length_sum"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.return_min = min(self.return_min, other.return_min)
        self.return_max = max(self.return_max, other.return_max)
        self.last_episode = max(self.last_episode, other.last_episode)
        if other.obs is not None:
            self._add_obs(other.obs)

    def _add_obs(self, obs: Moments) -> None:
        self.obs = obs if self.obs is None else merged(self.obs, obs)

    def to_dict(self) -> dict[str, Any]:
        """A line of the manifest; null where there is no episode or row."""
        obs = self.obs
        return {
            "rows": self.rows,
            "bytes": self.bytes,
            "episodes": self.episodes,
            "return_sum": self.return_sum,
            "return_min": self.return_min if self.episodes else None,
            "return_max": self.return_max if self.episodes else None,
            "length_sum": self.length_sum,
            "last_episode": self.last_episode,
            "obs": None if obs is None else {"mean": obs.mean.tolist(), "m2": obs.m2.tolist()},
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> FileStatistics:
        """Inverse of ``to_dict``."""
        obs, rows = stored["obs"], int(stored["rows"])
        moments = (
            None
            if obs is None
            else Moments(
                count=torch.tensor(float(rows), dtype=torch.float64),
                mean=torch.tensor(obs["mean"], dtype=torch.float64),
                m2=torch.tensor(obs["m2"], dtype=torch.float64),
            )
        )
        return cls(
            rows=rows,
            bytes=int(stored["bytes"]),
            episodes=int(stored["episodes"]),
            return_sum=float(stored["return_sum"]),
            return_min=math.inf if stored["return_min"] is None else float(stored["return_min"]),
            return_max=-math.inf if stored["return_max"] is None else float(stored["return_max"]),
            length_sum=int(stored["length_sum"]),
            last_episode=int(stored["last_episode"]),
            obs=moments,
        )

    def summary(self) -> dict[str, Any]:
        """For statistics.json: rows, ended episodes, returns, mean and standard deviation of the observations."""
        count = self.episodes
        return {
            "rows": self.rows,
            "bytes": self.bytes,
            "episodes": count,
            "return_mean": self.return_sum / count if count else None,
            "return_min": self.return_min if count else None,
            "return_max": self.return_max if count else None,
            "length_mean": self.length_sum / count if count else None,
            "obs_mean": None if self.obs is None else self.obs.mean.tolist(),
            "obs_std": None if self.obs is None else self.obs.variance().sqrt().tolist(),
        }


def merge_statistics(parts: Iterable[FileStatistics]) -> FileStatistics:
    """Merged statistics of all files."""
    whole = FileStatistics()
    for part in parts:
        whole.merge(part)
    return whole
