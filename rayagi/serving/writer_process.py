"""Writer process of a GMI. Takes blocks from a channel, converts them to rows and writes files.

rayagi.serving.recording starts it. It outlives its GMI: it writes what a killed GMI had committed, then completes the file.
It reports on standard output, one JSON object per line: ``{"endpoint"}`` when the GMI can attach;
then ``{"done": rows}``, ``{"disk": [path, reason, hint]}`` or ``{"failed": text}``.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.experience.consumer_endpoint import Batch, ConsumerEndpoint
from collectives.experience.errors import ChannelTimeoutError
from rayagi.run.errors import DiskError
from rayagi.serving.column_layout import STEP_FIELDS, ColumnBlock, ColumnLayout, Numbering, record_batch
from rayagi.serving.files import RotatingFiles
from rayagi.serving.manifest import DatasetFolder
from rayagi.serving.program import Recording

FIRST_S = 120.0
"""Time limit for the GMI to attach and send its first block; there is none for later blocks."""
_TAKE_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterJob:
    """The writer's parameters; picklable."""

    recording: Recording
    layout: ColumnLayout
    gmi: int
    num_envs: int
    first_env_index: int
    total_envs: int
    num_steps: int
    """Steps of a block."""


class Writer:
    """Converts blocks to rows. Holds the newest block back: if none follows, its last rows need ``final_obs``."""

    def __init__(self, job: WriterJob) -> None:
        recording = job.recording
        self._job, self.folder = job, DatasetFolder.open(Path(recording.folder))
        self._schema = job.layout.arrow(recording.about)
        self._numbering = Numbering(
            num_envs=job.num_envs,
            first_env_index=job.first_env_index,
            total_envs=job.total_envs,
            first_episode=recording.first_episode,
        )
        self._files = RotatingFiles(
            self.folder.data,
            f"s{recording.session:03d}-g{job.gmi:03d}",
            recording.format,
            self._schema,
            rows_per_file=recording.rows_per_file,
            bytes_per_file=recording.bytes_per_file,
            complete=lambda name, statistics: self.folder.list_file(
                name, session=recording.session, gmi=job.gmi, statistics=statistics
            ),
        )
        self._held: ColumnBlock | None = None
        self.rows = 0
        """Rows written to files so far."""

    def take(self, block: ColumnBlock) -> None:
        """Write the previous block, and hold this one.

        Raises:
            DiskError: a file could not be written; complete files stay.
            ValueError: an observation or reward of the block is not finite; the block is not written.
        """
        _check_finite(block, self._numbering.envs)
        self._write(is_last=False)
        self._held = block

    def close(self) -> None:
        """Write the held block, and complete the file.

        Raises:
            DiskError: the file could not be written; complete files stay.
        """
        self._write(is_last=True)
        self._files.close()

    def _write(self, *, is_last: bool) -> None:
        block, self._held = self._held, None
        if block is None:
            return
        episode, step, ended = self._numbering.enter(block)
        batch = record_batch(
            block,
            self._schema,
            episode=episode,
            step=step,
            envs=self._numbering.envs,
            gmi=self._job.gmi,
            session=self._job.recording.session,
            is_last=is_last,
        )
        self._files.write(batch, ended)
        self.rows += batch.num_rows


def _check_finite(block: ColumnBlock, envs: NDArray[np.int32]) -> None:
    for what, values in (("an observation", block.obs), ("a reward", block.reward)):
        # A cheap sum finds any NaN or infinity. If finite values overflow it, the exact check below finds none.
        if not np.isfinite(values.sum(dtype=np.float64)):
            bad = np.argwhere(~np.isfinite(values))
            if len(bad):
                raise ValueError(
                    f"{what} of environment {envs[bad[0][0]]} is NaN or infinite: check the environment"
                )


def block_of(batch: Batch) -> ColumnBlock:
    """Copy a batch to a block, so that its slot can be released."""
    length = int(batch["length"][0])
    steps: dict[str, Any] = {name: np.array(batch[name].numpy()[:, :length]) for name in STEP_FIELDS}
    return ColumnBlock(**steps, last_obs=np.array(batch["last_obs"].numpy()), version=batch.version)


def write_all(writer: Writer, consumer_endpoint: ConsumerEndpoint) -> None:
    """Write until the GMI has closed its end or died.

    Raises:
        DiskError: a file could not be written; complete files stay.
        ValueError: an observation or reward is not finite; earlier blocks are in complete files.
        ChannelTimeoutError: the GMI never attached.
    """
    limit_s = FIRST_S
    try:
        while True:
            try:
                batch = consumer_endpoint.take(limit_s)
            except ChannelTimeoutError:
                if limit_s == FIRST_S:
                    raise
                continue  # the GMI is alive but slow
            if batch is None:
                break
            with batch:
                block = block_of(batch)
            writer.take(block)
            limit_s = _TAKE_S
    except DiskError:
        raise
    except BaseException:
        with suppress(DiskError):
            writer.close()
        raise
    writer.close()


def send_status(**values: Any) -> None:
    """Send a status line to the GMI, if it still reads."""
    with suppress(OSError):
        os.write(sys.stdout.fileno(), f"{json.dumps(values)}\n".encode())


def main() -> None:
    """Read the job from standard input and run it."""
    torch.set_num_threads(1)
    job: WriterJob = pickle.load(sys.stdin.buffer)
    try:
        writer = Writer(job)
        with (
            writer.folder.being_written(),
            ConsumerEndpoint(job.layout.channel(job.num_steps)) as consumer_endpoint,
        ):
            send_status(endpoint=consumer_endpoint.endpoint)
            write_all(writer, consumer_endpoint)
        send_status(done=writer.rows)
    except DiskError as error:
        send_status(disk=[error.path, error.reason, error.hint])
    except Exception as error:
        send_status(failed=f"{type(error).__name__}: {error}")
