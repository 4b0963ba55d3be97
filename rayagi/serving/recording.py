"""A GMI's end of recording: every step is copied into a slot of shared memory, from which a process beside it writes."""

from __future__ import annotations

import json
import os
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
from rayagi.serving.column_layout import ColumnLayout
from rayagi.serving.errors import WriterError
from rayagi.serving.program import RowSink, ServingJob
from rayagi.serving.writer_process import WriterJob

START_S = 60.0
"""For the writer's process to start."""
SLOW_S = 120.0
"""For the writer to make room, before it counts as stuck."""
_SLOTS = 8
_BLOCK_STEPS = 64
_BLOCK_BYTES = 8 * 2**20
"""A block is so large at most, or one step."""
_LOOK_S = 0.25
"""After which a GMI that waits for room looks whether its writer is well."""
# The writer is nobody's child, so that it can finish when its GMI is ended with all its children.
_BOOTSTRAP = "import os; os.fork() and os._exit(0); from rayagi.serving.writer_process import main; main()"


class NoSink:
    """Takes everything and keeps nothing: for those who only measure."""

    wait_s = 0.0

    def record_actions(self, obs: Tensor, actions: Tensor) -> None:
        """Nothing."""

    def record_step(self, step: StepResult) -> None:
        """Nothing."""

    def close(self, timeout_s: float) -> None:
        """Nothing."""


def open_sink(
    job: ServingJob,
    context: GmiContext,
    info: EnvInfo,
    *,
    num_envs: int,
    first_env_index: int,
    total_envs: int,
) -> RowSink:
    """Where a GMI's steps go: to a writer of its own, or nowhere where nothing is to be written.

    Raises:
        DiskError: the writer cannot write.
        WriterError: it did not start.
    """
    if job.recording is None:
        return NoSink()
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


class ChannelSink:
    """Fills blocks in the slots of a channel, environment first; a full one is posted to the writer."""

    def __init__(self, job: WriterJob, *, version: int) -> None:
        self._job, self._version = job, version
        self._writer = _WriterHandle(job)
        schema = job.layout.channel(job.num_steps)
        self._ring = ProducerRing(schema, rows=job.num_envs, slots=_SLOTS, producer=0)
        endpoint = self._writer.endpoint()
        self.writer_pid = pid_of(endpoint)
        """Of the process that writes."""
        self._ring.attach(endpoint)
        self._reservation: ReservedSlot | None = None
        self._views: dict[int, dict[str, tuple[Tensor, ...]]] = {}
        """By slot: each field step by step, cut once."""
        self._filled = 0
        self._last_obs = torch.zeros(0)
        action = job.layout.action
        self._range = None if action.is_discrete else (torch.tensor(action.low), torch.tensor(action.high))
        self._closed = False
        self.wait_s = 0.0

    def record_actions(self, obs: Tensor, actions: Tensor) -> None:
        """Copy what is about to be done, actions within their range.

        Raises:
            DiskError, WriterError: the writer gave up, or is stuck.
        """
        if self._reservation is None:
            self._reservation = self._reserve()
        views = self._views[self._reservation.slot]
        views["obs"][self._filled].copy_(obs)
        # What the simulator will use: it clips too.
        views["action"][self._filled].copy_(actions if self._range is None else actions.clamp(*self._range))

    def record_step(self, step: StepResult) -> None:
        """Copy what came of it, and post the block if it is full."""
        assert self._reservation is not None, "acted() comes first"
        views, place = self._views[self._reservation.slot], self._filled
        views["reward"][place].copy_(step.rewards)
        views["terminated"][place].copy_(step.terminated)
        views["truncated"][place].copy_(step.truncated)
        if len(step.final_ids):
            views["final_obs"][place][step.final_ids] = step.final_obs
        self._filled += 1
        self._last_obs = step.obs
        if self._filled == self._job.num_steps:
            self._post()

    def close(self, timeout_s: float) -> None:
        """Post what there is, and wait until the writer has completed its file.

        Raises:
            DiskError, WriterError: it has not.
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
                reservation = self._ring.reserve(timeout_s=_LOOK_S)
            except ChannelTimeoutError as error:
                self._writer.check()
                waited_s = time.monotonic() - begin
                if waited_s > SLOW_S:
                    raise WriterError(
                        self._job.gmi, f"has made no room for {waited_s:.0f} s: {error}"
                    ) from error
            else:
                break
        self.wait_s += time.monotonic() - begin
        if reservation.slot not in self._views:
            steps = ("obs", "action", "reward", "terminated", "truncated", "final_obs")
            self._views[reservation.slot] = {name: reservation[name].unbind(1) for name in steps}
        return reservation


class _WriterHandle:
    """The writer's process, and what it says."""

    def __init__(self, job: WriterJob) -> None:
        self._gmi = job.gmi
        # Where this process finds its modules, the writer does.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # the terminal's Ctrl-C is not for it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._said = self._process.stdout
        self._text = b""
        self._process.stdin.write(f"{job.to_json()}\n".encode())
        self._process.stdin.close()
        self._process.wait()

    def endpoint(self) -> str:
        """What to attach to.

        Raises:
            DiskError, WriterError: it did not start.
        """
        said = self._listen(START_S)
        if said is None:
            raise WriterError(self._gmi, f"did not start within {START_S:.0f} s")
        return str(said["endpoint"])

    def check(self) -> None:
        """Go on if it is well.

        Raises:
            DiskError: it cannot write.
            WriterError: it failed or ended.
        """
        self._listen(0.0)

    def finish(self, timeout_s: float) -> None:
        """Wait until it is done.

        Raises:
            DiskError, WriterError: it could not write everything, or takes longer.
        """
        if self._listen(timeout_s) is None:
            raise WriterError(
                self._gmi, f"did not complete its file within {timeout_s:.0f} s; it still works on it"
            )
        self._said.close()

    def _listen(self, timeout_s: float) -> dict[str, Any] | None:
        """The next thing it says; None where it said nothing in time."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._said], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            more = os.read(self._said.fileno(), 65536)
            if not more:
                raise WriterError(self._gmi, "ended by itself: it was killed, or memory ran out")
            self._text += more
        line, _, self._text = self._text.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if "disk" in said:
            raise DiskError(*said["disk"])
        if "failed" in said:
            raise WriterError(self._gmi, f"failed with {said['failed']}")
        return said
