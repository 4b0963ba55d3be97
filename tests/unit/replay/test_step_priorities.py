"""Priorities of timesteps: their distribution, a model in plain Python, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from actors.replay import (
    Column,
    Prioritized,
    ReplayError,
    ReplaySchema,
    ReplayStore,
    Selection,
    StepPriorities,
    SubSequences,
    select,
)
from actors.replay.rows import Keys
from actors.replay.selection import PrioritizedSteps

STEPS = 4
SCHEMA = ReplaySchema((Column(name="x", dtype=np.int64),), STEPS)


def priorities_of(capacity, exponent=1.0):
    store = ReplayStore.create(SCHEMA, capacity, selectors=(Prioritized(), SubSequences(1)))
    return store, StepPriorities(store, exponent)


def insert(made, lengths, priority=1.0):
    return made.insert({"x": np.zeros((len(lengths), STEPS), np.int64)}, lengths, priority)


def chosen(store, rows, steps):
    generations = store.status()["generation"][rows]
    ones = np.ones(len(rows))
    return Selection(Keys(np.array(rows), generations), np.array(steps), ones, ones.astype(np.float32))


def test_steps_are_selected_in_proportion_to_their_weights():
    store, made = priorities_of(3, exponent=0.5)
    insert(made, [4, 1, 2])
    steps = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (2, 1)]
    values = [0.0, 1.0, 4.0, 9.0, 16.0, 1e-40, 4.0]
    made.update(chosen(store, *map(list, zip(*steps, strict=True))), values)
    found = select(store, made.selector(0.5), 20_000, seed=5, draw=0)
    # Roots 0, 1, 2, 3, 4, 1e-20, 2, which add up to 12.
    shares = dict(zip(steps, np.array([0, 1, 2, 3, 4, 1e-20, 2]) / 12, strict=True))
    pairs = list(zip(found.keys.indices.tolist(), found.steps.tolist(), strict=True))
    assert found.probabilities.tolist() == pytest.approx([shares[pair] for pair in pairs])
    likely = [pair for pair in steps if shares[pair] > 1e-9]
    assert set(pairs) == set(likely)
    expected = [20_000 * shares[pair] for pair in likely]
    assert chisquare([pairs.count(pair) for pair in likely], expected).pvalue > 1e-3
    # (P / least P)**-0.5
    assert found.weights.tolist() == pytest.approx([(12 * shares[pair]) ** -0.5 for pair in pairs])


def test_a_target_at_the_end_of_a_row_selects_its_last_step_that_has_a_weight():
    weights = np.array([[0.1, 0.2, 0.0, 0.0], [0.0, 0.5, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0]])
    rest = np.array([0.1 + 0.2, 0.5, 0.0])
    drawn = SimpleNamespace(
        indices=np.arange(3), generations=np.ones(3, np.uint64), lengths=np.array([2, 4, 3]), rest=rest,
        weights=weights.sum(1), total=np.array([2.0]), accepted=None,
    )  # fmt: skip
    table = SimpleNamespace(tree=lambda spec: 0, max_times_sampled=0, draw=lambda *numbers: drawn)
    found = PrioritizedSteps(weights).choose(table, SimpleNamespace(k=3, numbers=(0, 0, 0)))
    assert found.steps.tolist() == [1, 2, 2]
    assert found.probabilities.tolist() == pytest.approx([0.1, 0.125, 0.5])


@given(
    actions=st.lists(
        st.one_of(
            st.lists(st.integers(1, STEPS), min_size=1, max_size=3),
            st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.floats(0, 1e30)), min_size=1, max_size=6),
        ),
        max_size=12,
    ),
    exponent=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_weights_are_those_of_a_model(actions, exponent):
    capacity, held = 5, {}  # (row, step): priority
    store, made = priorities_of(capacity, exponent)
    former = None
    for action in actions:
        if isinstance(action[0], int):
            rows = insert(made, action, 3.0).indices.tolist()
            for row, length in zip(rows, action, strict=True):
                held = {pair: value for pair, value in held.items() if pair[0] != row}
                held |= {(row, step): 3.0 for step in range(length)}
        elif named := [(row, step, value) for row, step, value in action if (row, step) in held]:
            rows, steps, values = map(list, zip(*named, strict=True))
            former = chosen(store, rows, steps)
            made.update(former, values)
            held |= {(row, step): value for row, step, value in named}
    expected = np.zeros((capacity, STEPS))
    for pair, value in held.items():
        expected[pair] = value**exponent if value else 0.0
    np.testing.assert_allclose(made.weights, expected, rtol=1e-12)
    np.testing.assert_allclose(store.status()["priority"], expected.sum(1), rtol=1e-12)
    if former is not None:  # after all rows were overwritten, their selection changes nothing
        insert(made, [STEPS] * capacity, 1.0)
        made.update(former, np.full(len(former), 7.0))
        assert (made.weights == 1.0).all()
        assert (store.status()["priority"] == STEPS).all()
    store.close()


def test_saved_weights_return_and_without_them_steps_have_their_rows_priority():
    store, made = priorities_of(3)
    insert(made, [4, 2])
    made.update(chosen(store, [0, 1], [3, 0]), [5.0, 3.0])
    saved, again = made.weights.copy(), StepPriorities(store, 1.0)
    again.load(saved[:2])  # of a store with fewer rows
    assert again.weights.tolist() == saved.tolist() == [[1, 1, 1, 5], [3, 1, 0, 0], [0] * 4]
    for wrong in (np.zeros((4, 4)), np.zeros((2, 3)), np.zeros(4)):
        with pytest.raises(ReplayError, match="use up to 3 rows of 4"):
            again.load(wrong)
    former = ReplayStore.create(SCHEMA, 3, selectors=(Prioritized(),))
    former.insert({"x": np.zeros((2, STEPS), np.int64)}, [4, 2], [9.0, 4.0])
    again = StepPriorities(former, 0.5)
    again.load(None)
    assert again.weights.tolist() == [[3] * 4, [2, 2, 0, 0], [0] * 4]
    assert former.status()["priority"].tolist() == [12, 4, 0]


def test_what_is_no_priority_is_refused_and_changes_nothing():
    store, made = priorities_of(2, exponent=2.0)
    insert(made, [4, 3])
    first = chosen(store, [0], [0])
    for value, reason in ((-1.0, "at least 0"), (np.nan, "finite"), (np.inf, "finite"), (1e160, "too large")):
        with pytest.raises(ReplayError, match=reason):
            made.update(first, [value])
        with pytest.raises(ReplayError, match="use finite ones, at least 0"):
            insert(made, [1], value)
    for wrong in (made.weights[:1], made.weights.astype(np.float32), np.zeros((4, 2)).T):
        with pytest.raises(ReplayError, match=r"use contiguous float64\[2, 4\]"):
            store.update_steps(first.keys, first.steps, [1.0], 1.0, wrong)
        with pytest.raises(ReplayError, match=r"of another store|contiguous array of float64"):
            select(store, PrioritizedSteps(wrong), 64, seed=0, draw=0)
    for step in (-1, STEPS, 3):
        with pytest.raises(ReplayError, match="a timestep is none of its row"):
            made.update(chosen(store, [0, 1], [0, step]), [5.0, 5.0])
    with pytest.raises(ReplayError, match="not of this shard"):
        made.update(replace(first, keys=Keys(np.array([9]), first.keys.generations)), [5.0])
    with pytest.raises(ReplayError, match=r"steps \[2\] for 1 row"):
        made.update(replace(first, steps=np.zeros(2, np.int64)), [5.0])
    assert made.weights.tolist() == [[1.0] * 4, [1.0] * 3 + [0.0]]
    assert store.counters()["inserted"] == 2
    even = StepPriorities(store, 1.0)
    with pytest.raises(ReplayError, match="too large"):  # finite, but a row of such steps has an infinite sum
        even.update(first, [1e308])
    for exponent in (-1.0, np.inf, np.nan):
        with pytest.raises(ReplayError, match="exponent"):
            StepPriorities(store, exponent)
    with pytest.raises(ReplayError, match="one shard"):
        StepPriorities(ReplayStore.create(SCHEMA, 2, num_shards=2), 1.0)
