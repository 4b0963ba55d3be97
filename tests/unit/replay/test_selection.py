"""Selectors: distributions by chi-squared, the same list for any number of shards, rows that are never selected."""

import pickle
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_tables import SCHEMA, SELECTORS, columns, content, shards_of
from scipy.stats import chisquare

from actors.replay import (
    Fifo,
    Lifo,
    MixturePart,
    Prioritized,
    ReplayError,
    ReplayStore,
    Selection,
    SubSequences,
    TopK,
    Uniform,
    WithoutReplacement,
    select,
    select_centralised,
    select_mixture,
)
from actors.replay import selection as selection_module
from actors.replay.rows import Keys
from actors.replay.selection import mixture_counts
from actors.replay.table import LocalShards

ROWS = 30
RNG = np.random.default_rng(7)
LENGTHS = RNG.integers(1, 9, ROWS)
PRIORITIES = np.where(np.arange(ROWS) % 11 == 3, 0.0, 10 * RNG.random(ROWS) ** 2)
TIMESTAMPS = RNG.integers(0, 20, ROWS)


def table(num_shards, selectors=SELECTORS):
    return shards_of(ROWS, num_shards, selectors, LENGTHS, PRIORITIES, TIMESTAMPS)


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_the_list_does_not_depend_on_the_number_of_shards(selector):
    expected = [select(table(1)[0], selector, 12, seed=3, draw=draw) for draw in range(10)]
    for num_shards, choose in product((1, 2, 3, 5), (select, select_centralised)):
        shards = table(num_shards)
        for draw, whole in enumerate(expected):
            for one, other in zip(
                columns(whole), columns(choose(shards, selector, 12, seed=3, draw=draw)), strict=True
            ):
                np.testing.assert_array_equal(one, other)
    assert any((expected[0].keys.indices != other.keys.indices).any() for other in expected) == (
        selector not in (Fifo(), Lifo(), TopK())
    )


def test_ranks_that_exchange_values_get_the_same_list():
    """Each rank runs with its own shard only; the exchange is played by recording what all ranks told."""
    shards, expected = table(3), select(table(3), Prioritized(0.6, 0.4), 16, seed=1, draw=4)
    told = [[], [], []]
    for _ in range(20):  # each pass gives every rank one more answer

        def exchange(rank):
            position = iter(range(len(told[0])))

            def all_gather(value):
                at = next(position, None)
                if at is None or any(len(values) <= at for values in told):
                    told[rank].append(value)
                    raise StopAsyncIteration
                return [values[at] for values in told]

            return all_gather

        found = []
        for rank in range(3):
            try:
                found.append(
                    select(shards[rank], Prioritized(0.6, 0.4), 16, seed=1, draw=4, exchange=exchange(rank))
                )
            except StopAsyncIteration:
                continue
        if len(found) == 3:
            break
    for selection in found:
        np.testing.assert_array_equal(selection.keys.indices, expected.keys.indices)
        np.testing.assert_array_equal(selection.probabilities, expected.probabilities)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_uniform_draws_are_the_rows_that_are_present_by_their_number(num_shards):
    """Draw i is row number floor(u_i * count), of more rows than a node of the tree of bits has; u is NumPy's Philox."""
    size, gone = 1500, np.r_[0:3, 64:128, 500:1030, 1499]
    shards = shards_of(size, num_shards, (Uniform(),))
    present = np.setdiff1d(np.arange(size), gone)
    for store in shards:
        here = gone[store.owner(gone) == store.base // store.capacity]
        assert store.delete(Keys(here, np.ones(len(here), np.uint64))) == len(here)
    for choose, draw in ((select, 0), (select_centralised, 7)):
        numbers = np.random.Philox(key=[5, 0], counter=np.array([0, 0, 0, draw], np.uint64))
        expected = present[(np.random.Generator(numbers).random(300) * len(present)).astype(int)]
        chosen = choose(shards, Uniform(), 300, seed=5, draw=draw)
        assert chosen.keys.indices.tolist() == expected.tolist()
        assert (chosen.probabilities == 1 / len(present)).all()


def expected_shares(selector):
    """Probability of each (row, start), from the definition."""
    if isinstance(selector, Uniform):
        return {(row, 0): 1 / ROWS for row in range(ROWS)}
    if isinstance(selector, SubSequences):
        windows = {
            (row, start): 1.0
            for row in range(ROWS)
            for start in range(0, LENGTHS[row] - selector.length + 1, selector.stride)
        }
        return {key: 1 / len(windows) for key in windows}
    weights = np.where((selector.length <= LENGTHS) & (PRIORITIES > 0), PRIORITIES**selector.exponent, 0)
    shares = {}
    for row in np.flatnonzero(weights):
        starts = range(0, LENGTHS[row] - selector.length + 1, selector.stride)
        shares |= {(int(row), start): weights[row] / weights.sum() / len(starts) for start in starts}
    return shares


@pytest.mark.parametrize(
    "selector",
    [
        Uniform(),
        SubSequences(1),
        SubSequences(3, 2),
        Prioritized(0.6, 0.4),
        Prioritized(1.0, length=2),
        Prioritized(0.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_draws_have_the_defined_distribution(selector, num_shards):
    shares, draws = expected_shares(selector), 40_000
    found = select(table(num_shards, (selector,)), selector, draws, seed=11, draw=0)
    pairs = list(zip(found.keys.indices.tolist(), found.steps.tolist(), strict=True))
    assert set(pairs) <= set(shares)
    counts = [pairs.count(key) for key in shares]
    assert chisquare(counts, np.array(list(shares.values())) * draws).pvalue > 1e-3
    for (row, _), probability in zip(pairs[:100], found.probabilities, strict=False):
        per_row = sum(share for key, share in shares.items() if key[0] == row)
        exact = next(iter(shares.values())) if isinstance(selector, SubSequences) else per_row
        assert probability == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("exponent", [0.0, 0.7])
def test_draws_without_replacement_are_successive_draws(exponent):
    """P(first i, then j) = w_i / W * w_j / (W - w_i)."""
    priorities = np.array([1.0, 2.0, 4.0, 0.0, 3.0])
    store = ReplayStore.create(SCHEMA, 5, selectors=(WithoutReplacement(exponent),))
    store.insert(content(range(5)), priorities=priorities)
    w = np.where(priorities > 0, priorities, 0.0) ** exponent * (priorities > 0)
    draws, counts = 6_000, np.zeros((5, 5))
    for draw in range(draws):
        first, second = select(store, WithoutReplacement(exponent), 2, seed=5, draw=draw).keys.indices
        counts[first, second] += 1
    pairs = [(i, j) for i in range(5) for j in range(5) if i != j and w[i] and w[j]]
    expected = [draws * w[i] / w.sum() * w[j] / (w.sum() - w[i]) for i, j in pairs]
    assert chisquare([counts[pair] for pair in pairs], expected).pvalue > 1e-3


def test_ordered_selectors_follow_their_order():
    store = table(1)[0]
    order = np.lexsort((np.arange(ROWS), TIMESTAMPS))
    np.testing.assert_array_equal(select(store, Fifo(), 9, seed=0, draw=0).keys.indices, order[:9])
    order = np.lexsort((np.arange(ROWS), -TIMESTAMPS))
    np.testing.assert_array_equal(select(store, Lifo(), 9, seed=0, draw=0).keys.indices, order[:9])
    order = np.lexsort((np.arange(ROWS), -PRIORITIES))
    np.testing.assert_array_equal(select(store, TopK(), 9, seed=0, draw=0).keys.indices, order[:9])


def test_importance_weights_are_the_papers():
    found = select(table(1)[0], Prioritized(0.6, 0.4), 32, seed=2, draw=0)
    w = PRIORITIES**0.6
    raw = (ROWS * w[found.keys.indices] / w.sum()) ** -0.4
    np.testing.assert_allclose(found.weights, raw / raw.max(), rtol=1e-6)


def test_updated_priorities_change_the_draws_and_stale_ones_do_not():
    store = ReplayStore.create(SCHEMA, 4, selectors=(Prioritized(),))
    keys = store.insert(content(range(4)))
    assert store.update_priorities(keys, [0.0, 0.0, 5.0, 0.0]) == 4
    found = select(store, Prioritized(), 50, seed=0, draw=0)
    assert set(found.keys.indices) == {2}
    assert (found.probabilities == 1).all()
    store.insert(content([4]))  # overwrites index 0
    assert store.update_priorities(keys, 9.0) == 3
    assert store.status()["priority"].tolist() == [1.0, 9.0, 9.0, 9.0]


def test_rows_that_are_written_or_deleted_are_never_selected():
    store = ReplayStore.create(SCHEMA, 6, selectors=SELECTORS)
    keys = store.insert(content(range(5)))
    store.delete(type(keys)(keys.indices[:2], keys.generations[:2]))
    with store.allocate():
        for selector in SELECTORS:
            count = 3 if selector.spec is None or isinstance(selector, WithoutReplacement) else 200
            assert set(select(store, selector, count, seed=0, draw=0).keys.indices) == {2, 3, 4}


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("selector", [Uniform(), Prioritized(0.6), WithoutReplacement(), Fifo()], ids=str)
def test_a_row_is_selected_at_most_as_often_as_allowed(selector, num_shards):
    shards = [
        ReplayStore.create(
            SCHEMA,
            6 // num_shards,
            selectors=(selector,),
            max_times_sampled=2,
            shard=k,
            num_shards=num_shards,
        )
        for k in range(num_shards)
    ]
    for store in shards:
        store.insert(content(range(6 // num_shards)))
    sizes = [6, 6] if selector.spec is None else [4, 5, 3]
    chosen = [select(shards, selector, k, seed=1, draw=draw).keys.indices for draw, k in enumerate(sizes)]
    counts = np.bincount(np.concatenate(chosen), minlength=6)
    assert counts.tolist() == [2] * 6
    assert sum(map(len, shards)) == 0
    with pytest.raises(ReplayError, match=r"nothing can be selected|where 0 can be"):
        select(shards, selector, 1, seed=1, draw=9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_draws_that_are_left_are_those_of_the_rows_with_weight(data):
    """Whatever groups of the tree are empty, and wherever a shard's indices begin."""
    capacity = data.draw(st.integers(1, 700))
    alive = sorted(data.draw(st.sets(st.integers(0, capacity - 1), max_size=12)))
    rules = {"shard": data.draw(st.integers(0, 2)), "num_shards": 3, "max_times_sampled": 3}
    with ReplayStore.create(SCHEMA, capacity, selectors=(Prioritized(1.0),), **rules) as store:
        weights = np.zeros(capacity)
        weights[alive] = 1e-40
        store.insert(content(range(capacity)), priorities=weights)
        most = data.draw(st.integers(1, 50))
        tree = store.tree(Prioritized(1.0).spec)
        assert store.draws_left(tree, most) == min(most, 3 * len(alive))


@pytest.mark.parametrize("choose", [select, select_centralised])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_selection_that_is_too_large_uses_no_row_up(num_shards, choose):
    """Rows would be deleted without being in anybody's batch."""
    selector = Prioritized(1.0)
    shards = []
    for shard in range(num_shards):
        rules = {"shard": shard, "num_shards": num_shards, "max_times_sampled": 2}
        store = ReplayStore.create(SCHEMA, 8 // num_shards, selectors=(selector,), **rules)
        store.insert(content(range(8 // num_shards)), priorities=np.arange(8 // num_shards) > 1)
        shards.append(store)
    count = 8 - 2 * num_shards  # rows of weight 0 cannot be selected
    chosen = [choose(shards, selector, 3, seed=0, draw=0)]
    with pytest.raises(ReplayError, match=rf"can be selected {2 * count - 3} times"):
        choose(shards, selector, 2 * count - 2, seed=0, draw=1)
    chosen.append(choose(shards, selector, 2 * count - 3, seed=0, draw=2))
    drawn = np.concatenate([each.keys.indices for each in chosen])
    assert np.unique(drawn, return_counts=True)[1].tolist() == [2] * count
    with pytest.raises(ReplayError, match="nothing can be selected"):
        choose(shards, selector, 1, seed=0, draw=3)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("choose", [select, select_centralised])
def test_a_row_of_weight_0_is_not_selected_beside_the_smallest_weight(num_shards, choose):
    """u * 5e-324 is 0 or, rounded up, the whole sum, which lies in no row."""
    priorities = np.zeros(8)
    priorities[2] = 5e-324
    selector = Prioritized(1.0)
    shards = shards_of(8, num_shards, (selector,), priorities=priorities)
    assert choose(shards, selector, 64, seed=0, draw=0).keys.indices.tolist() == 64 * [2]


def assert_shares(counts, expected):
    """Draws with these probabilities: within five standard deviations of their means."""
    total = counts.sum()
    assert (np.abs(counts - total * expected) <= 5 * np.sqrt(total * expected * (1 - expected))).all()


@pytest.mark.parametrize("unit", [5e-324, 1e-310, 1e-308, 1.0])
@pytest.mark.parametrize("choose", [select, select_centralised])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_least_weights_are_drawn_in_their_shares(num_shards, choose, unit):
    """Products with a subnormal sum would be rounded to whole numbers of 5e-324; keys -log(u) / w would be infinite."""
    priorities = np.array([1, 2, 3, 0, 4, 0]) * unit
    shares = np.array([1, 2, 3, 0, 4, 0]) / 10
    prioritized, without = Prioritized(1.0), WithoutReplacement(1.0)
    shards = shards_of(6, num_shards, (prioritized, without), priorities=priorities)
    chosen = choose(shards, prioritized, 4000, seed=0, draw=0)
    assert_shares(np.bincount(chosen.keys.indices, minlength=6), shares)
    pairs = np.zeros((6, 6))
    for draw in range(1000):
        pairs[tuple(choose(shards, without, 2, seed=0, draw=draw).keys.indices)] += 1
    # P(i, j) = w_i w_j / (1 - w_i) of shares w.
    expected = shares[:, None] * shares / (1 - shares[:, None])
    np.fill_diagonal(expected, 0)
    assert_shares(pairs, expected)


def test_the_parts_of_a_mixture_are_independent():
    """Two parts of one table: with the same random numbers they would be the same rows."""
    equal = draws = 0
    for draw in range(50):
        parts = [MixturePart(table(1)[0], Uniform(), 0.5)] * 2
        first, second = select_mixture(parts, 64, seed=7, draw=draw)
        equal += int((first.keys.indices == second.keys.indices).sum())
        draws += len(first)
        sharded = [MixturePart(table(3), Uniform(), 0.5)] * 2
        for own, other in zip((first, second), select_mixture(sharded, 64, seed=7, draw=draw), strict=True):
            assert own.keys.indices.tolist() == other.keys.indices.tolist()
    # Binomial(draws, 1 / ROWS): within four standard deviations of its mean.
    mean = draws / ROWS
    assert abs(equal - mean) < 4 * np.sqrt(mean)


def test_the_rest_of_a_mixture_is_shared_at_any_draw():
    """2^60 + i is no double for odd i."""
    counts = np.array([mixture_counts([1, 2], 1, 2**60 + draw) for draw in range(300)])
    np.testing.assert_allclose(counts.mean(0), [1 / 3, 2 / 3], atol=0.01)


def test_mixtures_keep_their_shares():
    assert mixture_counts([0.5, 0.5], 256, 3) == [128, 128]
    for shares in ([0.03, 0.97], [1, 1, 1], [0.2, 0.5, 0.0, 0.3]):
        counts = np.array([mixture_counts(shares, 16, draw) for draw in range(400)])
        assert (counts.sum(1) == 16).all()
        np.testing.assert_allclose(counts.sum(0) / counts.sum(), np.array(shares) / sum(shares), atol=1e-3)
    online, offline = table(1)[0], table(2)
    first, second = select_mixture(
        [MixturePart(online, Uniform(), 0.25), MixturePart(offline, TopK(), 0.75)], 8, seed=0, draw=0
    )
    assert isinstance(first, Selection)
    assert (len(first), len(second)) == (2, 6)
    assert second.keys.indices.tolist() == np.lexsort((np.arange(ROWS), -PRIORITIES))[:6].tolist()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda s: select(s, Prioritized(0.9), 4, seed=0, draw=0), "name the selector in selectors="),
        (lambda s: select(s, Uniform(), 0, seed=0, draw=0), "0 rows were requested"),
        (
            lambda s: select(s, TopK(), 31, seed=0, draw=0),
            "31 different rows requested where 30 can be selected",
        ),
        (lambda s: Prioritized(-1), "exponent -1"),
        (lambda s: SubSequences(0), "length 0 and stride 1"),
        (lambda s: mixture_counts([0.0, 0.0], 4, 0), "one of them positive"),
        (lambda s: mixture_counts([1.0, -1.0], 4, 0), "at least 0"),
        (lambda s: select(table(3)[:2], Uniform(), 1, seed=0, draw=0), "got 2 shards of 3"),
    ],
)
def test_bad_requests_are_explained(request_, message):
    with pytest.raises(ReplayError, match=message):
        request_(table(1)[0])


def test_nothing_can_be_selected_from_an_empty_store_or_from_zero_weights():
    store = ReplayStore.create(SCHEMA, 4, selectors=SELECTORS)
    for selector in (Uniform(), SubSequences(1), Prioritized(0.6, 0.4)):
        with pytest.raises(ReplayError, match="the store is empty, all weights are zero"):
            select(store, selector, 1, seed=0, draw=0)
    store.insert(content(range(4)), priorities=0.0)
    with pytest.raises(ReplayError, match="all weights are zero"):
        select(store, Prioritized(0.6, 0.4), 1, seed=0, draw=0)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize(("priority", "exponent"), [(1e308, 1.0), (1e200, 2.0)])
def test_finite_priorities_whose_sum_is_not_are_refused(num_shards, priority, exponent):
    """4 * 1e308, and 1e200**2, exceed the largest float64: no row would have a probability above 0."""
    selector = Prioritized(exponent, 0.4)
    shards = shards_of(4, num_shards, (selector,), priorities=[priority] * 4)
    with pytest.raises(ReplayError, match="their sum is not finite"):
        select(shards, selector, 2, seed=0, draw=0)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_draws_without_replacement_know_powers_that_are_zero_or_infinite(num_shards):
    """1e30**20 exceeds the largest float64; 1e-40**10 is below the least, and 2**10 is not."""
    selectors = (WithoutReplacement(20.0), WithoutReplacement(10.0))
    large = shards_of(4, num_shards, selectors, priorities=[1e30, 1.0, 1e30, 2.0])
    for choose in (select, select_centralised):
        with pytest.raises(ReplayError, match="their sum is not finite"):
            choose(large, selectors[0], 2, seed=0, draw=0)
    small = shards_of(4, num_shards, selectors, priorities=[1e-40] * 4)
    with pytest.raises(ReplayError, match="all weights are zero"):
        select(small, selectors[1], 2, seed=0, draw=0)
    mixed = shards_of(4, num_shards, selectors, priorities=[1e-40, 2.0, 1e-40, 1.0])
    chosen = select(mixed, selectors[1], 2, seed=0, draw=0)
    assert sorted(chosen.keys.indices.tolist()) == [1, 3]
    assert sorted(chosen.probabilities.tolist()) == [1 / 1025, 1024 / 1025]
    with pytest.raises(ReplayError, match="3 different rows requested where 2 can be selected"):
        select(mixed, selectors[1], 3, seed=0, draw=0)


def test_a_selection_is_copied_with_changes_and_through_pickle():
    store = ReplayStore.create(SCHEMA, 4)
    store.insert(content(range(4)))
    chosen = select(store, Uniform(), 7, seed=0, draw=0)
    assert len(chosen) == 7
    moved = replace(chosen, steps=chosen.steps + 1)
    assert (len(moved), moved.steps.tolist(), moved.keys) == (7, [1] * 7, chosen.keys)
    for one, other in zip(columns(pickle.loads(pickle.dumps(chosen))), columns(chosen), strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_that_lose_their_priority_between_two_questions_are_not_counted_as_sampled():
    """A row that may be sampled once is deleted when it is counted: it must have been in somebody's selection."""
    stores = []
    for shard in range(2):
        store = ReplayStore.create(
            SCHEMA, 8, selectors=(Prioritized(1.0),), shard=shard, num_shards=2, max_times_sampled=1
        )
        keys = store.insert(content(range(8 * shard, 8 * shard + 8)), priorities=np.ones(8))
        stores.append((store, keys))

    class Losing(LocalShards):
        asked = False

        def ask(self, call, arguments):
            if call == "descend" and not self.asked:
                self.asked = True
                stores[0][0].update_priorities(stores[0][1], np.zeros(8))
            return super().ask(call, arguments)

    found = select(Losing([store for store, _ in stores]), Prioritized(1.0), 4, seed=0, draw=0)
    assert (found.keys.indices >= 8).all()
    assert [len(store) for store, _ in stores] == [8, 4]  # as many were deleted as were selected


def test_importance_weights_are_finite_while_another_writer_takes_all_rows(monkeypatch):
    store = ReplayStore.create(SCHEMA, 2, selectors=(Prioritized(1.0, 0.5),))
    store.insert(content(range(2)), priorities=np.array([1.0, 4.0]))
    real, taken = selection_module._finish, []

    def finish(*arguments):
        taken.extend([store.allocate(), store.allocate()])  # between the draw and what is computed from it
        return real(*arguments)

    monkeypatch.setattr(selection_module, "_finish", finish)
    found = select(store, Prioritized(1.0, 0.5), 16, seed=0, draw=0)
    assert len(taken) == 2
    assert set(found.weights.tolist()) == {1.0, 0.5}  # (P(i) / least P)**-0.5: 1 and 4**-0.5
