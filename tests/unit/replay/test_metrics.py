"""Metrics of a store: histograms by hand, bytes by tier, intervals, names of the catalogue."""

import time
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_tables import SCHEMA, content

from actors.replay import (
    Histogram,
    RateLimit,
    ReplayMeter,
    ReplayShard,
    ReplayShards,
    ReplayStore,
    Subscription,
    TopK,
    Uniform,
    gather,
    select,
)
from actors.replay.kernel import BINS, COMMITTED
from rayagi.monitoring.catalogue import CATALOGUE, HISTOGRAMS
from rayagi.monitoring.report import _replay

NAMES = {metric.name for metric in CATALOGUE if metric.group == "replay"} - {
    "replay_transitions",  # of learners, whose rows are of several
    "replay_new_transitions",
}


def bins(histogram):
    """Counts of the bins that have any."""
    return {int(at): int(histogram.counts[at]) for at in np.flatnonzero(histogram.counts)}


def test_staleness_is_rows_drawn_between_insertion_and_draw():
    store = ReplayStore.create(SCHEMA, 1)
    store.insert(content([0]))
    select(store, Uniform(), 4, seed=0, draw=0)  # nothing was drawn before: 0
    select(store, Uniform(), 8, seed=0, draw=1)  # 4, in bin 3: 4 to 7
    assert bins(store.metrics().staleness) == {0: 4, 3: 8}
    store.insert(content([1]))  # overwrites the row after 12 draws
    select(store, Uniform(), 2, seed=0, draw=2)
    assert bins(store.metrics().staleness) == {0: 6, 3: 8}
    assert (store.metrics().samples, store.metrics().evictions, store.metrics().inserts) == (14, 1, 2)


def test_ages_are_from_timestamp_to_draw():
    store = ReplayStore.create(SCHEMA, 2)
    old = time.time_ns() - 3 * 2**39  # in the middle of bin 41: 2**40 to 2**41 - 1 ns, 18 to 37 minutes
    store.insert(content([0, 1]), timestamps=[old, 2**61])  # the other is in the future: at most 0
    select(store, TopK(), 2, seed=0, draw=0)
    assert bins(store.metrics().ages) == {0: 1, 41: 1}


def test_a_large_draw_counts_all_of_its_rows():
    store = ReplayStore.create(SCHEMA, 4)
    store.insert(content(range(4)))
    select(store, Uniform(), 1003, seed=0, draw=0)
    metrics = store.metrics()
    assert (metrics.staleness.total, metrics.ages.total, metrics.samples) == (1003, 1003, 1003)
    # Each of the four rows was drawn about 250 times: 128 to 255, or 256 to 511.
    assert set(bins(metrics.times_sampled)) <= {8, 9}
    assert metrics.times_sampled.total == 4


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=50), st.floats(0.01, 0.99))
def test_quantiles_are_right_to_a_factor_of_two(values, share):
    counts = np.bincount([value.bit_length() for value in values], minlength=BINS)
    found = Histogram(counts).quantile(share)
    exact = sorted(values)[int(np.ceil(share * len(values))) - 1]
    assert exact / 2 <= found <= 2 * max(exact, 0)


def test_bytes_are_counted_by_tier(tmp_path):
    store = ReplayStore.create(SCHEMA, 200, memory_bytes=40_000, folder=tmp_path)
    rng = np.random.default_rng(0)
    for number in range(400):
        keys = store.insert(content([number]))
        if rng.random() < 0.3:
            store.delete(keys)
    for draw in range(60):  # rows that are read often return to memory
        chosen = select(store, TopK(), 8, seed=0, draw=draw)
        gather(store, chosen, [Subscription(column="obs")])
    assert store.counters()["promoted"] > 0
    rows = store.snapshot()
    spilled = int((((rows["tag"] & np.uint64(3)) == COMMITTED) & (rows["slot"] < 0)).sum())
    metrics = store.metrics()
    assert metrics.spilled_rows == spilled > 0
    assert metrics.spilled_bytes == spilled * SCHEMA.row_bytes
    assert (metrics.memory_bytes <= 40_000, metrics.mapped_bytes) == (True, 0)
    mapped = ReplayStore.create(SCHEMA, 200, folder=tmp_path).metrics()
    assert mapped.mapped_bytes >= 200 * SCHEMA.row_bytes > mapped.memory_bytes - 200 * 64
    assert mapped.spilled_bytes == 0


def test_a_meter_gives_intervals_by_the_catalogues_names():
    store = ReplayStore.create(SCHEMA, 4, limit=RateLimit(samples_per_insert=2.0, error_buffer=100.0))
    meter = ReplayMeter(store)
    empty = meter.values()
    assert empty["replay_samples"] == empty["replay_rows"] == empty["replay_times_sampled_p50"] == 0.0
    assert "replay_age_p50_s" not in empty
    store.insert(content(range(4)))
    select(store, Uniform(), 3, seed=0, draw=0)
    first = meter.values()
    assert first.keys() == NAMES
    assert (first["replay_inserts"], first["replay_samples"], first["replay_shard_samples"]) == (4, 3, 3)
    assert first["replay_limiter_error"] == 2.0 * (4 - 1) - 3
    assert meter.histograms.keys() == HISTOGRAMS.keys()
    assert {name: sum(counts) for name, counts in meter.histograms.items()} == {
        "replay_age": 3, "replay_staleness": 3, "replay_times_sampled": 4
    }  # fmt: skip
    store.insert(content([4, 5]))
    second = meter.values()
    assert meter.histograms.keys() == {"replay_times_sampled"}  # of rows that are there; nothing was drawn
    assert (second["replay_inserts"], second["replay_samples"], second["replay_evictions"]) == (2, 0, 2)
    assert all(isinstance(value, float) for value in second.values())
    without = ReplayMeter(ReplayStore.create(SCHEMA, 4)).values()
    assert not [name for name in without if "limiter" in name or "wait" in name]


def test_the_report_says_what_the_replay_holds():
    row = {"replay_rows": 2000.0, "replay_memory_bytes": 2.0**20, "replay_inserts": 100.0}
    text = _replay([{**row, "replay_samples": 450.0}, {**row, "replay_samples": 350.0}])
    assert text == "2k rows in a replay of 1 MiB of memory; 4 drawn per row inserted"
    row |= {"replay_transitions": 16_000.0, "replay_new_transitions": 800.0, "replay_samples": 1600.0}
    text = _replay([row])
    assert text == "16k transitions in a replay of 1 MiB of memory; 2 drawn per transition inserted"
    before = {
        "replay_rows": 9.0,
        "replay_memory_bytes": 1.0,
        "replay_inserts": 100.0,
        "replay_samples": 900.0,
    }
    assert _replay([before, row]) == text  # a run that an earlier version began
    waited = _replay([{**row, "replay_disk_bytes": 2.0**30, "replay_insert_wait_s": 90.0}])
    assert "and 1.00 GiB on disk" in waited
    assert waited.endswith("insert waited 1 min 30 s for the rate limiter")


@pytest.mark.parametrize("shards", [1, 3])
def test_the_load_of_each_shard_is_what_was_drawn_from_it(shards):
    stores = [ReplayStore.create(SCHEMA, 4, shard=k, num_shards=shards) for k in range(shards)]
    for number, store in enumerate(stores):
        store.insert(content(range(1 + number)))
    chosen = select(stores, Uniform(), 60, seed=0, draw=0)
    loads = [store.metrics().samples for store in stores]
    assert loads == np.bincount(chosen.keys.indices // 4, minlength=shards).tolist()
    assert [store.metrics().loads for store in stores] == [{k: load} for k, load in enumerate(loads)]


def test_a_table_has_the_sums_of_its_shards_and_the_load_of_each():
    limit = RateLimit(samples_per_insert=2.0, error_buffer=100.0)
    stores = [ReplayStore.create(SCHEMA, 4, shard=k, num_shards=3, limit=limit) for k in range(3)]
    for number, store in enumerate(stores):
        store.insert(content(range(1 + number)))
    with ExitStack() as stack:
        shards = [
            stack.enter_context(ReplayShard(store, host_id=host))
            for store, host in zip(stores, ("here", "away", "away"), strict=True)
        ]
        table = stack.enter_context(ReplayShards([shard.address for shard in shards], host_id="here"))
        meter = ReplayMeter(table)
        chosen = select(table, Uniform(), 60, seed=0, draw=0)
        loads = np.bincount(chosen.keys.indices // 4, minlength=3)
        found, parts = table.metrics(), [store.metrics() for store in stores]
        assert found.loads == dict(enumerate(loads.tolist()))
        assert (found.capacity, found.rows, found.inserts, found.samples) == (12, 6, 6, 60)
        for name in ("ages", "staleness", "times_sampled"):
            np.testing.assert_array_equal(
                getattr(found, name).counts, sum(getattr(part, name).counts for part in parts)
            )
        assert found.memory_bytes == sum(part.memory_bytes for part in parts)
        assert (found.limiter.limit, found.limiter.samples) == (parts[0].limiter.limit, 60)
        assert found.limiter.error == sum(part.limiter.error for part in parts)
        values = meter.values()
        assert values.keys() == NAMES
        assert (values["replay_samples"], values["replay_shard_samples"]) == (60, loads.max())
        shards[2].close()  # counters fall, and no interval is negative
        assert min(meter.values().values()) >= -100
        assert meter.values()["replay_samples"] == 0
        assert table.metrics().loads.keys() == {0, 1}
