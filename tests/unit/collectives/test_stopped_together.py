"""A job that was stopped for an hour, all of it, goes on: nobody is late because of that time."""

import threading
import time
from functools import partial

import pytest
import torch
from test_shm_kernel import close
from test_shm_kernel import group as shm_group
from test_shm_waiting import BARRIER, barriers
from test_tcp_transport import Board, together
from test_tcp_transport import group as tcp_group

from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.parameters import ParameterStore
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field
from collectives.transports import tcp

LIMIT_S = 30.0
SCHEMA = ExperienceSchema("numbers", (Field(name="number", dtype=torch.int64),))


class Clock:
    """``time.monotonic`` that may jump, and says how often a thread looks at it."""

    def __init__(self):
        self._now, self._looked = time.monotonic, threading.Condition()
        self.jump_s, self.looks, self.waiter = 0.0, 0, None

    def __call__(self):
        if threading.get_ident() == self.waiter:
            with self._looked:
                self.looks += 1
                self._looked.notify_all()
        return self._now() + self.jump_s

    def await_looks(self, count):
        """Wait until the thread has looked so often, or has ended."""
        with self._looked:
            until = self.looks + count
            assert self._looked.wait_for(lambda: self.waiter is None or self.looks >= until, LIMIT_S)

    def run(self, wait, errors):
        self.waiter = threading.get_ident()
        try:
            wait()
        except Exception as error:
            errors.append(error)
        with self._looked:
            self.waiter = None
            self._looked.notify_all()


@pytest.fixture
def goes_on(monkeypatch):
    """``goes_on(wait, arrive)``: waits in a thread, which an hour passes by before the other side arrives."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)

    def check(wait, arrive):
        errors = []
        thread = threading.Thread(target=clock.run, args=(wait, errors), daemon=True)
        clock.waiter = 0
        thread.start()
        clock.await_looks(8)
        clock.jump_s += 3600.0
        clock.await_looks(8)
        arrive()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        assert errors == []

    return check


def test_in_a_barrier(goes_on):
    segment, (first, second) = barriers(2)
    goes_on(partial(first.arrive, BARRIER), partial(second.arrive, BARRIER))
    segment.close()


def test_in_a_reduction_in_shared_memory(goes_on):
    transports = shm_group(2)
    tensors = [torch.full((50_000,), value) for value in (1.0, 2.0)]
    goes_on(*(partial(each.all_reduce, tensor) for each, tensor in zip(transports, tensors, strict=True)))
    assert all(tensor.eq(3.0).all() for tensor in tensors)
    close(transports)


def test_in_a_reduction_over_tcp(goes_on):
    board = Board()
    transports = together(*(partial(tcp.connect, tcp_group(board, rank, 2)) for rank in range(2)))
    tensors = [torch.full((50_000,), value) for value in (1.0, 2.0)]
    goes_on(*(partial(each.all_reduce, tensor) for each, tensor in zip(transports, tensors, strict=True)))
    assert all(tensor.eq(3.0).all() for tensor in tensors)
    close(transports)


def test_as_a_consumer_of_experience_and_as_its_producer(goes_on):
    ring, consumer = ProducerRing(SCHEMA, slots=1, rows=1), ConsumerEndpoint(SCHEMA)
    ring.attach(consumer.endpoint)
    put = partial(ring.put, {"number": torch.zeros(1, dtype=torch.int64)}, version=0)
    taken = []
    goes_on(lambda: taken.append(consumer.take(LIMIT_S)), put)
    goes_on(partial(ring.reserve, timeout_s=LIMIT_S), lambda: taken[0].release())
    ring.close(timeout_s=0.0)
    consumer.close()


def test_as_a_reader_of_parameters(goes_on):
    tensors = {"weight": torch.ones(3)}
    store = ParameterStore.host(tensors)
    with ParameterStore.attach(store.endpoint) as reader:
        goes_on(partial(reader.wait, 1, LIMIT_S), partial(store.publish, tensors, 1))
    store.close()
