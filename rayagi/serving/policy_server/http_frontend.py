"""HTTP frontend of the policy server.

    POST /act      observations: JSON {"obs": [...]}, application/x-npy, or application/octet-stream (raw float32)
    GET  /info     task, sizes, ranges, checkpoint
    GET  /stats    requests, latency percentiles, requests per second
    GET  /metrics  the same counters for Prometheus
    GET  /health   200 while the server runs; needs no token

JSON observations of spaces that are no vectors may have their form.

A recurrent policy's rows are an observation and the episode's state (zeros at first); the answer holds the next states.

Actions return in the format of the request. The policy's version is in the JSON, and in the header X-Policy-Version.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rayagi.serving.latency import Latencies
from rayagi.serving.policy_server.batching import FairBatcher, ServerStatistics
from rayagi.serving.policy_server.requests import BodyFormat, Expected, RequestError
from rayagi.serving.policy_server.served_policy import ServedPolicy

READ_S = 10.0
"""Time limit for a client to send its complete request."""
_FORMATS: dict[str, BodyFormat] = {
    "application/json": "json",
    "application/x-npy": "npy",
    "application/octet-stream": "raw",
}

BODIES_BYTES = 256 * 2**20
"""Most memory for large bodies of all clients together; more if four requests of the largest size need more."""
_SMALL_BYTES = 64 * 2**10
"""What a body may have without counting: no more than aiohttp buffers for every connection."""

LOGGER = logging.getLogger("rayagi.policy_server")
"""aiohttp's log."""


def _shorten_bad_requests(record: logging.LogRecord) -> bool:
    """A filter: requests that are no HTTP, and lost connections, are one line without traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError):
        reason = " ".join(str(error).split())[:200]
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {reason}", (), None
    return True


LOGGER.addFilter(_shorten_bad_requests)


class BodyMemory:
    """Memory of the large bodies that have arrived and are not answered yet, of all clients together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.used_bytes = limit_bytes, 0

    @contextmanager
    def body(self) -> Iterator[_Body]:
        """A body, whose memory counts until the end of the block."""
        body = _Body(self)
        try:
            yield body
        finally:
            self.used_bytes -= body.counted_bytes

    def count(self, more_bytes: int) -> None:
        """Raises RequestError if that is too much."""
        if self.used_bytes + more_bytes > self.limit_bytes:
            reason = (
                f"the requests of all clients have {self.used_bytes} bytes, of at most {self.limit_bytes}"
            )
            raise RequestError(f"{reason}; try again later, or send fewer rows at a time", status=503)
        self.used_bytes += more_bytes


class _Body:
    """A request's body as it arrives."""

    def __init__(self, memory: BodyMemory) -> None:
        self.content, self.counted_bytes, self._memory = bytearray(), 0, memory

    def append(self, chunk: bytes) -> None:
        """Add what has arrived."""
        counted = max(0, len(self.content) + len(chunk) - _SMALL_BYTES)
        self._memory.count(counted - self.counted_bytes)
        self.counted_bytes = counted
        self.content += chunk


class HttpFrontend:
    """HTTP handlers; aiohttp runs ``app``."""

    def __init__(
        self,
        policy: ServedPolicy,
        batcher: FairBatcher,
        statistics: ServerStatistics,
        expected: Expected,
        *,
        token: str | None,
    ) -> None:
        self._policy, self._batcher, self._statistics = policy, batcher, statistics
        self._expected = expected
        self._token = token
        self._memory = BodyMemory(max(BODIES_BYTES, 4 * expected.max_body_bytes))
        self.app = web.Application(middlewares=[self._guarded])
        self.app.router.add_post("/act", self._act)
        self.app.router.add_get("/info", self._info)
        self.app.router.add_get("/stats", self._stats)
        self.app.router.add_get("/metrics", self._prometheus)
        self.app.router.add_get("/health", self._health)

    async def _act(self, request: web.Request) -> web.Response:
        began = time.perf_counter()  # its header is here, its body may not be
        body_format = _FORMATS.get(request.content_type)
        if body_format is None:
            raise RequestError(
                f"got Content-Type {request.content_type}; expected {', '.join(_FORMATS)}", status=415
            )
        with self._memory.body() as body:
            await self._read(request, body)
            answer = await self._batcher.answer(request.protocol, body.content, body_format, began)
        return web.Response(
            body=answer.body,
            content_type=request.content_type,
            headers={"X-Policy-Version": str(answer.version)},
        )

    async def _read(self, request: web.Request, body: _Body) -> None:
        limit = self._expected.max_body_bytes
        try:
            async with asyncio.timeout(READ_S):
                # Not request.read(): its copy of the whole body stalls the loop.
                while len(body.content) <= limit and (chunk := await request.content.readany()):
                    body.append(chunk)
        except TimeoutError:
            raise RequestError(
                f"the body did not arrive within {READ_S:.0f} s; expected {request.content_length} bytes",
                status=408,
            ) from None
        except web.RequestPayloadError as error:
            reason = " ".join(str(error).split())
            raise RequestError(f"the body cannot be decoded ({reason}); {self._expected.shapes()}") from None
        if len(body.content) > limit:
            raise RequestError(f"the body has more than {limit} bytes; {self._expected.shapes()}", status=413)

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({**self._policy.info(), "max_rows": self._expected.max_rows})

    async def _stats(self, request: web.Request) -> web.Response:
        return web.json_response(self._statistics.to_dict())

    async def _prometheus(self, request: web.Request) -> web.Response:
        text = generate_latest(PolicyMetrics(self._statistics, self._policy.saved.version))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "checkpoint": self._policy.saved.checkpoint})

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the token, and turn errors into JSON."""
        try:
            if self._token is not None and request.path != "/health":
                self._check_token(request, self._token)
            return await handler(request)
        except RequestError as error:
            return self._refusal(error.status, error.reason)
        except web.HTTPException as error:
            paths = "expected POST /act, GET /info, GET /stats, GET /metrics or GET /health"
            refusal = self._refusal(error.status, f"{request.method} {request.path}: {error.reason}; {paths}")
            if isinstance(error, web.HTTPMethodNotAllowed):
                refusal.headers["Allow"] = error.headers["Allow"]
            return refusal

    def _check_token(self, request: web.Request, token: str) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        # Constant-time comparison.
        if not hmac.compare_digest(given.encode(errors="replace"), token.encode()):
            raise RequestError(
                "the token is missing or wrong; expected Authorization: Bearer TOKEN", status=401
            )

    def _refusal(self, status: int, reason: str) -> web.Response:
        self._statistics.refused += 1
        body: dict[str, Any] = {"error": reason}
        response = web.Response(status=status, text=json.dumps(body), content_type="application/json")
        if status in (408, 413, 503):
            response.force_close()  # do not wait for the rest of the body
        return response


_BOUNDS_S = tuple(step * 10.0**power for power in range(-4, 2) for step in (1, 2.5, 5))
"""Upper bounds of a histogram's buckets: 100 us to 50 s."""


@dataclass(frozen=True, slots=True)
class PolicyMetrics(Collector):
    """A server's statistics at this moment, and the version of its policy."""

    statistics: ServerStatistics
    version: int

    def collect(self) -> Iterator[Metric]:
        """As Prometheus' client asks for it."""
        now = self.statistics
        for name, text, value in (
            ("requests", "Requests answered with actions", now.requests),
            ("rows", "Observations of these requests", now.rows),
            ("batches", "Inferences", now.batches),
            ("refused", "Requests answered with an error", now.refused),
        ):
            yield CounterMetricFamily(f"rayagi_policy_{name}", text, value=value)
        yield GaugeMetricFamily("rayagi_policy_version", "Version of the policy", value=self.version)
        yield _histogram("latency", "From a request's first byte to its answer", now.latency)
        yield _histogram("inference", "Of one batch", now.inference)


def _histogram(name: str, text: str, latencies: Latencies) -> HistogramMetricFamily:
    buckets = [(f"{bound:g}", float(latencies.count_up_to(bound))) for bound in _BOUNDS_S]
    buckets.append(("+Inf", float(latencies.count)))
    return HistogramMetricFamily(
        f"rayagi_policy_{name}_seconds", text, buckets=buckets, sum_value=latencies.total_s
    )
