"""The watch of a local Ray, with processes in the place of Ray's."""

import subprocess
import sys
import threading

import pytest

from rayagi.coordinator.lost_ray import LocalRayWatch, when_local_ray_is_lost


@pytest.fixture
def server():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_that_ends_is_told_to_inner_handlers_first(server):
    told, done = [], threading.Event()

    def outer(error):
        told.append(("outer", str(error)))
        error.end_others()
        done.set()

    with (
        when_local_ray_is_lost(outer),
        when_local_ray_is_lost(lambda error: told.append(("inner", error.pid))),
    ):
        LocalRayWatch({"gcs_server": server.pid}, "/logs", lambda: told.append(("others", 0)))
        server.kill()
        assert done.wait(30)
    assert [name for name, _ in told] == ["inner", "outer", "others"]
    assert told[0][1] == server.pid
    assert told[1][1].startswith(f"Ray's gcs_server on this machine (process {server.pid}) has ended")
    assert told[1][1].endswith("see Ray's logs in /logs")


def test_a_watch_that_was_stopped_tells_nobody(server):
    told = []
    with when_local_ray_is_lost(told.append):
        watch = LocalRayWatch({"raylet": server.pid}, "/logs", lambda: told.append(None))
        watch.stop()
        server.kill()
        server.wait(30)
    assert told == []


def test_where_nobody_handles_it_ray_s_processes_are_left_to_ray(server):
    told = []
    watch = LocalRayWatch({"raylet": server.pid}, "/logs", lambda: told.append(None))
    server.kill()
    watch._thread.join(30)
    assert (told, watch._thread.is_alive()) == ([], False)
    watch.stop()
