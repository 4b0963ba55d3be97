"""Operations of one communicator in the order in which they were called, beside the caller or in its own thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from collectives.errors import CommunicatorError

Result = TypeVar("Result")


class QueuedOperation:
    """An operation that was started: running, waiting for its turn, or done."""

    def __init__(self, operation: Callable[[], Any], *, in_background: bool) -> None:
        self._operation = operation
        self.in_background = in_background
        """Runs in the queue's thread; otherwise in the thread that called it."""
        self._finished = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self._finished.is_set()

    def wait(self) -> None:
        """Wait until it ended: as long as it and those called before it take, each of which has a time limit.

        Raises:
            CommunicatorError: it failed, or an operation before it did, or the communicator was closed.
        """
        self.result()

    def result(self) -> Any:
        """As ``wait``, and what the operation returned."""
        self._finished.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        """Do it, in the thread whose turn it is."""
        try:
            self._result = self._operation()
        except BaseException as error:
            self._error = error
        self._finished.set()

    def abandon(self, error: CommunicatorError) -> None:
        """It will not be done."""
        self._error = error
        self._finished.set()


class OperationQueue:
    """One operation at a time, first come first served. Its thread starts with the first asynchronous operation."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pending: deque[QueuedOperation] = deque()
        """The first is running, or about to; the others wait behind it."""
        self._unawaited = QueuedOperation(lambda: None, in_background=False)
        """Stands in the line for an operation that begins at once: nobody waits for it but its caller."""
        self._moved = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, operation: Callable[[], None]) -> QueuedOperation:
        """Let the queue's thread do it when its turn comes; returns at once."""
        handle = QueuedOperation(operation, in_background=True)
        with self._moved:
            self._join(handle)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name=f"collectives-{self._rank}", daemon=True
                )
                self._thread.start()
            self._moved.notify_all()
        return handle

    def call(self, operation: Callable[[], Result]) -> Result:
        """Do it in this thread, after everything that was called before."""
        with self._moved:
            alone = not self._pending
            handle = self._unawaited if alone else QueuedOperation(operation, in_background=False)
            self._join(handle)
        if not alone:
            result: Result = self._in_turn(handle)
            return result
        try:
            return operation()
        finally:
            self._leave()

    def close(self, interrupt: Callable[[], None], limit_s: float) -> None:
        """Give up what waits, interrupt what is running, and wait ``limit_s`` at most until it ended.

        Calls after the first do nothing.
        """
        with self._moved:
            if self._closed:
                return
            self._closed = True
            while len(self._pending) > 1:
                self._pending.pop().abandon(self._refusal())
            self._moved.notify_all()
        interrupt()
        with self._moved:
            self._moved.wait_for(lambda: not self._pending, limit_s)

    def _in_turn(self, handle: QueuedOperation) -> Any:
        """Do what waits in the line when its turn comes."""
        with self._moved:
            try:
                self._moved.wait_for(lambda: handle.done() or self._pending[0] is handle)
            except BaseException:  # Ctrl-C: those behind must not wait for its turn
                self._pending.remove(handle)
                self._moved.notify_all()
                raise
        if not handle.done():  # close() may have given it up
            handle.run()
            self._leave()
        return handle.result()

    def _join(self, handle: QueuedOperation) -> None:
        if self._closed:
            raise self._refusal()
        self._pending.append(handle)

    def _leave(self) -> None:
        with self._moved:
            self._pending.popleft()
            self._moved.notify_all()

    def _work(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(
                    lambda: self._pending[0].in_background if self._pending else self._closed
                )
                if not self._pending:
                    return
                handle = self._pending[0]
            handle.run()
            self._leave()

    def _refusal(self) -> CommunicatorError:
        return CommunicatorError("an operation", self._rank, "nobody", 0.0, "this communicator is closed")
