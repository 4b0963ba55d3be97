"""Recorders of a run's metrics: CSV and TensorBoard here, the terminal in rayagi.monitoring.progress."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rayagi.monitoring.catalogue import CATALOGUE, DERIVED, EVALUATION, HISTOGRAMS, reward_column
from rayagi.run.csv_log import CsvLog, read_columns
from rayagi.run.errors import disk_errors
from rayagi.run.folder import RunFolder
from rayagi.run.limits import Position

PROGRESS_COLUMNS = ("iteration", *(metric.name for metric in (*DERIVED, *CATALOGUE)))
EVALUATION_COLUMNS = ("iteration", "env_steps_total", "train_s", *(metric.name for metric in EVALUATION))
_EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d+\.\d+)\.")
_GROUPS = {metric.name: metric.group for metric in (*DERIVED, *CATALOGUE, *EVALUATION)}

Values = Mapping[str, float | None]


class Recorder(Protocol):
    """Receives the events of a training loop. Subclasses may leave out the last three."""

    def iterated(self, rows: Sequence[Values], position: Position) -> None:
        """Iterations finished; one row each, with ``PROGRESS_COLUMNS`` and reward terms."""

    def evaluated(self, row: Values, *, best: bool) -> None:
        """The policy was evaluated; a row with ``EVALUATION_COLUMNS``."""

    def counted(self, histograms: Mapping[str, Sequence[int]], row: Values) -> None:
        """An iteration, whose row ``iterated`` has got, has these histograms of the catalogue."""
        return

    def saved(self, checkpoint: str) -> None:
        """A checkpoint was written."""
        return

    def rewound(self, position: Position) -> None:
        """The run continues from an earlier position; later rows are void."""
        return


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
        at = None if resumed_at is None else resumed_at.env_steps or resumed_at.iteration
        self._tensorboard = TensorBoardLog(folder.path / "tensorboard", resumed_at=at)
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

    def counted(self, histograms: Mapping[str, Sequence[int]], row: Values) -> None:
        """Write them for TensorBoard."""
        for name, counts in histograms.items():
            metric = HISTOGRAMS[name]
            self._tensorboard.histogram(metric.tag, counts, metric.scale, _step_of(row))

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
        self._tensorboard.scalars(tagged, _step_of(row))


def _step_of(row: Values) -> int:
    """Environment steps; a run without any is drawn against its iterations."""
    return int(row["env_steps_total"] or row["iteration"] or 0)


def _last_begun_s(folder: Path) -> float:
    """Latest time in the names of a folder's event files; 0 without any.

    TensorBoard reads files in the order of their names, and ignores one that is before what it has read: the clock may have
    been set back, or be another host's.
    """
    found = [_EVENT_FILE.match(path.name) for path in folder.glob("events.out.tfevents.*")]
    return max((float(match[1]) for match in found if match), default=0.0)


class TensorBoardLog:
    """Scalars and histograms against environment steps, or iterations of a run without any.

    Writes in the calling thread, so that a full disk raises there.
    """

    def __init__(self, folder: Path, *, resumed_at: int | None = None) -> None:
        """Start an event file.

        Args:
            folder: of the event files.
            resumed_at: environment steps, or iterations, of the restored checkpoint; TensorBoard drops later events of
                older files.

        Raises:
            DiskError: the file cannot be written.
        """
        # Imported here: reading metrics does not need protobuf.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events, self._summaries = event_pb2, summary_pb2
        begun_s = max(time.time(), _last_begun_s(folder) + 1e-3)
        self._path = folder / f"events.out.tfevents.{begun_s:.6f}.{socket.gethostname()}.{os.getpid()}"
        with disk_errors(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb")
            self._writer = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if resumed_at is not None:
            restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=resumed_at + 1, session_log=restart)

    def scalars(self, values: Mapping[str, float | None], step: int) -> None:
        """Write one value per tag, without missing and non-finite ones."""
        finite = {tag: value for tag, value in values.items() if value is not None and math.isfinite(value)}
        self._summarise([{"tag": tag, "simple_value": value} for tag, value in finite.items()], step)

    def histogram(self, tag: str, counts: Sequence[int], scale: float, step: int) -> None:
        """Write counts by powers of two: bin 0 of values of at most 0, bin b of scale * (2**(b - 1) to 2**b)."""
        used = [at for at, count in enumerate(counts) if count]
        if not used:
            return
        first, last = used[0], used[-1]
        # TensorBoard has right edges only: the first bucket begins at min.
        edges = [0.0 if at == 0 else scale * 2.0 ** (at - 1) for at in range(first, last + 2)]
        centres = [0.0 if at == 0 else scale * 0.75 * 2.0**at for at in range(first, last + 1)]
        kept = list(map(float, counts[first : last + 1]))
        found = self._summaries.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=sum(kept),
            sum=sum(count * centre for count, centre in zip(kept, centres, strict=True)),
            sum_squares=sum(count * centre**2 for count, centre in zip(kept, centres, strict=True)),
            bucket_limit=edges[1:],
            bucket=kept,
        )
        self._summarise([{"tag": tag, "histo": found}], step)

    def flush(self) -> None:
        """Flush to the operating system, so that a running TensorBoard sees the events."""
        with disk_errors(self._path):
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        with disk_errors(self._path):
            self._writer.close()

    def _summarise(self, values: Sequence[Mapping[str, Any]], step: int) -> None:
        summary = self._summaries.Summary
        self._write(step=step, summary=summary(value=[summary.Value(**value) for value in values]))

    def _write(self, **content: Any) -> None:
        with disk_errors(self._path):
            self._writer.write(self._events.Event(wall_time=time.time(), **content).SerializeToString())
