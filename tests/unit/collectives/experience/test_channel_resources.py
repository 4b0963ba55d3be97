"""Idle channels cost little, and closed channels leave nothing behind."""

import contextlib
import gc
import os
import resource
import time
import tracemalloc

import pytest
import torch
from channel_cases import LIMIT_S, SCHEMA, pair, random_rows

from collectives import futex
from collectives.experience import consumer_endpoint as endpoint_module
from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import ChannelError, ChannelTimeoutError
from collectives.experience.file_layout import FILE_PREFIX
from collectives.experience.producer_ring import ProducerRing


def held():
    """Descriptors and mappings of channels, and descriptors of any kind, that this process has."""
    gc.collect()
    descriptors = os.listdir("/proc/self/fd")
    with open("/proc/self/maps") as maps:
        mappings = sum(FILE_PREFIX in line for line in maps)
    return len(descriptors), mappings


def test_nothing_is_left_after_many_endpoints_were_opened_and_closed():
    before = held()
    consumer_endpoint = ConsumerEndpoint(SCHEMA)
    for number in range(30):
        with ProducerRing(SCHEMA, rows=2, producer=number % 3) as ring:
            ring.attach(consumer_endpoint.endpoint)
            ring.put(random_rows(SCHEMA, 2, number), version=0)
            consumer_endpoint.take(LIMIT_S).release()
    assert consumer_endpoint.take(LIMIT_S) is None
    assert (
        held()[1] == before[1] + 2
    )  # the consumer endpoint, and the last ring, which a local variable refers to
    consumer_endpoint.close()
    del consumer_endpoint, ring
    assert held() == before

    ring = ProducerRing(SCHEMA, rows=2)
    for number in range(30):
        with ConsumerEndpoint(SCHEMA) as consumer_endpoint:
            ring.attach(consumer_endpoint.endpoint)
            ring.put(random_rows(SCHEMA, 2, number), version=0)
            consumer_endpoint.take(LIMIT_S).release()
    ring.close()
    del consumer_endpoint, ring
    assert held() == before


def test_refused_connections_leave_nothing():
    ring, consumer_endpoint = pair()
    before = held()
    for _ in range(10):
        with pytest.raises(Exception, match="already"):
            ProducerRing(SCHEMA, rows=1).attach(consumer_endpoint.endpoint)
    assert held() == before
    assert len(ring.consumers()) == 1


def test_waiting_sides_sleep(monkeypatch):
    """One check every 50 ms, and nothing in between: far less than a hundredth of a core."""
    sleeps = []
    sleep = futex.sleep
    monkeypatch.setattr(futex, "sleep", lambda *arguments: (sleeps.append(arguments), sleep(*arguments)))
    monkeypatch.setattr(endpoint_module, "_YIELD_S", 0.0)
    ring, consumer_endpoint = pair(slots=1)
    ring.reserve().commit(version=0)
    batch = consumer_endpoint.take(LIMIT_S)
    for wait in (lambda: consumer_endpoint.take(timeout_s=0.5), lambda: ring.reserve(timeout_s=0.5)):
        sleeps.clear()
        begin = time.process_time()
        with pytest.raises(ChannelTimeoutError):
            wait()
        assert len(sleeps) <= 11
        assert time.process_time() - begin < 0.1  # a thread that spins would have used all of the 0.5 s
    batch.release()


def test_the_steady_state_allocates_no_memory():
    ring, consumer_endpoint = pair(rows=512, slots=2)
    rows = random_rows(SCHEMA, 512, 0)

    def exchange(count):
        for version in range(count):
            ring.put(rows, version, timeout_s=LIMIT_S)
            with consumer_endpoint.take(LIMIT_S) as batch:
                assert batch.num_rows == 512

    exchange(4)
    tracemalloc.start()
    exchange(8)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    exchange(200)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 4096
    assert peak - before < 16384  # a batch has 35 kB


def in_a_child(work):
    """Fork; what the parent had goes out of scope in the child, as after ``sys.exit()``."""
    child = os.fork()
    if not child:
        work()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_gives_nothing_of_its_parent_s_back():
    ring, consumer = pair(slots=2)
    held = {"batch": None, "ring": ring, "consumer": consumer}
    ring.put(random_rows(SCHEMA, 4, seed=1), version=0)
    held["batch"] = consumer.take(LIMIT_S)
    seen = {name: tensor.clone() for name, tensor in held["batch"].tensors.items()}

    def end():
        batch = held.pop("batch")
        batch.release()
        held.pop("ring").close()
        held.pop("consumer").close()

    in_a_child(end)
    in_a_child(held.clear)  # without a call
    ring.put(random_rows(SCHEMA, 4, seed=2), version=1, timeout_s=LIMIT_S)
    with pytest.raises(ChannelTimeoutError):
        ring.put(random_rows(SCHEMA, 4, seed=3), version=2, timeout_s=0.05)  # the held batch is not free
    for name, tensor in held["batch"].tensors.items():
        assert torch.equal(tensor, seen[name])
    assert consumer.take(LIMIT_S).version == 1
    held["batch"].release()


def test_a_producer_that_connects_while_no_descriptor_is_free_is_found_later():
    consumer = ConsumerEndpoint(SCHEMA)
    ring = ProducerRing(SCHEMA, rows=4, slots=2)
    ring.attach(consumer.endpoint)
    ring.put(random_rows(SCHEMA, 4, seed=1), version=7)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    for free in (2, 1, 0):
        # Every number below the limit is taken but for these.
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, hard))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(free):
            os.close(taken.pop())
        try:
            with contextlib.suppress(ChannelError):
                assert consumer.take(0.05) is not None
                break
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    else:
        assert consumer.take(LIMIT_S).version == 7
    ring.close()
    consumer.close()
