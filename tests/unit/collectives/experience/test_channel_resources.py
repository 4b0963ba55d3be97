"""What channels cost while nothing happens, and what they leave behind: nothing."""

import gc
import os
import time
import tracemalloc

import pytest
from channel_cases import LIMIT_S, SCHEMA, pair, random_rows

from collectives import futex
from collectives.experience import inbox as inbox_module
from collectives.experience.errors import ChannelTimeoutError
from collectives.experience.inbox import Inbox
from collectives.experience.memory import FILE_PREFIX
from collectives.experience.outbox import Outbox


def held():
    """Descriptors and mappings of channels, and descriptors of any kind, that this process has."""
    gc.collect()
    descriptors = os.listdir("/proc/self/fd")
    with open("/proc/self/maps") as maps:
        mappings = sum(FILE_PREFIX in line for line in maps)
    return len(descriptors), mappings


def test_nothing_is_left_after_many_ends_came_and_went():
    before = held()
    inbox = Inbox(SCHEMA)
    for number in range(30):
        with Outbox(SCHEMA, rows=2, producer=number % 3) as outbox:
            outbox.attach(inbox.endpoint)
            outbox.put(random_rows(SCHEMA, 2, number), version=0)
            inbox.take(LIMIT_S).release()
    assert inbox.take(LIMIT_S) is None
    assert held()[1] == before[1] + 2  # the inbox, and the last outbox, which has a name here
    inbox.close()
    del inbox, outbox
    assert held() == before

    outbox = Outbox(SCHEMA, rows=2)
    for number in range(30):
        with Inbox(SCHEMA) as inbox:
            outbox.attach(inbox.endpoint)
            outbox.put(random_rows(SCHEMA, 2, number), version=0)
            inbox.take(LIMIT_S).release()
    outbox.close()
    del inbox, outbox
    assert held() == before


def test_refused_connections_leave_nothing():
    outbox, inbox = pair()
    before = held()
    for _ in range(10):
        with pytest.raises(Exception, match="already"):
            Outbox(SCHEMA, rows=1).attach(inbox.endpoint)
    assert held() == before
    assert len(outbox.consumers()) == 1


def test_who_waits_sleeps(monkeypatch):
    """A look every 50 ms, and nothing in between: far less than a hundredth of a core."""
    looks = []
    sleep = futex.sleep
    monkeypatch.setattr(futex, "sleep", lambda *arguments: (looks.append(arguments), sleep(*arguments)))
    monkeypatch.setattr(inbox_module, "_OFFER_S", 0.0)
    outbox, inbox = pair(slots=1)
    outbox.claim().commit(version=0)
    batch = inbox.take(LIMIT_S)
    for wait in (lambda: inbox.take(timeout_s=0.5), lambda: outbox.claim(timeout_s=0.5)):
        looks.clear()
        begin = time.process_time()
        with pytest.raises(ChannelTimeoutError):
            wait()
        assert len(looks) <= 11
        assert time.process_time() - begin < 0.1  # a thread that spins would have used all of the 0.5 s
    batch.release()


def test_the_steady_state_keeps_no_memory():
    outbox, inbox = pair(rows=512, slots=2)
    rows = random_rows(SCHEMA, 512, 0)

    def exchange(count):
        for version in range(count):
            outbox.put(rows, version, timeout_s=LIMIT_S)
            with inbox.take(LIMIT_S) as batch:
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
