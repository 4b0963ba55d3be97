"""Threads of compiled programs after an interrupt, and after a fork."""

import gc
import os
import weakref

import pytest
import torch
from test_acting import CONTINUOUS, compiled, info_of, policy_of

from actors.roles import Agent
from actors.rollout import Rollout
from rayagi.envs.fused.backends import EnvConfig
from rayagi.envs.fused.c.backend import CBackend
from rayagi.envs.fused.simulators import CartPole
from rayagi.native import acting, learning
from rayagi.native.learning import ThreadPool


class LateFuture:
    """Of a thread that ends its work when it is waited for."""

    def __init__(self, function, arguments):
        self.function, self.arguments = function, arguments

    def cancel(self):
        return False

    def result(self):
        return self.function(*self.arguments)

    def exception(self):
        self.result()


class LatePool:
    def submit(self, function, *arguments):
        return LateFuture(function, arguments)


def interrupt_first(found):
    """What threads do with their part: note its begin; the caller's own is interrupted."""

    def work(begin):
        if begin == 0:
            raise KeyboardInterrupt
        found.append(begin)

    return work


def test_acting_waits_for_its_threads_after_an_interrupt(monkeypatch):
    monkeypatch.setattr(acting, "_PRODUCTS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(acting, "_pool", lambda threads: LatePool())
    info, found = info_of(4, CONTINUOUS), []
    rollout = Rollout.allocate(1, 150, info, torch.device("cpu"))
    act = compiled(Agent(policy_of(info, (8,))), rollout, torch.zeros(1, 150, 3))
    work = interrupt_first(found)
    act._call = lambda policy, fields, t, begin, *others: work(begin)
    with pytest.raises(KeyboardInterrupt):
        act(0, torch.zeros(150, 4))
    assert found == [32, 96]


def test_fused_environments_wait_for_their_threads_after_an_interrupt():
    backend, found = CBackend(EnvConfig(CartPole(), 1000), num_threads=3), []
    backend.close()
    backend._pool = LatePool()
    work = interrupt_first(found)
    with pytest.raises(KeyboardInterrupt):
        backend.on_threads(1 << 20, lambda begin, end: work(begin))
    assert found == [320, 640]  # 16 tiles of 64 environments: 5, 5 and 6


def test_a_pool_lives_while_a_worker_may_read_it(monkeypatch):
    """The wait for the worker is interrupted: it has not seen yet that it shall return."""

    class Interrupted(LateFuture):
        def result(self):
            raise KeyboardInterrupt

    work = []

    class Executor:
        def submit(self, function, *arguments):
            work.append((function, arguments))
            return Interrupted(function, arguments)

    monkeypatch.setattr(learning, "_pool", lambda threads: Executor())
    pool = ThreadPool(learning.library(), 2)
    with pytest.raises(KeyboardInterrupt), pool.running():
        pass
    alive = weakref.ref(pool)
    del pool
    gc.collect()
    assert alive() is not None
    (function, arguments), *_ = work
    function(*arguments)  # returns at once, since it shall
    del function, arguments
    work.clear()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("module", [acting, learning])
def test_a_forked_child_has_threads_of_its_own(module):
    assert module._pool(1).submit(int, 5).result() == 5
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, bytes([module._pool(1).submit(int, 6).result(timeout=5)]))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == bytes([6])
    os.waitpid(child, 0)
