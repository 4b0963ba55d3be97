"""A recorded dataset as rows of a replay of transitions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from actors.protocols import EnvInfo
from collectives.statistics import Moments
from rayagi.algorithms.offline_data import scan, source_of
from rayagi.algorithms.transitions import trajectory_rows
from rayagi.models.heads import Head


class RecordedTransitions:
    """The transitions of a dataset, shared out over the trainers."""

    def __init__(self, path: str, info: EnvInfo) -> None:
        """Open a dataset of an environment's experience.

        Raises:
            DatasetError: it cannot be read, or is of another environment.
        """
        self._source = source_of(path, info)

    @property
    def num_steps(self) -> int:
        """Of the whole dataset."""
        return self._source.num_steps

    def observations(self) -> Moments:
        """Moments of the observations that actions are for, (obs_dim,).

        Raises:
            DatasetError: it has values that are not finite.
        """
        return scan(self._source).observations

    def rows(
        self, head: Head, gamma: float, n_step: int, *, part: int, parts: int
    ) -> Iterator[dict[str, Tensor]]:
        """Transitions ``part``, ``part + parts``, ... of the dataset as rows of ``transition_schema``, by trajectory.

        Args:
            head: whose actions a rollout holds
            gamma: discount
            n_step: rewards of a return
            part: rank of the trainer
            parts: number of trainers
        """
        position = 0
        device = next((each.device for each in head.buffers()), torch.device("cpu"))
        for trajectory in self._source.read():
            actions = head.from_environment(torch.from_numpy(trajectory["action"]).to(device)).cpu()
            obs, rewards, terminated = (
                torch.from_numpy(trajectory[name]) for name in ("obs", "reward", "terminated")
            )
            rows = trajectory_rows(obs, rewards, terminated, actions, gamma, n_step)
            yield {name: column[(part - position) % parts :: parts] for name, column in rows.items()}
            position += len(actions)
