"""Shards, writers and readers are killed at random moments: a short run of experiments/replay/kills.py."""

from experiments.replay.kills import run


def test_kills_of_shards_writers_and_readers_tear_and_lose_nothing(tmp_path):
    outcome = run(kills=10, seed=5, folder=tmp_path)
    assert set(outcome.kills) == {"shard 0", "shard 1", "writer", "reader"}
    assert (outcome.torn, outcome.missing, outcome.left) == (0, 0, [])
    assert outcome.checked > 100
    assert outcome.copied > 100
