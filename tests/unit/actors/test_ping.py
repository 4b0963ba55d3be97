"""Pings: a process that answers none is stopped or stuck; one that computes, has ended or cannot be reached is neither."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from actors import ping as module
from actors.ping import PingMonitor, PingServer, code_position, is_stopped

_PROGRAM = """
from actors.ping import PingServer
print(PingServer("127.0.0.1").address[1], flush=True)
while True:  # computes
    pass
"""


@pytest.fixture
def process():
    """A process that computes, and the address where it answers."""
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True) as child:
        yield child, ("127.0.0.1", int(child.stdout.readline()))
        child.kill()


def test_a_process_that_computes_answers_and_a_stopped_one_does_not(process):
    child, address = process
    assert not is_stopped(address)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert is_stopped(address)
    os.kill(child.pid, signal.SIGCONT)
    assert not is_stopped(address)


def test_an_ended_process_is_not_stopped():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    assert not is_stopped(address)


def test_a_client_that_leaves_at_once_does_not_end_the_server():
    address = PingServer("127.0.0.1").address
    for _ in range(20):
        socket.create_connection(address).close()
    assert not is_stopped(address)


def waits(done):
    done.wait()


def test_a_process_says_where_the_program_is_that_its_server_was_made_in():
    addresses, done = queue.Queue(), threading.Event()

    def program():
        addresses.put(PingServer("127.0.0.1").address)
        waits(done)

    thread = threading.Thread(target=program)
    thread.start()
    address, code = addresses.get(timeout=30), waits.__code__
    expected, deadline = f"{code.co_filename}:{code.co_firstlineno + 1} in waits", time.monotonic() + 30
    while (found := code_position(address)) != expected:
        assert time.monotonic() < deadline, found
    assert not is_stopped(address)
    done.set()
    thread.join(30)
    assert code_position(address) == ""


@pytest.fixture
def world(monkeypatch):
    """The time, the addresses of stopped processes, and the pings so far."""
    world = SimpleNamespace(now_s=0.0, stopped=set(), pinged=[])

    def ask(address):
        world.pinged.append(address)
        return address in world.stopped

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: world.now_s))
    monkeypatch.setattr(module, "is_stopped", ask)
    return world


def test_a_gmi_is_silent_once_it_has_answered_nothing_for_the_limit(world):
    monitor = PingMonitor(silence_s=60.0)
    monitor.add(0, ("a", 1))
    monitor.add(1, None)
    world.stopped = {("a", 1)}
    for world.now_s in range(0, 60, 5):
        assert monitor.silent([0, 1]) == []
    world.now_s = 60
    assert monitor.silent([0, 1]) == [0]
    assert monitor.reason(0).startswith(
        "its process has answered nothing for 60 s, so it is stopped or stuck (where"
    )


def test_an_answer_ends_the_silence(world):
    monitor = PingMonitor(silence_s=60.0)
    monitor.add(0, ("a", 1))
    for now_s, stopped in ((0, True), (55, False), (60, True), (115, True)):
        world.now_s, world.stopped = now_s, {("a", 1)} if stopped else set()
        assert monitor.silent([0]) == []
    world.now_s = 120
    assert monitor.silent([0]) == [0]


def test_a_gmi_is_pinged_every_five_seconds_and_its_successor_begins_anew(world):
    monitor = PingMonitor(silence_s=60.0)
    monitor.add(0, ("a", 1))
    world.stopped = {("a", 1)}
    for world.now_s in (0.0, 1.0, 4.9, 5.0):
        monitor.silent([0])
    assert len(world.pinged) == 2
    monitor.add(0, ("b", 2))
    world.now_s = 100.0
    assert monitor.silent([0]) == []
    monitor.remove(0)
    assert monitor.stopped([0]) == []


def test_a_driver_that_was_stopped_itself_asks_again_before_it_judges(world):
    monitor = PingMonitor(silence_s=60.0)
    monitor.add(0, ("a", 1))
    world.stopped = {("a", 1)}
    monitor.silent([0])
    world.now_s, world.stopped = 1000.0, set()
    assert monitor.silent([0]) == []
