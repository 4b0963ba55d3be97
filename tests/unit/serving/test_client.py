"""The policy server's client with services that misbehave."""

import io
import math
import socket
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from rayagi.serving.client import PolicyClient, PolicyRefusedError, PolicyUnreachableError, _TimedSocket
from rayagi.serving.policy_server.frames import HEADER, MAGIC, Kind, frame

INFO = b'{"obs_dim": 2, "action": {"kind": "continuous", "dim": 1}}'


@contextmanager
def service(answer, path=None):
    """A service that calls ``answer(connection, number)`` for each connection; yields its client's address."""
    listener = socket.create_server(("127.0.0.1", 0)) if path is None else socket.socket(socket.AF_UNIX)
    if path is not None:
        listener.bind(str(path))
        listener.listen()

    def serve():
        number = 0
        with suppress(OSError):  # the listener is closed
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    answer(connection, number)
                number += 1

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}" if path is None else f"unix:{path}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(30)
        assert not thread.is_alive()


def response(status, body):
    return b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def requested(connection):
    """The head of a request."""
    received = b""
    while b"\r\n\r\n" not in received and (more := connection.recv(65536)):
        received += more
    return received


def test_a_status_of_an_overloaded_server_or_proxy_is_tried_again():
    statuses = [503, 502, 504, 200]

    def answer(connection, number):
        requested(connection)
        connection.sendall(response(statuses[number], INFO))

    with service(answer) as address, PolicyClient(address, timeout_s=60) as client:
        assert client.info()["obs_dim"] == 2


@pytest.mark.parametrize("status", [400, 404, 500, 501])
def test_other_errors_are_refusals_at_once(status):
    requests = []

    def answer(connection, number):
        requests.append(requested(connection))
        connection.sendall(response(status, b'{"error": "no"}'))

    with (
        service(answer) as address,
        PolicyClient(address, timeout_s=60) as client,
        pytest.raises(PolicyRefusedError, match=r"^no$"),
    ):
        client.info()
    assert len(requests) == 1


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b"{}", b"[" * 100_000, b"\xff", b""])
def test_another_service_is_no_policy_server(body):
    def answer(connection, number):
        requested(connection)
        connection.sendall(response(200, body))

    with service(answer) as address, PolicyClient(address, timeout_s=60) as client:
        for ask in (client.info, lambda: client.act([1.0, 2.0])):
            with pytest.raises(
                PolicyRefusedError, match=f"{address} is no policy server: it answered /info with"
            ):
                ask()


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"\x93NUMPY", b"PK\x03\x04", b""])
def test_actions_that_are_no_array_are_not_of_a_policy_server(body):
    def answer(connection, number):
        while head := requested(connection):
            connection.sendall(response(200, INFO if b"/info" in head else body))

    with (
        service(answer) as address,
        PolicyClient(address, timeout_s=60) as client,
        pytest.raises(PolicyRefusedError, match="is no policy server: it answered /act with"),
    ):
        client.act([1.0, 2.0])


@pytest.mark.parametrize("transport", ["http header", "http body", "unix"])
def test_a_server_that_never_ends_its_answer_does_not_outlast_the_time_limit(transport, tmp_path):
    begin = {
        "http header": b"HTTP/1.1 200 -\r\nA: ",
        "http body": b"HTTP/1.1 200 -\r\nContent-Length: 1000000\r\n\r\n",
        "unix": HEADER.pack(MAGIC, Kind.HELLO, 0, 1_000_000),
    }[transport]
    never = threading.Event()

    def answer(connection, number):
        connection.sendall(begin)
        while not never.wait(0.01):
            connection.sendall(b"a")

    with (
        service(answer, tmp_path / "s" if transport == "unix" else None) as address,
        PolicyClient(address, timeout_s=0.2) as client,
        pytest.raises(PolicyUnreachableError, match=r"did not answer within 0\.2 s: timed out"),
    ):
        client.act([1.0, 2.0])


def test_a_name_that_is_never_resolved_does_not_outlast_the_time_limit(monkeypatch):
    is_over, ended = threading.Event(), threading.Event()

    def never(*args, **more):
        is_over.wait(60)
        ended.set()
        raise socket.gaierror("too late")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    with pytest.raises(PolicyUnreachableError, match=r"0\.2 s: the address of robot was not found in time"):
        PolicyClient("http://robot:1", timeout_s=0.2).info()
    assert not ended.is_set()
    is_over.set()
    assert ended.wait(60)


def test_every_address_of_a_name_is_tried(monkeypatch):
    """As where ``localhost`` is ::1 first, and the server listens to 127.0.0.1 only."""
    with service(lambda connection, _: connection.sendall(response(200, INFO))) as address:
        port = int(address.rpartition(":")[2])
        free = socket.create_server(("127.0.0.1", 0))
        refusing = free.getsockname()
        free.close()
        addresses = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in (refusing, ("127.0.0.1", port))
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: addresses)
        with PolicyClient("http://robot:1") as client:
            assert client.info()["obs_dim"] == 2


def test_a_timed_socket_ends_at_its_time_although_bytes_are_there():
    own, other = socket.socketpair()
    with _TimedSocket(fileno=own.detach()) as timed, other:
        other.sendall(b"abc")
        timed.until = time.monotonic() + 60
        assert timed.recv(1) == b"a"
        timed.until = time.monotonic()
        for operation in (
            lambda: timed.recv(1),
            lambda: timed.recv_into(bytearray(1)),
            lambda: timed.sendall(b"d"),
        ):
            with pytest.raises(TimeoutError):
                operation()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:80",
        "https://a:1",
        "http://",
        "http://a:0",
        "http://a:65536",
        "http://a:b",
        "http://a:1/path",
        "http://a:1/?query",
        "http://a:1/#part",
        "http://user@a:1",
        "http://[::1",
        "unix:",
        "unix://x/y",
    ],
)
def test_other_addresses_are_refused(address):
    with pytest.raises(ValueError, match=r"expected http://HOST:PORT or unix:PATH$"):
        PolicyClient(address)


def test_an_address_without_a_port_is_at_port_80():
    assert PolicyClient("http://a/")._transport._port == 80
    assert PolicyClient("unix:///a#b?c")._transport._path == "///a#b?c"


@pytest.mark.parametrize("token", ["", " ", "cl\u00e9-secr\u00e8te", "a\nb", "\u4e2d\u6587"])
def test_a_token_that_no_header_can_hold_is_refused(token):
    with pytest.raises(ValueError, match="the token is not printable ASCII"):
        PolicyClient("http://a:1", token=token)


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.inf, math.nan, 1e10])
def test_a_time_limit_that_is_none_is_refused(timeout_s):
    with pytest.raises(
        ValueError, match=r"^timeout_s is .*: expected more than 0 seconds, and at most a year$"
    ):
        PolicyClient("http://a:1", timeout_s=timeout_s)


def test_actions_of_a_policy_server_are_returned_as_they_are():
    actions = io.BytesIO()
    np.save(actions, np.array([[0.5]], np.float32))

    def answer(connection, number):
        while head := requested(connection):
            connection.sendall(response(200, INFO if b"/info" in head else actions.getvalue()))

    with service(answer) as address, PolicyClient(address) as client:
        assert client.act([1.0, 2.0]).tolist() == [0.5]


def test_an_interrupted_request_s_answer_is_not_the_next_one_s(tmp_path, monkeypatch):
    """The first connection refuses, but the client is interrupted before it reads that."""

    def answer(connection, number):
        connection.sendall(frame(Kind.HELLO, 0, INFO.replace(b"{", b'{"max_rows": 8, ', 1)))
        connection.recv(65536)
        ones = np.float32([1]).tobytes()
        connection.sendall(frame(Kind.ACTIONS, 2, ones) if number else frame(Kind.ERROR, 1, b"refused"))
        connection.recv(65536)

    with service(answer, tmp_path / "s") as address, PolicyClient(address, timeout_s=30) as client:
        assert client.info()["obs_dim"] == 2
        with monkeypatch.context() as patch:
            patch.setattr(client._transport, "_read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.act([1.0, 2.0])
        assert client.act([1.0, 2.0]).tolist() == [1.0]


def interrupted(connection):
    raise KeyboardInterrupt
