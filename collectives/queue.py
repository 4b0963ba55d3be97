"""Operation queue of a communicator: runs operations in call order, synchronously or in a background thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from collectives.errors import CommunicatorError

Result = TypeVar("Result")


class QueuedOperation:
    """An operation in the queue: waiting, running, or done."""

    def __init__(self, operation: Callable[[], Any], *, in_background: bool) -> None:
        self._operation = operation
        self.in_background = in_background
        """Whether it runs in the queue's thread; else in the caller's."""
        self._finished = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._finished.is_set()

    def wait(self) -> None:
        """Wait until it has ended. It and the operations before it have time limits of their own.

        Raises:
            CommunicatorError: it failed, or an operation before it did, or the communicator was closed.
        """
        self.result()

    def result(self) -> Any:
        """Wait as ``wait`` does; returns the operation's result."""
        self._finished.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        """Run it in the calling thread."""
        try:
            self._result = self._operation()
        except BaseException as error:
            self._error = error
        self._finished.set()

    def abandon(self, error: CommunicatorError) -> None:
        """Fail it without running it."""
        self._error = error
        self._finished.set()


class OperationQueue:
    """Runs one operation at a time, first in first out. Its thread starts with the first asynchronous operation."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pending: deque[QueuedOperation] = deque()
        """The first is running or about to run; the others wait."""
        self._unawaited = QueuedOperation(lambda: None, in_background=False)
        """Queue entry of a synchronous operation that begins at once: only its caller waits for it."""
        self._moved = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, operation: Callable[[], None]) -> QueuedOperation:
        """Queue it for the background thread; returns at once."""
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
        """Run it in this thread, after all earlier operations."""
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
        """Fail the waiting operations, interrupt the running one, and wait up to ``limit_s`` until it has ended.

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
        """Run a queued operation in this thread when its turn comes."""
        with self._moved:
            try:
                self._moved.wait_for(lambda: handle.done() or self._pending[0] is handle)
            except BaseException:  # Ctrl-C: remove it, or the operations behind it would wait forever
                self._pending.remove(handle)
                self._moved.notify_all()
                raise
        if not handle.done():  # close() may have failed it
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
