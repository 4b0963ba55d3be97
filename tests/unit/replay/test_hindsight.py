"""Hindsight: goals and rewards against a model in plain Python, offsets by chi-squared, the same batch for any shards."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from actors.replay import (
    BatchStream,
    Column,
    Hindsight,
    HindsightGatherer,
    Keys,
    ReplayError,
    ReplaySchema,
    ReplayShard,
    ReplayShards,
    ReplayStore,
    Selection,
    Subscription,
    SubSequences,
    TopK,
    WithoutReplacement,
    select,
)

LENGTH = 6
GOALS = ReplaySchema(
    (
        Column(name="achieved_goal", dtype="float32", shape=(2,), extra=1),
        Column(name="desired_goal", dtype="float32", shape=(2,)),
        Column(name="reward", dtype="float32"),
        Column(name="action", dtype="int16"),
    ),
    LENGTH,
)
SELECTORS = (SubSequences(1), SubSequences(3), WithoutReplacement())
TRANSITION = [
    Subscription(column="achieved_goal", offset=1),
    Subscription(column="desired_goal"),
    Subscription(column="reward"),
    Subscription(column="action"),
]
WANTED = (-1000.0, -1000.0)
"""The goal that every trajectory was after, which none achieves."""


def reward(achieved, desired):
    """0 at the goal, else minus the distance in the first coordinate."""
    return -np.abs(achieved[..., 0] - desired[..., 0])


def trajectories(numbers):
    """Trajectory n achieves (100 n + t, n) after t actions; rewards are -1."""
    numbers, steps = np.asarray(numbers), np.arange(LENGTH + 1)
    achieved = np.stack(np.broadcast_arrays(100 * numbers[:, None] + steps, numbers[:, None]), -1)
    n = len(numbers)
    return {
        "achieved_goal": achieved.astype("float32"),
        "desired_goal": np.tile(np.float32(WANTED), (n, LENGTH, 1)),
        "reward": np.full((n, LENGTH), -1, "float32"),
        "action": np.tile(np.arange(LENGTH, dtype="int16"), (n, 1)),
    }


def store_of(lengths, **options):
    store = ReplayStore.create(GOALS, len(lengths), selectors=SELECTORS, **options)
    keys = store.insert(trajectories(np.arange(1, len(lengths) + 1)), lengths)
    return store, keys


def selection_of(keys, steps, lengths):
    n = len(steps)
    return Selection(
        keys, np.asarray(steps), np.ones(n), np.ones(n, np.float32), np.asarray(lengths, np.int64)
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, LENGTH), min_size=1, max_size=6),
    offset=st.integers(-3, 3),
    size=st.one_of(st.none(), st.integers(1, LENGTH + 2)),
    padding=st.sampled_from(["in_place", "head", "tail"]),
    strategy=st.sampled_from(["future", "final", "episode"]),
    k=st.sampled_from([0.0, 1.0, np.inf]),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_goals_and_rewards_are_those_of_the_model(lengths, offset, size, padding, strategy, k, seed, data):
    if padding == "tail" and offset < 0:
        return
    store, keys = store_of(lengths)
    steps = [data.draw(st.integers(0, length - 1)) for length in lengths]
    hindsight = Hindsight(reward=reward, strategy=strategy, k=k)
    selection = selection_of(keys, steps, lengths)
    shape = {"offset": offset, "length": size, "padding": padding}
    names = ("desired_goal", "reward", "action")
    gatherer = HindsightGatherer(
        store, [Subscription(column=name, **shape) for name in names], len(lengths), hindsight
    )
    batch = gatherer(selection, seed=seed, draw=3)
    plan = hindsight.relabel(selection, seed=seed, draw=3)
    assert batch.current.all()
    assert set(batch.values) == set(batch.masks) == set(names)
    assert plan.chosen.all() or k != np.inf
    assert not plan.chosen.any() or k
    for row, (length, t, at) in enumerate(zip(lengths, steps, plan.achieved.tolist(), strict=True)):
        first = {"future": t + 1, "final": length, "episode": 1}[strategy]
        assert first <= at <= length
        goal = (100.0 * (row + 1) + at, row + 1.0) if plan.chosen[row] else WANTED
        window = [t + offset + i for i in range(size or 1)]
        held = [step for step in window if 0 <= step < length]
        goals = [list(goal) for _ in held]
        # After the action of step s, 100 n + s + 1 is achieved.
        rewards = [-abs(100.0 * (row + 1) + s + 1 - goal[0]) if plan.chosen[row] else -1.0 for s in held]
        missing = (size or 1) - len(held)
        before = {"in_place": held[0] - window[0] if held else 0, "head": missing, "tail": 0}[padding]
        after = missing - before
        found = {name: np.reshape(batch.values[name][row], (size or 1, -1)).tolist() for name in names}
        assert found["desired_goal"] == [[0.0, 0.0]] * before + goals + [[0.0, 0.0]] * after
        assert found["reward"] == [[0.0]] * before + [[r] for r in rewards] + [[0.0]] * after
        assert found["action"] == [[0]] * before + [[s] for s in held] + [[0]] * after


@pytest.mark.parametrize("strategy", ["future", "episode"])
def test_offsets_are_uniform_and_goals_are_replaced_with_probability_k_of_k_plus_one(strategy):
    _, keys = store_of([6])
    n, t = 30_000, 2
    repeated = Keys(np.repeat(keys.indices, n), np.repeat(keys.generations, n))
    selection = selection_of(repeated, np.full(n, t), np.full(n, 6))
    plan = Hindsight(reward=reward, strategy=strategy, k=4.0).relabel(selection, seed=1, draw=0)
    first = t + 1 if strategy == "future" else 1
    counts = np.bincount(plan.achieved, minlength=7)
    assert counts[:first].sum() == 0
    assert chisquare(counts[first:]).pvalue > 1e-3
    assert chisquare([plan.chosen.sum(), n - plan.chosen.sum()], [0.8 * n, 0.2 * n]).pvalue > 1e-3
    # Which goal does not depend on whether it is used.
    assert chisquare(np.bincount(plan.achieved[plan.chosen], minlength=7)[first:]).pvalue > 1e-3


def test_goals_follow_the_seed_and_the_draw():
    store, _ = store_of([6] * 4)
    selection = select(store, SubSequences(1), 64, seed=5, draw=9)
    hindsight = Hindsight(reward=reward)

    def goals(**numbers):
        return np.concatenate(hindsight.relabel(selection, **numbers)).tolist()

    assert goals(seed=5, draw=9) == goals(seed=5, draw=9)
    assert goals(seed=5, draw=9) != goals(seed=5, draw=10)
    assert goals(seed=6, draw=9) != goals(seed=5, draw=9)


LENGTHS = [1, 6, 3, 2, 6, 5, 4, 4, 1, 6, 2, 5]


def hindsight_batch(store, selector, draw):
    chosen = select(store, selector, 9, seed=2, draw=draw)
    windows = [Subscription(column=each.column, offset=each.offset, length=3) for each in TRANSITION]
    hindsight = Hindsight(reward=reward, strategy="future")
    return HindsightGatherer(store, windows, 9, hindsight)(chosen, seed=2, draw=draw)


@pytest.mark.parametrize("hosts", [("here", "here"), ("there", "here", "there"), ("there",) * 6], ids=len)
def test_the_batch_is_the_same_for_any_shards(hosts):
    whole, _ = store_of(LENGTHS)
    size = len(LENGTHS) // len(hosts)
    shards = []
    for number, host in enumerate(hosts):
        part = slice(number * size, (number + 1) * size)
        store = ReplayStore.create(GOALS, size, selectors=SELECTORS, shard=number, num_shards=len(hosts))
        store.insert(trajectories(1 + np.arange(len(LENGTHS))[part]), LENGTHS[part])
        shards.append(ReplayShard(store, host_id=host))
    table = ReplayShards([shard.address for shard in shards], host_id="here", timeout_s=20)
    try:
        for draw, selector in enumerate((SubSequences(1), SubSequences(3), WithoutReplacement())):
            one, other = hindsight_batch(whole, selector, draw), hindsight_batch(table, selector, draw)
            for name, values in one.values.items():
                np.testing.assert_array_equal(values, other.values[name])
                np.testing.assert_array_equal(one.masks[name], other.masks[name])
            assert one.current.all()
            assert other.current.all()
            assert (one.values["desired_goal"] != WANTED).any()
    finally:
        table.close()
        for shard in shards:
            shard.close()


def test_overwritten_rows_are_reported_and_tensors_are_filled():
    store, keys = store_of([6, 6, 6])
    out = {"desired_goal": torch.zeros(3, 2), "reward": torch.ones(3)}
    gatherer = HindsightGatherer(
        store, TRANSITION[1:3], 3, Hindsight(reward=reward, k=np.inf, strategy="final"), out=out
    )
    store.insert(trajectories([9]), [1])  # overwrites the first
    batch = gatherer(selection_of(keys, [0, 3, 5], [6, 6, 6]), seed=0, draw=0)
    assert batch.current.tolist() == [False, True, True]
    assert batch.values["reward"] is out["reward"]
    assert out["desired_goal"][1:].tolist() == [[206.0, 2.0], [306.0, 3.0]]
    assert out["reward"][1:].tolist() == [-2.0, 0.0]  # 204 and 306 are achieved


def test_a_stream_relabels_as_by_hand():
    store, _ = store_of(LENGTHS)
    hindsight = Hindsight(reward=reward)
    with BatchStream(store, SubSequences(1), TRANSITION, 8, seed=4, hindsight=hindsight) as stream:
        for draw, (_, batch) in zip(range(5), stream, strict=False):
            chosen = select(store, SubSequences(1), 8, seed=4, draw=draw)
            expected = HindsightGatherer(store, TRANSITION, 8, hindsight)(chosen, seed=4, draw=draw)
            np.testing.assert_array_equal(batch.values["desired_goal"], expected.values["desired_goal"])
            np.testing.assert_array_equal(batch.values["reward"], expected.values["reward"])


def changed(name, **fields):
    columns = [
        Column(**{"name": c.name, "dtype": c.dtype, "shape": c.shape, "extra": c.extra} | fields)
        if c.name == name
        else c
        for c in GOALS.columns
    ]
    return ReplaySchema(tuple(columns), LENGTH)


def gather_with(reward=reward, schema=GOALS, subscriptions=TRANSITION, lengths=(6, 6), **options):
    store = ReplayStore.create(schema, 2, selectors=SELECTORS)
    gatherer = HindsightGatherer(store, subscriptions, 2, Hindsight(reward=reward, k=np.inf, **options))
    keys = store.insert(trajectories([1, 2]))
    known = None if lengths is None else np.array(lengths)
    selection = Selection(keys, np.zeros(2, np.int64), np.ones(2), np.ones(2, np.float32), known)
    return gatherer(selection, seed=0, draw=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "past"}, "strategy 'past' is not known: use future, final, episode"),
        ({"achieved": "goal"}, "this store has no column 'goal'"),
        ({"schema": changed("achieved_goal", extra=0)}, "has no extra step"),
        ({"schema": changed("desired_goal", shape=(3,))}, "differ: goals have one type and shape"),
        ({"schema": changed("desired_goal", dtype="int32")}, "differ"),
        ({"schema": changed("reward", shape=(2,))}, "has more than one number a step"),
        ({"subscriptions": TRANSITION[3:]}, "there is nothing to relabel"),
        (
            {"subscriptions": [Subscription(column="reward", offset=-1, length=2, padding="tail")]},
            "begins before the selected step",
        ),
        ({"lengths": None}, "hindsight needs the lengths of trajectories"),
        ({"reward": lambda a, d: a}, r"returned float32\[2, 2\] where numbers \[2\] are expected"),
        ({"reward": lambda a, d: None}, r"returned object\[\] where numbers"),
        ({"reward": lambda a, d: np.full(len(a), np.nan)}, "is not finite"),
    ],
)
def test_bad_goals_are_explained(options, message):
    with pytest.raises(ReplayError, match=message) as raised:
        gather_with(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("k", [-1.0, np.nan])
def test_k_is_a_number_that_is_at_least_zero(k):
    with pytest.raises(ReplayError, match="use a number that is at least 0"):
        Hindsight(reward=reward, k=k)


def test_every_selector_says_the_lengths():
    store, _ = store_of(LENGTHS)
    for selector in (SubSequences(1), TopK(), WithoutReplacement()):
        chosen = select(store, selector, 5, seed=0, draw=0)
        assert chosen.lengths.tolist() == [LENGTHS[index] for index in chosen.keys.indices]
