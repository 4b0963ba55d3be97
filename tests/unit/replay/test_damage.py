"""Shared memory of a store that a faulty program has written into: requests are refused; none crashes or never returns."""

import os
import re
from functools import partial

import numpy as np
import pytest
from replay_processes import forked
from replay_tables import SCHEMA, content

from actors.replay import (
    Prioritized,
    RateLimit,
    ReplayCheckpointer,
    ReplayError,
    ReplayStore,
    Subscription,
    Uniform,
    gather,
    select,
)
from actors.replay.errors import ReplayBusyError, ReplayDamagedError
from actors.replay.kernel import REMOVALS
from actors.replay.layout import layout_of

CAPACITY, BUDGET, FAR = 100, 29_000, 2**30


def full_store(folder, removal="fifo"):
    """All rows but two are committed; with a folder, some are spilled."""
    store = ReplayStore.create(
        SCHEMA,
        CAPACITY,
        selectors=(Uniform(), Prioritized(0.6)),
        removal=removal,
        memory_bytes=BUDGET if folder else None,
        folder=folder,
    )
    for _ in range(4):
        store.insert(content(range(CAPACITY // 4)))
    return store, [store.allocate() for _ in range(2)]


def use(store):
    """Requests of all kinds that follow links, entries and numbers in shared memory."""
    for draw in range(CAPACITY):
        store.insert(content([draw]))
        chosen = select(store, Prioritized(0.6), 16, seed=0, draw=draw)
        gather(store, chosen, [Subscription(column="obs", length=2)])
        store.update_priorities(chosen.keys, np.ones(16))
        if draw % 10 == 0:
            store.delete(chosen.keys)
            store.reclaim()
            store.metrics()


def outcome(act):
    """The text of the error of a store that ``act`` raises in a process of its own; "" if it returns."""

    def work(write):
        try:
            act()
        except (ReplayError, ReplayBusyError) as error:
            os.write(write, str(error).encode())
        os._exit(0)

    child, read = forked(work)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the process crashed, raised something else, or did not return: {status}"
    return text


def row(name, value):
    """Damage one field of all rows."""

    def damage(store):
        store._rows[name] = value

    return damage


def header(**values):
    """Damage fields of the header."""

    def damage(store):
        for name, value in values.items():
            setattr(store._header, name, value)

    return damage


def free_indices(**values):
    """Damage the queue of free indices, in which there are some."""

    def damage(store):
        store.delete(select(store, Uniform(), 4, seed=0, draw=0).keys)
        header(**values)(store)

    return damage


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(row("next", FAR), id="next"),
        pytest.param(row("prev", -FAR), id="prev"),
        pytest.param(row("next", 0), id="a list that comes back to a row"),
        pytest.param(row("slot", FAR), id="slot"),
        pytest.param(row("slot", -FAR), id="slot below 0"),
        pytest.param(row("length", FAR), id="length"),
        pytest.param(row("tag", 1 << 2), id="state"),
        pytest.param(header(oldest=FAR), id="oldest"),
        pytest.param(header(newest=-FAR), id="newest"),
        pytest.param(header(writers=FAR), id="first writer"),
        pytest.param(header(writers=CAPACITY // 2), id="first writer, which is none"),
        pytest.param(header(free=2**60), id="length of the queue"),
        pytest.param(header(limit=3), id="rate limiter"),
        pytest.param(header(limit=-1), id="rate limiter below 0"),
        pytest.param(free_indices(first_free=FAR), id="begin of the queue"),
        pytest.param(free_indices(first_free=CAPACITY // 2), id="begin of the queue, which is not free"),
        pytest.param(free_indices(last_free=-FAR), id="end of the queue"),
    ],
)
def test_a_damaged_store_is_refused_by_name(tmp_path, damage, spills):
    store, _ = full_store(tmp_path if spills else None)

    damage(store)
    number_of_file = store.endpoint.partition("|")[0].partition("#")[2]
    assert re.match(
        rf"the shared memory of replay store \S+#{number_of_file}\|\S+ is damaged",
        outcome(partial(use, store)),
    )


@pytest.mark.parametrize("limit", [3, -1, 2**62])
@pytest.mark.parametrize(
    "request_of",
    [
        pytest.param(lambda store, _: store.limiter.status(), id="status"),
        pytest.param(lambda store, _: store.limiter.set(RateLimit(min_size=2)), id="set"),
        pytest.param(lambda store, _: store.limiter.shift_error(1.0), id="shift"),
        pytest.param(lambda store, _: store.limiter.timeout_s(), id="timeout"),
        pytest.param(lambda store, _: store.insert(content([0])), id="insert"),
        pytest.param(lambda store, _: select(store, Uniform(), 1, seed=0, draw=0), id="select"),
        pytest.param(lambda store, folder: ReplayCheckpointer(store).save(folder), id="checkpoint"),
    ],
)
def test_a_damaged_rate_limiter_is_refused_by_name(tmp_path, request_of, limit):
    store, _ = full_store(None)
    store._header.limit = limit
    with pytest.raises(ReplayDamagedError, match=r"the shared memory of replay store .* is damaged"):
        request_of(store, tmp_path / "saved")


@pytest.mark.parametrize("removal", REMOVALS[:-1])
def test_no_damage_crashes_a_process(tmp_path, removal):
    """Any bytes of the status table, links, queue and trees; only the lock, which is the C library's, is spared."""
    rng = np.random.default_rng(REMOVALS.index(removal))
    for attempt in range(12):
        store, _ = full_store(tmp_path if attempt % 2 else None, removal)
        memory = np.frombuffer(store._control, np.uint8)
        for begin in rng.integers(layout_of(store._meta)["rows"], len(memory) - 8, 4):
            memory[begin : begin + 8] = rng.choice([0x00, 0x7F, 0xFF])
        outcome(partial(use, store))
