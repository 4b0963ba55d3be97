"""Processes for the tests of replay: forked, killed and waited for."""

import os
import signal
import struct
import time

LIMIT_S = 60
"""After which something that must happen counts as not happening. Nothing is asserted about less."""


def forked(work):
    """Run work(write end of a pipe) in a child that never returns. Gives its id and the pipe's read end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(2 * LIMIT_S)  # of a test that failed
        try:
            work(write)
        finally:
            os._exit(1)
    os.close(write)
    return child, read


def received(read):
    """All whole messages of a child that has ended: (number, index, generation)."""
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    return list(struct.iter_unpack("qqq", data[: len(data) // 24 * 24]))


def kill(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def until(condition):
    """Wait for a condition that other processes bring about."""
    end = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < end
        os.sched_yield()
    return found
