"""TensorBoard event writer. Writes in the calling thread, so that a full disk raises there."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from rayagi.run.errors import disk_errors


class TensorBoardLog:
    """Scalars against environment steps."""

    def __init__(self, folder: Path, *, resumed_at: int | None = None) -> None:
        """Start an event file.

        Args:
            folder: of the event files.
            resumed_at: environment steps of the restored checkpoint; TensorBoard drops later events of older files.

        Raises:
            DiskError: the file cannot be written.
        """
        # Imported here: reading metrics does not need protobuf.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        self._path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        with disk_errors(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb")
            self._writer = RecordWriter(self._file)
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            if resumed_at is not None:
                restart = SessionLog(status=SessionLog.START)
                self._write(Event(wall_time=time.time(), step=resumed_at + 1, session_log=restart))

    def scalars(self, values: Mapping[str, float | None], env_steps: int) -> None:
        """Write one value per tag, without missing and non-finite ones."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        finite = {tag: value for tag, value in values.items() if value is not None and math.isfinite(value)}
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in finite.items()])
        with disk_errors(self._path):
            self._write(self._event(wall_time=time.time(), step=env_steps, summary=summary))

    def flush(self) -> None:
        """Flush to the operating system, so that a running TensorBoard sees the events."""
        with disk_errors(self._path):
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        with disk_errors(self._path):
            self._writer.close()

    def _write(self, event: object) -> None:
        self._writer.write(event.SerializeToString())  # type: ignore[attr-defined]
