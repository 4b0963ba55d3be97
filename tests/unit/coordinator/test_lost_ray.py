"""The watches of a local Ray, with processes in the place of Ray's, and of a cluster's head."""

import copy
import errno
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from rayagi.config.spec import GmiSpec, RunSpec
from rayagi.coordinator import cluster, lost_ray
from rayagi.coordinator.cluster import named_loss, raise_if_lost
from rayagi.coordinator.decoupled import session_of
from rayagi.coordinator.lost_ray import (
    HeadLostError,
    HeadWatch,
    LocalRayLostError,
    LocalRayWatch,
    when_ray_is_lost,
)
from rayagi.coordinator.session import SessionClosedError


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


def test_a_process_that_has_ended_before_the_watch_is_lost_too(server):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    done, errors = threading.Event(), []

    def handler(error):
        errors.append((error.process, error.pid, threading.current_thread() is threading.main_thread()))
        done.set()

    with when_ray_is_lost(handler):
        watch = LocalRayWatch({"raylet": ended.pid, "gcs_server": server.pid}, "/logs", lambda: None)
        assert done.wait(30)
        watch.stop()
    assert errors == [("raylet", ended.pid, False)]


def test_a_watch_that_was_stopped_tells_nobody(server):
    errors = []
    with when_ray_is_lost(errors.append):
        watch = LocalRayWatch({"raylet": server.pid}, "/logs", lambda: errors.append(None))
        watch.stop()
        server.kill()
        server.wait(30)
    assert watch.lost is None
    assert errors == []


def test_where_nobody_handles_it_the_next_call_raises_it(server):
    ended = []
    watch = LocalRayWatch({"raylet": server.pid}, "/logs", lambda: ended.append(None))
    assert watch.lost is None
    server.kill()
    watch._thread.join(30)
    assert not watch._thread.is_alive()
    assert str(watch.lost).startswith(f"Ray's raylet on this machine (process {server.pid}) has ended")
    assert ended == []  # Ray's other processes are left to Ray
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
        f"the head of the Ray cluster at 10.0.0.1:6379 has accepted no connection for {waited_s:.0f} s while this program"
    )
    watch.stop()


def test_a_watch_of_a_head_ends_when_it_is_stopped():
    with socket.create_server(("127.0.0.1", 0)) as head:
        watch = HeadWatch(*head.getsockname())
        watch.stop()
        assert not watch._thread.is_alive()


@pytest.fixture
def watch(monkeypatch):
    """A watch of this process's Ray, and how often it was shut down."""
    watch = SimpleNamespace(lost=None, stop=lambda: None, shutdowns=0)

    def shutdown():
        watch.shutdowns += 1

    monkeypatch.setattr(cluster, "_watches", [watch])
    monkeypatch.setattr(cluster.ray, "shutdown", shutdown)
    return watch


def test_what_the_loss_of_ray_causes_is_raised_as_the_loss(watch, monkeypatch):
    with pytest.raises(ZeroDivisionError), named_loss():
        raise ZeroDivisionError
    assert watch.shutdowns == 0
    watch.lost = HeadLostError("10.0.0.1:6379", 42.0)
    with pytest.raises(HeadLostError) as caught, named_loss(), named_loss():
        raise ZeroDivisionError
    assert (caught.value, type(caught.value.__cause__)) == (watch.lost, ZeroDivisionError)
    # This process has left it: Ray would end it.
    assert watch.shutdowns == 1
    monkeypatch.setattr(cluster, "_watches", [watch])
    watch.lost = HeadLostError("10.0.0.1:6379", 42.0)
    with pytest.raises(HeadLostError) as caught, named_loss():
        raise_if_lost()
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("template", ["dp_only", "decoupled"])
def test_a_session_that_waits_ends_with_the_loss_of_ray(watch, template):
    undone = []
    session = session_of(RunSpec(gmi=GmiSpec(template=template)))

    def answers(refs, asked, limit_s, of, wait_check):
        watch.lost = HeadLostError("10.0.0.1:6379", 42.0)
        wait_check()

    session._group, session._ended = SimpleNamespace(answers=answers), ""
    session._undo.callback(lambda: undone.append(watch.shutdowns))
    with pytest.raises(HeadLostError, match="the head of the Ray cluster at"):
        session._answers([], "1 training iteration", 1.0)
    # What is undone finds no Ray, and waits for nothing.
    assert undone == [1]
    with pytest.raises(SessionClosedError, match=r"has ended \(HeadLostError in 1 training iteration"):
        session.train(1)


def test_a_session_that_is_closed_does_not_wait_for_a_lost_ray(watch):
    undone = []
    session = session_of(RunSpec())
    session._undo.callback(lambda: undone.append(watch.shutdowns))
    watch.lost = HeadLostError("10.0.0.1:6379", 42.0)
    session.close()
    assert undone == [1]


def test_a_session_whose_gmis_still_answer_ends_with_the_loss_of_ray(watch):
    session = session_of(RunSpec())
    session._group = SimpleNamespace(answers=lambda *given: ["answer"])
    assert session._answers([], "its state", 1.0) == ["answer"]
    watch.lost = HeadLostError("10.0.0.1:6379", 42.0)
    with pytest.raises(HeadLostError):
        session._answers([], "its state", 1.0)


def test_the_loss_can_be_copied_as_ray_tune_does():
    ended = []
    error = copy.copy(LocalRayLostError("raylet", 1, "/logs", lambda: ended.append(True)))
    error.end_others()
    assert (str(error).split(" has ended")[0], ended) == ("Ray's raylet on this machine (process 1)", [True])
