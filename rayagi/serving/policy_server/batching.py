"""Fair order of requests: one thread parses, infers and encodes them in pieces; small requests share an inference."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.errors import counted
from rayagi.serving.latency import Latencies
from rayagi.serving.policy_server.requests import (
    PIECE_BYTES,
    PIECE_ROWS,
    AnswerEncoder,
    BodyFormat,
    Expected,
    Piece,
    RequestError,
)

if TYPE_CHECKING:  # it imports torch
    from rayagi.serving.policy_server.served_policy import GreedyPolicy

_WINDOW_S = 10.0
"""Window of the requests-per-second rate."""


class Answer(NamedTuple):
    """The answer of a request, encoded."""

    body: bytes
    version: int
    """Version of the policy."""


@dataclass(slots=True)
class ServerStatistics:
    """Counters since the start, as returned by /stats."""

    started: float = field(default_factory=time.monotonic)
    requests: int = 0
    rows: int = 0
    batches: int = 0
    refused: int = 0
    latency: Latencies = field(default_factory=Latencies)
    """From a request's first byte to its answer."""
    inference: Latencies = field(default_factory=Latencies)
    """Of one batch."""
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


@dataclass(eq=False, kw_only=True, slots=True)
class _Request:
    client: Hashable
    pieces: Iterator[Piece]
    encoder: AnswerEncoder
    num_bytes: int
    answer: asyncio.Future[Answer]
    policy: GreedyPolicy | None = None
    """Answers all pieces of the request; None: not begun."""


class FairBatcher:
    """Answers requests of one event loop in another thread.

    Requests are served in pieces (``Expected.pieces``), and large ones take turns, piece by piece. Small ones (at most
    PIECE_BYTES) share an inference, and come before the next piece of a large one unless a piece's worth of them came before
    it already: a small request waits for the piece in service only, and many of them leave half of the time to large ones.
    A client has one request in service: its others wait in its own queue. One policy answers all pieces of a request.
    """

    def __init__(
        self, policy: Callable[[], GreedyPolicy], expected: Expected, statistics: ServerStatistics
    ) -> None:
        self._policy, self._expected, self._statistics = policy, expected, statistics
        self._arrived: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        """None: end."""
        self._waiting: dict[Hashable, deque[_Request]] = {}
        """Requests of each client; the first one is in service."""
        self._small: deque[_Request] = deque()
        self._large: deque[_Request] = deque()
        self._small_work = 0.0
        """Served of small requests since the last piece of a large one, in pieces."""
        self._answers: list[tuple[_Request, Answer | RequestError]] = []
        """Not delivered yet."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, name="policy", daemon=True)

    async def answer(
        self, client: Hashable, body: bytes | bytearray, body_format: BodyFormat, began: float
    ) -> Answer:
        """The answer for a request.

        Args:
            client: whose request it is: requests of a client are answered in order
            body: in ``body_format``
            began: ``time.perf_counter()`` when the request began to arrive, for the statistics

        Raises:
            RequestError: the request is invalid, or the policy failed.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()
        future: asyncio.Future[Answer] = self._loop.create_future()
        request = _Request(
            client=client,
            pieces=self._expected.pieces(body, body_format),
            encoder=AnswerEncoder(body_format),
            num_bytes=len(body),
            answer=future,
        )
        self._arrived.put(request)
        answer = await future
        self._statistics.latency.add(time.perf_counter() - began)
        return answer

    def close(self, timeout_s: float) -> None:
        """End the thread; requests that are not answered stay so."""
        self._arrived.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _serve(self) -> None:
        """The thread."""
        while self._receive():
            if self._small and (self._small_work < 1 or not self._large):
                self._infer(self._small_batch(), self._policy())
            else:
                self._small_work = 0.0
                request = self._large.popleft()
                request.policy = request.policy or self._policy()
                piece = self._next_piece(request)
                self._infer([] if piece is None else [(request, piece)], request.policy)
            self._deliver(None)

    def _receive(self) -> bool:
        """Take what has arrived, and wait if there is nothing to do. False: end."""
        while True:
            try:
                request = self._arrived.get(block=not self._small and not self._large)
            except queue.Empty:
                return True
            if request is None:
                return False
            requests = self._waiting.setdefault(request.client, deque())
            requests.append(request)
            if len(requests) == 1:
                self._admit(request)

    def _admit(self, request: _Request) -> None:
        (self._small if request.num_bytes <= PIECE_BYTES else self._large).append(request)

    def _small_batch(self) -> list[tuple[_Request, Piece]]:
        """First pieces of small requests for one inference, up to a piece's worth of work."""
        batch: list[tuple[_Request, Piece]] = []
        work = 0.0
        while self._small and work < 1:
            request = self._small.popleft()
            piece = self._next_piece(request)
            num_rows = 0 if piece is None else len(piece.rows)
            work += max(num_rows / PIECE_ROWS, request.num_bytes / PIECE_BYTES)
            if piece is not None:
                batch.append((request, piece))
        self._small_work += work
        return batch

    def _next_piece(self, request: _Request) -> Piece | None:
        """Parse the next piece; None if the request is invalid, or its client disconnected."""
        if request.answer.cancelled():
            self._end(request)
            return None
        try:
            return next(request.pieces)
        except RequestError as error:
            self._end(request, error)
        except Exception as error:
            self._end(request, RequestError(f"the request cannot be read: {error!r}", status=500))
        return None

    def _infer(self, batch: list[tuple[_Request, Piece]], policy: GreedyPolicy) -> None:
        """Actions of a batch, and its answers."""
        if not batch:
            return
        began = time.perf_counter()
        try:
            rows = np.concatenate([piece.rows for _, piece in batch])
            actions = policy.act(rows)
            if len(actions) != len(rows):
                raise ValueError(
                    f"it has {counted(len(actions), 'action')} for {counted(len(rows), 'observation')}"
                )
        except Exception as error:
            if len(batch) == 1:
                self._end(batch[0][0], RequestError(f"the policy failed: {error}", status=500))
            for entry in batch if len(batch) > 1 else ():  # the others have their answers
                self._infer([entry], policy)
            return
        inference_s = time.perf_counter() - began
        # Split the batch's actions back to its requests.
        begin = 0
        for request, piece in batch:
            self._encode(request, piece, actions[begin : begin + len(piece.rows)], policy)
            begin += len(piece.rows)
        self._deliver((begin, inference_s))

    def _encode(self, request: _Request, piece: Piece, actions: NDArray[Any], policy: GreedyPolicy) -> None:
        """Add a piece's actions to the answer, and give the answer or continue with the next piece."""
        try:
            request.encoder.add(actions, piece)
            if piece.is_last:
                self._end(request, Answer(request.encoder.body(policy.version), policy.version))
                return
        except RequestError as error:
            self._end(request, error)
            return
        except Exception as error:
            self._end(request, RequestError(f"the answer cannot be encoded: {error!r}", status=500))
            return
        request.policy = policy
        self._large.append(request)

    def _end(self, request: _Request, answer: Answer | RequestError | None = None) -> None:
        """Answer a request, and admit the next one of its client. None: nobody waits for the answer."""
        if answer is not None:
            self._answers.append((request, answer))
        requests = self._waiting[request.client]
        requests.popleft()
        if requests:
            self._admit(requests[0])
        else:
            del self._waiting[request.client]

    def _deliver(self, counts: tuple[int, float] | None) -> None:
        """Give answers to the event loop, and of a batch its rows and seconds."""
        if counts is None and not self._answers:
            return
        answers, self._answers = self._answers, []

        def in_loop() -> None:
            if counts is not None:
                self._statistics.answered(sum(isinstance(answer, Answer) for _, answer in answers), *counts)
            for request, answer in answers:
                if request.answer.done():  # the client disconnected
                    continue
                if isinstance(answer, RequestError):
                    request.answer.set_exception(answer)
                else:
                    request.answer.set_result(answer)

        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(in_loop)
