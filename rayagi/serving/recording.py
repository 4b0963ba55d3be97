"""Recording in a GMI. Copies every step into shared memory, from which a separate writer process makes files."""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

from actors.gmi import GmiContext
from actors.protocols import EnvInfo, StepResult
from collectives.experience.errors import ChannelTimeoutError
from collectives.experience.file_layout import pid_of
from collectives.experience.producer_ring import ProducerRing, ReservedSlot
from rayagi.run.errors import DiskError
from rayagi.serving.column_layout import STEP_FIELDS, ColumnLayout
from rayagi.serving.errors import WriterError
from rayagi.serving.program import ServingJob
from rayagi.serving.writer_process import WriterJob

START_S = 60.0
"""For the writer's process to start."""
SLOW_S = 120.0
"""A writer that frees no slot for so long counts as stuck."""
_SLOTS = 8
_BLOCK_STEPS = 64
_BLOCK_BYTES = 8 * 2**20
"""Largest block; at least one step."""
_CHECK_S = 0.25
"""How often a GMI that waits for a free slot checks its writer."""
# Fork twice: the writer must not be a child of the GMI, which may be killed with all its children.
_BOOTSTRAP = "import os; os.fork() and os._exit(0); from rayagi.serving.writer_process import main; main()"


class RowSink:
    """Takes every step of one GMI's environments. This class discards them, for serving without ``--out``."""

    wait_s = 0.0
    """Seconds that the GMI has waited for a free slot so far."""

    def record_actions(self, obs: Tensor, actions: Tensor, log_probs: Tensor) -> None:
        """A step's obs (N, obs_dim) float32, actions (N, dim) float32 or (N,) int64, and log_probs (N,), on the host."""

    def record_step(self, step: StepResult) -> None:
        """The step's result."""

    def close(self, timeout_s: float) -> None:
        """Wait until everything recorded is written. Safe to call twice."""


def open_sink(
    job: ServingJob,
    context: GmiContext,
    info: EnvInfo,
    *,
    num_envs: int,
    first_env_index: int,
    total_envs: int,
) -> RowSink:
    """The sink of a GMI's steps: a writer process of its own, or one that discards them without a recording.

    Raises:
        DiskError: the writer cannot write.
        WriterError: it did not start.
    """
    if job.recording is None:
        return RowSink()
    layout = ColumnLayout.for_env(info)
    row_bytes = layout.channel(1).row_bytes
    return ChannelSink(
        WriterJob(
            recording=job.recording,
            layout=layout,
            gmi=context.identity.index,
            num_envs=num_envs,
            first_env_index=first_env_index,
            total_envs=total_envs,
            num_steps=max(1, min(_BLOCK_STEPS, _BLOCK_BYTES // (num_envs * row_bytes))),
        ),
        version=job.version,
    )


class ChannelSink(RowSink):
    """Fills blocks in the slots of a channel, environment first, and commits each full one to the writer."""

    def __init__(self, job: WriterJob, *, version: int) -> None:
        self._job, self._version = job, version
        self._writer = _WriterHandle(job)
        schema = job.layout.channel(job.num_steps)
        self._ring = ProducerRing(schema, rows=job.num_envs, slots=_SLOTS, producer=0)
        endpoint = self._writer.endpoint()
        self.writer_pid = pid_of(endpoint)
        """Process id of the writer."""
        self._ring.attach(endpoint)
        self._reservation: ReservedSlot | None = None
        self._views: dict[int, dict[str, tuple[Tensor, ...]]] = {}
        """By slot: each field's view per step, made once."""
        self._filled = 0
        self._last_obs = torch.zeros(0)
        action = job.layout.action
        self._range = None if action.is_discrete else (torch.tensor(action.low), torch.tensor(action.high))
        self._closed = False

    def record_actions(self, obs: Tensor, actions: Tensor, log_probs: Tensor) -> None:
        """Copy observations, actions and their log probabilities of a step, actions clipped to their range.

        Raises:
            DiskError, WriterError: the writer failed, or is stuck.
        """
        if self._reservation is None:
            self._reservation = self._reserve()
        views = self._views[self._reservation.slot]
        views["obs"][self._filled].copy_(obs)
        # The simulator clips in the same way.
        views["action"][self._filled].copy_(actions if self._range is None else actions.clamp(*self._range))
        views["log_prob"][self._filled].copy_(log_probs)

    def record_step(self, step: StepResult) -> None:
        """Copy a step's result, and commit the block if it is full."""
        assert self._reservation is not None, "record_actions() comes first"
        views, place = self._views[self._reservation.slot], self._filled
        views["reward"][place].copy_(step.rewards)
        views["terminated"][place].copy_(step.terminated)
        views["truncated"][place].copy_(step.truncated)
        if len(step.final_ids):
            views["final_obs"][place][step.final_ids] = step.final_obs.float()
        self._filled += 1
        self._last_obs = step.obs
        if self._filled == self._job.num_steps:
            self._post()

    def close(self, timeout_s: float) -> None:
        """Commit the last block, and wait until the writer has completed its file.

        Raises:
            DiskError, WriterError: it could not complete the file.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._filled:
                self._post()
            elif self._reservation is not None:
                self._reservation.cancel()
        finally:
            self._ring.close()
        self._writer.finish(timeout_s)

    def _post(self) -> None:
        reservation, self._reservation = self._reservation, None
        assert reservation is not None
        reservation["last_obs"].copy_(self._last_obs)
        reservation["length"].fill_(self._filled)
        self._filled = 0
        reservation.commit(self._version)

    def _reserve(self) -> ReservedSlot:
        self._writer.check()
        begin = time.monotonic()
        while True:
            try:
                reservation = self._ring.reserve(timeout_s=_CHECK_S)
            except ChannelTimeoutError as error:
                self._writer.check()
                waited_s = time.monotonic() - begin
                if waited_s > SLOW_S:
                    raise WriterError(
                        self._job.gmi, f"has freed no slot for {waited_s:.0f} s: {error}"
                    ) from error
            else:
                break
        self.wait_s += time.monotonic() - begin
        if reservation.slot not in self._views:
            self._views[reservation.slot] = {name: reservation[name].unbind(1) for name in STEP_FIELDS}
        return reservation


class _WriterHandle:
    """The writer's process, and the status lines it sends."""

    def __init__(self, job: WriterJob) -> None:
        self._gmi = job.gmi
        # The writer imports from the same paths as this process.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # it must not get the terminal's Ctrl-C
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._status_pipe = self._process.stdout
        self._text = b""
        self._process.stdin.write(pickle.dumps(job))
        self._process.stdin.close()
        self._process.wait()

    def endpoint(self) -> str:
        """The address of the writer's channel.

        Raises:
            DiskError, WriterError: it did not start.
        """
        status = self._read_status(START_S)
        if status is None:
            raise WriterError(self._gmi, f"did not start within {START_S:.0f} s")
        return str(status["endpoint"])

    def check(self) -> None:
        """Raise what the writer reported, if anything.

        Raises:
            DiskError: it cannot write.
            WriterError: it failed or ended.
        """
        self._read_status(0.0)

    def finish(self, timeout_s: float) -> None:
        """Wait until the writer is done.

        Raises:
            DiskError, WriterError: it could not write everything, or takes longer.
        """
        if self._read_status(timeout_s) is None:
            raise WriterError(self._gmi, f"did not complete its file within {timeout_s:.0f} s; it still runs")
        self._status_pipe.close()

    def _read_status(self, timeout_s: float) -> dict[str, Any] | None:
        """The next status line; None if there is none within ``timeout_s``."""
        until = time.monotonic() + timeout_s
        poll = select.poll()  # select() refuses descriptors above 1023
        poll.register(self._status_pipe, select.POLLIN)
        while b"\n" not in self._text:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return None
            more = os.read(self._status_pipe.fileno(), 65536)
            if not more:
                raise WriterError(self._gmi, "ended unexpectedly: it was killed, or memory ran out")
            self._text += more
        line, _, self._text = self._text.partition(b"\n")
        status: dict[str, Any] = json.loads(line)
        if "disk" in status:
            raise DiskError(*status["disk"])
        if "failed" in status:
            raise WriterError(self._gmi, f"failed with {status['failed']}")
        return status
