"""Processes for the tests of replay: forked, killed and waited for."""

import ctypes
import os
import signal
import struct

import pytest

from actors.replay import kernel

_TRACE_ME, _SINGLE_STEP = 0, 9
"""Requests of ptrace(2)."""
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


def stepped(act, condition):
    """Do ``act`` in a child, one machine instruction after the other until a condition of shared memory is true.

    Then the child is killed. Returns whether it was; else it has ended by itself. Skips the test where a process may not
    trace another.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)

    def work(_):
        if libc.ptrace(_TRACE_ME, 0, None, None):
            os._exit(77)
        kernel.library().replay_identity()  # found by many instructions, which touch nothing that is shared
        signal.raise_signal(signal.SIGSTOP)
        act()
        os._exit(0)

    child, read = forked(work)
    os.close(read)
    status = os.waitpid(child, 0)[1]
    while os.WIFSTOPPED(status) and not condition():
        libc.ptrace(_SINGLE_STEP, child, None, None)
        status = os.waitpid(child, 0)[1]
    if os.WIFSTOPPED(status):
        kill(child)
        return True
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 77:
        pytest.skip("this process may not trace another")
    assert status == 0, f"the process crashed or raised: {status}"
    return False


def killed_when(act, condition):
    """Kill a child that does ``act`` after the first instruction after which a condition of shared memory is true."""
    assert stepped(act, condition), "the condition has never been true"
