"""HTTP frontend of the policy server.

    POST /act      observations: JSON {"obs": [...]}, application/x-npy, or application/octet-stream (raw float32)
    GET  /info     task, sizes, ranges, checkpoint
    GET  /stats    requests, latency percentiles, requests per second
    GET  /health   200 while the server runs; needs no token

A recurrent policy's rows are an observation and the episode's state (zeros at first); the answer holds the next states.

Actions return in the format of the request. The policy's version is in the JSON, and in the header X-Policy-Version.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from rayagi.serving.policy_server.batching import MicroBatcher, ServerStatistics
from rayagi.serving.policy_server.requests import BodyFormat, RequestError, encoded
from rayagi.serving.policy_server.served_policy import ServedPolicy

READ_S = 10.0
"""Time limit for a client to send its complete request."""
_FORMATS: dict[str, BodyFormat] = {
    "application/json": "json",
    "application/x-npy": "npy",
    "application/octet-stream": "raw",
}
_TYPES = {body_format: name for name, body_format in _FORMATS.items()}


class HttpFrontend:
    """HTTP handlers; aiohttp runs ``app``."""

    def __init__(
        self,
        policy: ServedPolicy,
        batcher: MicroBatcher,
        statistics: ServerStatistics,
        *,
        max_rows: int,
        token: str | None,
    ) -> None:
        self._policy, self._batcher, self._statistics = policy, batcher, statistics
        self._expected = policy.expected(max_rows)
        self._token = token
        self.app = web.Application(middlewares=[self._guarded], client_max_size=self._expected.max_body_bytes)
        self.app.router.add_post("/act", self._act)
        self.app.router.add_get("/info", self._info)
        self.app.router.add_get("/stats", self._stats)
        self.app.router.add_get("/health", self._health)

    async def _act(self, request: web.Request) -> web.Response:
        body_format = _FORMATS.get(request.content_type)
        if body_format is None:
            raise RequestError(
                f"got Content-Type {request.content_type}; expected {', '.join(_FORMATS)}", status=415
            )
        obs, single = self._expected.parsed(await self._body(request), body_format)
        actions, version = await self._batcher.actions(obs)
        actions = actions[0] if single else actions
        headers = {"X-Policy-Version": str(version)}
        if body_format == "json":
            fields = actions.dtype.names or ()
            found = {name: actions[name].tolist() for name in fields} or {"actions": actions.tolist()}
            return web.json_response({**found, "policy_version": version}, headers=headers)
        return web.Response(
            body=encoded(actions, body_format), content_type=_TYPES[body_format], headers=headers
        )

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(READ_S):
                return await request.read()
        except TimeoutError:
            raise RequestError(
                f"the body did not arrive within {READ_S:.0f} s; expected {request.content_length} bytes",
                status=408,
            ) from None
        except web.HTTPRequestEntityTooLarge:
            limit = self._expected.max_body_bytes
            raise RequestError(
                f"the body has more than {limit} bytes; {self._expected.shapes()}", status=413
            ) from None

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({**self._policy.info(), "max_rows": self._expected.max_rows})

    async def _stats(self, request: web.Request) -> web.Response:
        return web.json_response(self._statistics.to_dict())

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
            paths = "expected POST /act, GET /info, GET /stats or GET /health"
            return self._refusal(error.status, f"{request.method} {request.path}: {error.reason}; {paths}")

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
        if status in (408, 413):
            response.force_close()  # do not wait for the rest of the body
        return response
