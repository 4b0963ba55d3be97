"""The watch for a killed raylet, with a process of that name in its place."""

import os
import signal
import subprocess
import sys

import pytest

WORKER = """
import os, sys, time
from actors.raylet_watch import end_with_raylet
os.environ["RAY_RAYLET_PID"] = sys.argv[1]
end_with_raylet()
end_with_raylet()
print(sum(name == "raylet watch" for name in (t.name for t in __import__("threading").enumerate())), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def started():
    """Starts processes that are ended afterwards."""
    processes = []

    def start(*command):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def named(folder, name):
    """A program of that name that ends with its input."""
    program = folder / name
    program.symlink_to("/bin/cat")
    return str(program)


def test_a_worker_ends_with_its_raylet_although_nobody_has_waited_for_that(started, tmp_path):
    raylet = started(named(tmp_path, "raylet"))
    worker = started(sys.executable, "-c", WORKER, str(raylet.pid))
    assert worker.stdout.readline() == "1\n"
    raylet.send_signal(signal.SIGKILL)
    worker.wait(timeout=30)
    assert worker.returncode == -signal.SIGKILL
    os.kill(raylet.pid, 0)  # it is still there for whoever asks so


def test_a_process_of_another_name_is_not_the_raylet(started, tmp_path):
    """In a process namespace of its own, a worker's raylet has another id there."""
    other = started(named(tmp_path, "other"))
    worker = started(sys.executable, "-c", WORKER, str(other.pid))
    assert worker.stdout.readline() == "0\n"


def test_outside_of_ray_nothing_is_watched(started):
    worker = started(sys.executable, "-c", WORKER, "")
    assert worker.stdout.readline() == "0\n"
