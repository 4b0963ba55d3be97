"""Tables for the tests of replay: small, with blocks whose content tells which trajectory they are."""

import re

import numpy as np
import pytest

from actors.replay import (
    Column,
    Fifo,
    Lifo,
    Prioritized,
    ReplayError,
    ReplaySchema,
    ReplayStore,
    Selection,
    SubSequences,
    TopK,
    Uniform,
    WithoutReplacement,
)

SELECTORS = (
    Uniform(),
    SubSequences(3, 2),
    SubSequences(1),
    Prioritized(0.6, 0.4),
    Prioritized(1.0, length=2),
    Fifo(),
    Lifo(),
    TopK(),
    WithoutReplacement(),
    WithoutReplacement(0.7),
)
LENGTH = 8
SCHEMA = ReplaySchema(
    (
        Column(name="obs", dtype="float32", shape=(3,), extra=1),
        Column(name="action", dtype="int16"),
        Column(name="done", dtype="bool"),
    ),
    LENGTH,
)


def content(numbers):
    """Trajectories that hold their number: obs is 100 * number + step, action the step, done whether it is the last."""
    numbers = np.asarray(numbers)
    obs = 100 * numbers[:, None, None] + np.arange(LENGTH + 1)[None, :, None] + np.zeros(3)
    steps = np.broadcast_to(np.arange(LENGTH), (len(numbers), LENGTH))
    return {"obs": obs.astype("float32"), "action": steps.astype("int16"), "done": steps == LENGTH - 1}


def shards_of(rows, num_shards, selectors=SELECTORS, lengths=None, priorities=None, timestamps=None):
    """A full table of ``rows`` trajectories with their index as their number, in this many shards."""
    capacity = rows // num_shards
    shards = []
    for shard in range(num_shards):
        store = ReplayStore.create(SCHEMA, capacity, selectors=selectors, shard=shard, num_shards=num_shards)
        part = np.arange(shard * capacity, (shard + 1) * capacity)
        given = [
            None if values is None else np.asarray(values)[part]
            for values in (lengths, priorities, timestamps)
        ]
        store.insert(content(part), *given)
        shards.append(store)
    return shards


def spilling(folder, capacity, slots, selectors=SELECTORS, **rules):
    """A store of which only so many rows are in memory."""
    with pytest.raises(ReplayError) as raised:
        ReplayStore.create(SCHEMA, capacity, selectors=selectors, memory_bytes=1, folder=folder, **rules)
    least = int(re.search(r"needs ([\d,]+)", str(raised.value))[1].replace(",", ""))
    budget = least + (slots - 1) * SCHEMA.row_bytes
    store = ReplayStore.create(
        SCHEMA, capacity, selectors=selectors, memory_bytes=budget, folder=folder, **rules
    )
    assert store.slots == slots
    return store


def columns(selection):
    """All that a selection holds."""
    chosen = (selection.steps, selection.probabilities, selection.weights, selection.lengths)
    return (*selection.keys, *chosen)


def selection_of(keys, steps):
    """These timesteps, of the same weight."""
    steps, ones = np.asarray(steps, np.int64), np.ones(len(steps))
    return Selection(keys, steps, ones, ones.astype(np.float32))
