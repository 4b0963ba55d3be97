"""Dynamic batching: requests of several clients share one inference, within a bounded wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayagi.serving.latency import Latencies
from rayagi.serving.policy_server.requests import RequestError

Act = Callable[[NDArray[np.float32]], tuple[NDArray[Any], int]]
"""Maps observations (rows, obs_dim) to actions and the policy's version."""
_WINDOW_S = 10.0
"""Window of the requests-per-second rate."""


@dataclass(slots=True)
class ServerStatistics:
    """Counters since the start, as returned by /stats."""

    started: float = field(default_factory=time.monotonic)
    requests: int = 0
    rows: int = 0
    batches: int = 0
    refused: int = 0
    latency: Latencies = field(default_factory=Latencies)
    """From a complete request to its actions."""
    inference: Latencies = field(default_factory=Latencies)
    """Latency of one batch."""
    _answered: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, number of requests) of each batch in the window."""

    def answered(self, requests: int, rows: int, inference_s: float) -> None:
        """Count a batch."""
        self.requests += requests
        self.rows += rows
        self.batches += 1
        self.inference.add(inference_s)
        now = time.monotonic()
        self._answered.append((now, requests))
        while self._answered[0][0] < now - _WINDOW_S:
            self._answered.popleft()

    def requests_per_s(self) -> float:
        """Rate over the last ten seconds, or since the start if that is shorter."""
        now = time.monotonic()
        recent = sum(count for at, count in self._answered if at >= now - _WINDOW_S)
        return recent / max(1e-3, min(_WINDOW_S, now - self.started))

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values for /stats."""
        return {
            "uptime_s": round(time.monotonic() - self.started, 1),
            "requests": self.requests,
            "rows": self.rows,
            "refused": self.refused,
            "batches": self.batches,
            "requests_per_batch": round(self.requests / self.batches, 2) if self.batches else None,
            "requests_per_s": round(self.requests_per_s(), 1),
            "latency": self.latency.to_dict(),
            "inference": self.inference.to_dict(),
        }


@dataclass(slots=True)
class _Waiting:
    obs: NDArray[np.float32]
    answer: asyncio.Future[tuple[NDArray[Any], int]]


class MicroBatcher:
    """Batches requests of one event loop.

    A batch holds all requests that the loop has read from its sockets when it runs; while one inference runs, requests
    collect for the next. It waits for more requests only if the last batch had more, at most ``max_wait_s`` after the first
    one arrived. So a single client never waits, and concurrent clients share an inference.
    """

    def __init__(self, act: Act, *, max_wait_s: float, max_rows: int, statistics: ServerStatistics) -> None:
        self._act, self._max_wait_s, self._max_rows = act, max_wait_s, max_rows
        self._statistics = statistics
        self._waiting: deque[_Waiting] = deque()
        self._expected = 1
        """Number of requests in the last batch."""
        self._timer: asyncio.Handle | None = None
        self._due = False

    async def actions(self, obs: NDArray[np.float32]) -> tuple[NDArray[Any], int]:
        """Actions for observations (rows, obs_dim), and the policy's version.

        Raises:
            RequestError: the inference failed.
        """
        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[NDArray[Any], int]] = loop.create_future()
        self._waiting.append(_Waiting(obs, answer))
        if not self._due:
            # As many requests as in the last batch: run now. Else wait for more, at most max_wait_s.
            if len(self._waiting) >= self._expected or self._max_wait_s <= 0:
                self._schedule(loop)
            elif self._timer is None:
                self._timer = loop.call_later(self._max_wait_s, self._schedule, loop)
        result = await answer
        self._statistics.latency.add(time.perf_counter() - began)
        return result

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the batch after the loop has handled everything it has already read."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._due:
            self._due = True
            loop.call_soon(self._answer)

    def _answer(self) -> None:
        self._due = False
        batch: list[_Waiting] = []
        rows = 0
        # Take requests in order, up to max_rows; a larger single request runs alone.
        while self._waiting and (not batch or rows + len(self._waiting[0].obs) <= self._max_rows):
            entry = self._waiting.popleft()
            if not entry.answer.cancelled():  # else the client disconnected
                batch.append(entry)
                rows += len(entry.obs)
        if batch:
            self._infer(batch, rows)
        if self._waiting:
            self._schedule(asyncio.get_running_loop())

    def _infer(self, batch: list[_Waiting], rows: int) -> None:
        self._expected = len(batch)
        began = time.perf_counter()
        try:
            actions, version = self._act(np.concatenate([entry.obs for entry in batch]))
        except Exception as error:
            for entry in batch:
                entry.answer.set_exception(RequestError(f"the policy failed: {error}", status=500))
            return
        self._statistics.answered(len(batch), rows, time.perf_counter() - began)
        # Split the batch's actions back to its requests.
        begin = 0
        for entry in batch:
            end = begin + len(entry.obs)
            entry.answer.set_result((actions[begin:end], version))
            begin = end
