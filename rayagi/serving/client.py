"""Client of the policy server, for a robot's control loop or a game. Needs numpy only.

::

    with PolicyClient("http://127.0.0.1:8000") as policy:
        while True:
            robot.apply(policy.act(robot.observe()))

The client keeps the states of a recurrent policy; ``reset`` begins new episodes. It connects at the first request, and
reconnects when the connection was lost.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collectives.limits import call_with_timeout
from rayagi.serving.policy_server.frames import HEADER, FrameError, Kind, frame, header
from rayagi.serving.policy_server.obs_leaves import Leaf, flat_rows

Observations = ArrayLike | Mapping[str, Any] | tuple[Any, ...]
"""Flat observations, or as the environment gives them."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_LONGEST_S = 366 * 86400
"""Longest time limit: a socket takes no infinite one."""
_TRY_AGAIN = (502, 503, 504)
"""HTTP statuses of a server that is overloaded, or that a proxy does not reach."""
_VECTORS = "expected numbers of shape (obs_dim,) or (rows, obs_dim)"


class PolicyRefusedError(ValueError):
    """The server rejected the request; a retry does not help."""


class PolicyUnreachableError(ConnectionError):
    """The server did not answer within the time limit."""


class PolicyClient:
    """One connection to a policy server. Not thread-safe: use one client per thread."""

    def __init__(self, address: str, *, token: str | None = None, timeout_s: float = 5.0) -> None:
        """Connects at the first request.

        Args:
            address: ``http://HOST:PORT``, or ``unix:PATH`` of the local socket
            token: access token of the server, over HTTP; white space around it is left out
            timeout_s: for one answer, reconnecting included

        Raises:
            ValueError: the address has neither form, the token is not printable ASCII, or the time limit no time.
        """
        if not 0 < timeout_s <= _LONGEST_S:
            raise ValueError(f"timeout_s is {timeout_s}: expected more than 0 seconds, and at most a year")
        self.address, self._timeout_s = address, timeout_s
        self._states: NDArray[np.float32] | None = None
        """States of a recurrent policy, of the rows of the last request; None: episodes begin."""
        self._policy_info: dict[str, Any] | None = None
        """Of the server; None: not asked yet on this connection."""
        self._transport: _HttpConnection | _SocketConnection
        if address.startswith("unix:"):
            self._transport = _SocketConnection(_socket_path(address))
        else:
            self._transport = _HttpConnection(*_host_and_port(address), _checked_token(token))

    def act(self, obs: Observations) -> NDArray[Any]:
        """Actions for observations.

        Args:
            obs: one (obs_dim,), or several (rows, obs_dim); of other spaces also as the environment gives them, with arrays
                of their own shape, or of (rows, *shape); of a Discrete space one whole number

        Returns:
            (dim,) or (rows, dim) float32; for discrete actions () or (rows,) int64; for several choices (dim,) or
            (rows, dim) int64. Choices count from 0. A recurrent policy takes the rows of successive calls as the
            successive steps of the same episodes, until ``reset`` or a call with another number of rows.

        Raises:
            PolicyRefusedError: the server rejected them, with the reason.
            PolicyUnreachableError: no answer within the time limit.
        """
        is_single = False

        def ask(until: float) -> NDArray[Any]:
            nonlocal is_single
            if self._policy_info is None:
                self._policy_info = self._transport.info(until)
            rows, is_single = _flattened(obs, self._policy_info.get("obs_leaves", []))
            answers = self._transport.act(self._with_states(rows), until)
            if self._state_dim:
                self._states, answers = answers["states"].copy(), answers["actions"]
            return answers

        answers = self._with_retry(ask)
        return answers[0] if is_single else answers

    @property
    def _state_dim(self) -> int:
        """Of the policy's states; 0: it is not recurrent."""
        return int((self._policy_info or {}).get("state_dim", 0))

    def _with_states(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The rows, each followed by its state if the policy is recurrent."""
        if not self._state_dim:
            return rows
        if self._states is None or self._states.shape != (len(rows), self._state_dim):
            self._states = np.zeros((len(rows), self._state_dim), "<f4")
        return np.concatenate((rows, self._states), axis=1)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Begin new episodes in these rows, a mask or indices; None: in all. Of no effect if not recurrent."""
        if rows is None:
            self._states = None
        elif self._states is not None and np.size(rows):
            self._states[np.asarray(rows)] = 0.0

    def info(self) -> dict[str, Any]:
        """Task, obs_dim, kind, size and range of actions, checkpoint.

        Raises:
            PolicyRefusedError, PolicyUnreachableError: as ``act``.
        """
        if isinstance(self._transport, _SocketConnection):
            self.close()  # the server tells it only when a client connects
        found: dict[str, Any] = self._with_retry(self._transport.info)
        return found

    def close(self) -> None:
        """Close the connection. The client can be used again."""
        self._transport.close()
        self._policy_info = None

    def _with_retry(self, ask: Any) -> Any:
        """Request, and retry on a new connection if it was lost: requests have no side effects."""
        until, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while True:
            try:
                return ask(until)
            except PolicyRefusedError:
                self._policy_info = None  # the server may have another policy now
                raise
            except (OSError, http.client.HTTPException, FrameError) as error:
                self.close()
                if time.monotonic() + pause_s >= until:
                    raise PolicyUnreachableError(
                        f"{self.address} did not answer within {self._timeout_s:.1f} s: {error or type(error).__name__}"
                    ) from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except BaseException:
                self.close()  # it was interrupted: its answer is still to come, and must not be the next request's
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _TimedSocket(socket.socket):
    """A stream socket whose operations all end at ``until``, however slowly the bytes come."""

    until: float

    def _limit(self) -> None:
        self.settimeout(_remaining_s(self.until))

    def connect(self, address: Any, /) -> None:
        self._limit()
        super().connect(address)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        self._limit()
        super().sendall(data, flags)

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        self._limit()
        return super().recv(bufsize, flags)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        self._limit()
        return super().recv_into(buffer, nbytes, flags)


class _HttpConnection:
    """Persistent HTTP connection. ``until``: the end of the time limit, on the monotonic clock."""

    def __init__(self, host: str, port: int, token: str | None) -> None:
        self._host, self._port = host, port
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._connection: Any = None
        """An HTTPConnection, whose socket is None until it connects; its type does not say so."""

    def act(self, rows: NDArray[np.float32], until: float) -> NDArray[Any]:
        body = io.BytesIO()
        np.save(body, rows, allow_pickle=False)
        answer = self._ask("POST", "/act", until, body.getvalue(), "application/x-npy")
        try:
            found: NDArray[Any] = np.lib.format.read_array(io.BytesIO(answer), allow_pickle=False)
        except ValueError as error:
            raise self._no_policy_server("/act", answer) from error
        return found

    def info(self, until: float) -> dict[str, Any]:
        answer = self._ask("GET", "/info", until)
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise self._no_policy_server("/info", answer) from error
        if not isinstance(found, dict) or "obs_dim" not in found:
            raise self._no_policy_server("/info", answer)
        return found

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, method: str, path: str, until: float, body: bytes | None = None, kind: str = "") -> bytes:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, self._port)
        connection = self._connection
        if connection.sock is None:  # new, or closed by the server with its last answer
            connection.sock = _connected(self._host, self._port, until)
        connection.sock.until = until
        headers = {**self._headers, "Content-Type": kind} if body is not None else self._headers
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        content = response.read()
        if response.status in _TRY_AGAIN:
            raise ConnectionError(f"{response.status}: {_reason(content)}")
        if response.status >= 400:
            raise PolicyRefusedError(_reason(content) or f"HTTP status {response.status}")
        if response.status != http.HTTPStatus.OK:
            raise self._no_policy_server(path, content)
        return content

    def _no_policy_server(self, path: str, content: bytes) -> PolicyRefusedError:
        return PolicyRefusedError(
            f"http://{self._host}:{self._port} is no policy server: it answered {path} with {content[:60]!r}; "
            "give the address that `rayagi policy-server` prints"
        )


class _SocketConnection:
    """Frames over a Unix socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: _TimedSocket | None = None
        self._info: dict[str, Any] = {}
        self._request = 0

    def act(self, rows: NDArray[np.float32], until: float) -> NDArray[Any]:
        connection = self._connected(until)
        # A frame has no shape: a wrong width could pass as another number of rows.
        obs_dim, max_rows = self._info["obs_dim"] + self._info.get("state_dim", 0), self._info["max_rows"]
        if rows.shape[1] != obs_dim or not 1 <= len(rows) <= max_rows:
            raise PolicyRefusedError(
                f"observations of shape {rows.shape} were given; expected ({obs_dim},) or (rows, {obs_dim}), at most "
                f"{max_rows} rows"
            )
        self._request = (self._request + 1) % 2**32
        connection.sendall(frame(Kind.OBSERVE, self._request, rows.tobytes()))
        kind, request, body = self._read(connection)
        if kind == Kind.ERROR:
            raise PolicyRefusedError(body.decode(errors="replace"))
        if kind != Kind.ACTIONS or request != self._request:
            raise FrameError(f"{kind.name} of request {request} came where {self._request} was asked")
        return decoded_answers(body, self._info, len(rows))

    def info(self, until: float) -> dict[str, Any]:
        self._connected(until)
        return self._info

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self, until: float) -> _TimedSocket:
        if self._socket is None:
            connection = _TimedSocket(socket.AF_UNIX)
            connection.until = until
            try:
                connection.connect(self._path)
                _, _, body = self._read(connection)
            except BaseException:
                connection.close()
                raise
            self._socket, self._info = connection, dict(json.loads(body))
        self._socket.until = until
        return self._socket

    def _read(self, connection: socket.socket) -> tuple[Kind, int, bytes]:
        kind, request, body_bytes = header(_exactly(connection, HEADER.size))
        return kind, request, _exactly(connection, body_bytes)


def _flattened(obs: Observations, leaves: Sequence[Leaf]) -> tuple[NDArray[np.float32], bool]:
    """Observations as (rows, obs_dim), and whether there is one without the dimension of rows."""
    array_shape = tuple(leaves[0]["shape"]) if leaves and not leaves[0]["path"] else None
    if isinstance(obs, Mapping) and not leaves:
        raise PolicyRefusedError("obs is a dict; this policy's observations are vectors of numbers")
    if isinstance(obs, Mapping) or (isinstance(obs, tuple) and leaves and array_shape is None):
        return _flattened_by(leaves, obs)
    try:
        values = np.asarray(obs)
    except ValueError as error:  # rows of different lengths
        raise PolicyRefusedError(f"observations are no array ({error}); {_VECTORS}") from None
    if values.dtype.kind not in "biuf":
        raise PolicyRefusedError(f"observations hold {values.dtype}; {_VECTORS}")
    # One array may have been flattened. A vector is never several choices: it is the one-hot vector of one.
    is_own = array_shape == values.shape or (values.ndim > 1 and array_shape == values.shape[1:])
    if array_shape is not None and (is_own or values.ndim > 2):
        return _flattened_by(leaves, values)
    if values.ndim not in (1, 2):
        raise PolicyRefusedError(f"observations of shape {values.shape}; {_VECTORS}")
    with np.errstate(over="ignore"):  # the server rejects what becomes infinite
        rows = np.ascontiguousarray(np.atleast_2d(values), dtype="<f4")
    return rows, values.ndim == 1


def _flattened_by(leaves: Sequence[Leaf], obs: Observations) -> tuple[NDArray[np.float32], bool]:
    try:
        return flat_rows(obs, leaves)
    except ValueError as error:
        raise PolicyRefusedError(str(error)) from error


def _connected(host: str, port: int, until: float) -> _TimedSocket:
    """A connection to the first address of the host that accepts one."""
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in _addresses(host, port, until):
        connection = _TimedSocket(family, kind, protocol)
        connection.until = until
        try:
            connection.connect(address)
            # Header and body are two small packets: without this the second waits for the first one's acknowledgement.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return connection
    raise failure


def _addresses(host: str, port: int, until: float) -> list[Any]:
    """Those of ``getaddrinfo``, which has no time limit."""
    resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        return call_with_timeout(_remaining_s(until), resolve)
    except TimeoutError:
        raise TimeoutError(f"the address of {host} was not found in time") from None


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        more = connection.recv(count - len(content))
        if not more:
            raise ConnectionError("the server closed the connection")
        content += more
    return bytes(content)


def _remaining_s(until: float) -> float:
    """Time until then.

    Raises:
        TimeoutError: none is left.
    """
    remaining_s = until - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("timed out")
    return remaining_s


def _address_error(address: str) -> ValueError:
    return ValueError(f"address {address!r}: expected http://HOST:PORT or unix:PATH")


def _socket_path(address: str) -> str:
    path = address.removeprefix("unix:")
    names_host = path.startswith("//") and not path.startswith("///")
    if not path or "\0" in path or names_host:
        raise _address_error(address)
    return path


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, 80 if parts.port is None else parts.port
    except ValueError as error:
        raise _address_error(address) from error
    more = parts.path.rstrip("/") or parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme != "http" or not host or not port or more:
        raise _address_error(address)
    return host, port


def _checked_token(token: str | None) -> str | None:
    stripped = None if token is None else token.strip()
    if stripped is not None and not (stripped and stripped.isascii() and stripped.isprintable()):
        raise ValueError(
            "the token is not printable ASCII: give the one that the policy server was started with"
        )
    return stripped


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return content.decode(errors="replace")[:500]


def decoded_answers(body: bytes, info: Mapping[str, Any], num_rows: int) -> NDArray[Any]:
    """Actions of a frame, whose bytes are little-endian float32, or int64 for whole numbers; with a recurrent policy's
    states, records of ``actions`` and ``states``.

    Args:
        body: of the frame
        info: of the server
        num_rows: of the request
    """
    action, writable = info["action"], bytearray(body)
    number = "<f4" if action["kind"] == "continuous" else "<i8"
    shape = () if action["kind"] == "discrete" else (action["dim"],)
    if info.get("state_dim", 0):
        fields = [("actions", number, shape), ("states", "<f4", (info["state_dim"],))]
        return np.frombuffer(writable, dtype=fields)
    return np.frombuffer(writable, dtype=number).reshape(num_rows, *shape)
