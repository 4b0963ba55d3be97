"""Tensors that the members of a group map: written at once by each, and a lock that a killed member does not keep."""

import fcntl
import multiprocessing
import os
import signal
import threading
from functools import partial

import pytest
import torch

from collectives import shared_tensors
from collectives.experience.errors import ChannelError
from collectives.shared_tensors import SharedTensors
from collectives.solo import SoloCommunicator
from tests.threads import in_threads
from tests.unit.collectives.thread_group import ThreadGroup

SIZES = {"a": (3, torch.float32), "b": (1, torch.float64), "c": (2, torch.int64)}


def members(number, work):
    group = ThreadGroup.on_one_device(number, timeout_s=30.0)

    def member(rank):
        communicator = group.communicator(rank)
        return work(communicator, SharedTensors(communicator, SIZES))

    return in_threads([partial(member, rank) for rank in range(number)])


def test_what_a_member_writes_all_read():
    def work(communicator, shared):
        assert all((shared[name] == 0).all() for name in SIZES)
        communicator.barrier()
        shared["c"][communicator.rank % 2] = 1 + communicator.rank
        if communicator.rank == 2:
            shared["a"].copy_(torch.tensor([1.0, 2.0, 3.0]))
            shared["b"].fill_(-1.0)
        communicator.barrier()
        return shared["a"].tolist(), float(shared["b"]), int(shared["c"][1])

    assert members(3, work) == [([1.0, 2.0, 3.0], -1.0, 2)] * 3


def test_a_lock_excludes_the_other_members():
    def work(communicator, shared):
        for _ in range(200):
            with shared.lock():
                before = int(shared["c"][0])
                shared["c"][1] = communicator.rank
                shared["c"][0] = before + 1
                assert shared["c"][1] == communicator.rank
        communicator.barrier()
        return int(shared["c"][0])

    assert members(3, work) == [600] * 3


def check_killed_with_the_lock(forks):
    shared = SharedTensors(SoloCommunicator(), SIZES)
    context = multiprocessing.get_context("fork")
    locked, end = context.Event(), context.Event()

    def take_and_die():
        # An open file description of its own.
        shared._lock = os.open(shared._file.endpoint.partition("#")[0], os.O_RDWR)
        with shared.lock():
            shared["c"][0] = 7
            for _ in range(forks):
                context.Process(target=end.wait, args=(60,)).start()
            locked.set()
            os.kill(os.getpid(), signal.SIGKILL)

    process = context.Process(target=take_and_die)
    process.start()
    try:
        assert locked.wait(30)
        _, status = os.waitpid(process.pid, 0)  # ``join`` waits for the forked child, too
        assert os.WTERMSIG(status) == signal.SIGKILL
        fcntl.flock(shared._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel took the lock back
        assert int(shared["c"][0]) == 7
    finally:
        end.set()


def test_a_member_that_is_stopped_with_the_lock_ends_the_others_wait(monkeypatch):
    monkeypatch.setattr(shared_tensors, "LOCK_LIMIT_S", 0.05)
    shared = SharedTensors(SoloCommunicator(), SIZES)
    other = os.open(shared._file.endpoint.partition("#")[0], os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ChannelError, match="another member has held its lock for 0 s"), shared.lock():
        raise AssertionError("nobody has released it")
    os.close(other)
    with shared.lock():
        shared["c"][0] = 1


def test_a_killed_member_keeps_no_lock():
    check_killed_with_the_lock(forks=0)


def test_a_forked_child_keeps_no_lock_of_a_killed_member():
    check_killed_with_the_lock(forks=1)


def test_members_on_several_hosts_are_refused_on_all_of_them(monkeypatch):
    monkeypatch.setattr(shared_tensors, "host_identity", lambda: threading.current_thread().name)
    errors = members(2, lambda communicator, shared: None)
    assert [str(error) for error in errors] == [
        "channel 'shared-tensors': its members are on 2 hosts, which share no memory: use GMIs of one host, or an algorithm "
        "that sends experience or gradients (impala, appo, ppo)"
    ] * 2
