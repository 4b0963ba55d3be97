"""The watches of a local Ray, with processes in the place of Ray's, and of a cluster's head."""

import errno
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from rayagi.coordinator import lost_ray
from rayagi.coordinator.lost_ray import HeadLostError, HeadWatch, LocalRayWatch, when_ray_is_lost


@pytest.fixture
def server():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_that_ends_is_told_to_inner_handlers_first(server):
    calls, done = [], threading.Event()

    def outer(error):
        calls.append(("outer", str(error)))
        error.end_others()
        done.set()

    with (
        when_ray_is_lost(outer),
        when_ray_is_lost(lambda error: calls.append(("inner", error.pid))),
    ):
        LocalRayWatch({"gcs_server": server.pid}, "/logs", lambda: calls.append(("others", 0)))
        server.kill()
        assert done.wait(30)
    assert [name for name, _ in calls] == ["inner", "outer", "others"]
    assert calls[0][1] == server.pid
    assert calls[1][1].startswith(f"Ray's gcs_server on this machine (process {server.pid}) has ended")
    assert calls[1][1].endswith("see Ray's logs in /logs")


def test_a_watch_that_was_stopped_tells_nobody(server):
    errors = []
    with when_ray_is_lost(errors.append):
        watch = LocalRayWatch({"raylet": server.pid}, "/logs", lambda: errors.append(None))
        watch.stop()
        server.kill()
        server.wait(30)
    assert errors == []


def test_where_nobody_handles_it_ray_s_processes_are_left_to_ray(server):
    errors = []
    watch = LocalRayWatch({"raylet": server.pid}, "/logs", lambda: errors.append(None))
    server.kill()
    watch._thread.join(30)
    assert (errors, watch._thread.is_alive()) == ([], False)
    watch.stop()


@pytest.fixture
def asked(monkeypatch):
    """The answers of a head to one connection after the other, two seconds apart; after the last it refuses all."""
    answers, clock = [], iter(range(0, 10_000, 2))

    def connect(address, timeout):
        answer = answers.pop(0) if answers else ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        if isinstance(answer, OSError):
            raise answer
        return socket.socket()

    monkeypatch.setattr(lost_ray, "_HEAD_CHECK_S", 0.0)
    monkeypatch.setattr(lost_ray, "socket", SimpleNamespace(create_connection=connect))
    monkeypatch.setattr(lost_ray, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    return answers


@pytest.mark.parametrize(("rays_limit", "waited_s"), [(None, 42.0), ("600", 420.0)])
def test_a_head_that_does_not_come_back_is_told_before_ray_ends_the_process(
    asked, monkeypatch, rays_limit, waited_s
):
    if rays_limit is None:
        monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    else:
        monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", rays_limit)
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    # It is restarted, then this process has no descriptor for a while.
    asked += [None, *[refused] * int(waited_s // 2), None, *[OSError(errno.EMFILE, "too many")] * 1000]
    errors = []
    with when_ray_is_lost(errors.append):
        watch = HeadWatch("10.0.0.1", 6379)
        watch._thread.join(30)
    assert [(type(error), error.address, error.waited_s) for error in errors] == [
        (HeadLostError, "10.0.0.1:6379", waited_s)
    ]
    assert str(errors[0]).startswith(
        f"the head of the Ray cluster at 10.0.0.1:6379 has accepted no connection for {waited_s:.0f} s while this command"
    )
    watch.stop()


def test_a_watch_of_a_head_ends_when_it_is_stopped():
    with socket.create_server(("127.0.0.1", 0)) as head:
        watch = HeadWatch(*head.getsockname())
        watch.stop()
        assert not watch._thread.is_alive()
