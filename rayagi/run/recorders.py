"""Recorders of a run's metrics: CSV and TensorBoard here, the terminal in rayagi.monitoring.progress."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from rayagi.monitoring.catalogue import CATALOGUE, DERIVED, EVALUATION, reward_column
from rayagi.run.csv_log import CsvLog, read_columns
from rayagi.run.folder import RunFolder
from rayagi.run.limits import Position
from rayagi.run.tensorboard import TensorBoardLog

PROGRESS_COLUMNS = ("iteration", *(metric.name for metric in (*DERIVED, *CATALOGUE)))
EVALUATION_COLUMNS = (
    "iteration",
    "env_steps_total",
    "train_s",
    *(metric.name for metric in EVALUATION),
)
_GROUPS = {metric.name: metric.group for metric in (*DERIVED, *CATALOGUE, *EVALUATION)}

Values = Mapping[str, float | None]


class Recorder(Protocol):
    """Receives the events of a training loop."""

    def iterated(self, rows: Sequence[Values], position: Position) -> None:
        """Iterations finished; one row each, with ``PROGRESS_COLUMNS`` and reward terms."""
        ...

    def evaluated(self, row: Values, *, best: bool) -> None:
        """The policy was evaluated; a row with ``EVALUATION_COLUMNS``."""
        ...

    def saved(self, checkpoint: str) -> None:
        """A checkpoint was written."""
        ...

    def rewound(self, position: Position) -> None:
        """The run continues from an earlier position; later rows are void."""
        ...


class FileRecorder:
    """progress.csv, evaluations.csv and TensorBoard events of a run folder."""

    def __init__(self, folder: RunFolder, *, resumed_at: Position | None = None) -> None:
        """Open the files; on a resume, remove what is after the restored iteration.

        Raises:
            DiskError: they cannot be written.
        """
        self._folder = folder
        self._open(resumed_at)

    def _open(self, resumed_at: Position | None) -> None:
        folder = self._folder
        keep = None if resumed_at is None else resumed_at.iteration
        before = read_columns(folder.progress_csv) if keep is not None else []
        terms = [name for name in before if name.startswith(reward_column(""))]
        self._progress = CsvLog(folder.progress_csv, (*PROGRESS_COLUMNS, *terms), keep_through=keep)
        self._evaluations = CsvLog(folder.evaluations_csv, EVALUATION_COLUMNS, keep_through=keep)
        steps = None if resumed_at is None else resumed_at.env_steps
        self._tensorboard = TensorBoardLog(folder.path / "tensorboard", resumed_at=steps)
        self._flushed_at = time.monotonic()

    def iterated(self, rows: Sequence[Values], position: Position) -> None:
        """Write the rows. Reward terms become columns when they first appear."""
        reward_columns = dict.fromkeys(
            name for row in rows for name in row if name.startswith(reward_column(""))
        )
        new = [name for name in reward_columns if name not in self._progress.columns]
        if new:
            self._progress.add_columns(new)
        self._progress.append(rows)
        for row in rows:
            self._scalars(row)
        if time.monotonic() - self._flushed_at > 5.0:
            self._tensorboard.flush()
            self._flushed_at = time.monotonic()

    def evaluated(self, row: Values, *, best: bool) -> None:
        """Write the row."""
        self._evaluations.append([row])
        self._scalars(row)

    def saved(self, checkpoint: str) -> None:
        """Flush TensorBoard's events up to the checkpoint."""
        self._tensorboard.flush()

    def rewound(self, position: Position) -> None:
        """Remove later rows, as on a resume."""
        self.close()
        self._open(position)

    def close(self) -> None:
        """Close the files."""
        self._progress.close()
        self._evaluations.close()
        self._tensorboard.close()

    def _scalars(self, row: Values) -> None:
        tagged = {
            f"{_GROUPS.get(name, 'reward')}/{name}": value
            for name, value in row.items()
            if name not in ("iteration", "env_steps_total")
        }
        self._tensorboard.scalars(tagged, int(row["env_steps_total"] or 0))
