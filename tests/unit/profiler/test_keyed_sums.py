"""Sums by key: exact, and as many arrays in memory as there are keys."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayagi.profiler import keyed_sums
from rayagi.profiler.keyed_sums import NOTHING, Accumulator, add_up, merged

LARGE = 2**60
"""Float64 has not all whole numbers there."""
tables = st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, LARGE)), max_size=7), max_size=7)


def table_of(pairs):
    return add_up(*np.array(pairs, np.int64).reshape(-1, 2).T)


def as_dict(table):
    assert (table.keys[1:] > table.keys[:-1]).all()
    return dict(zip(table.keys.tolist(), table.sums.tolist(), strict=True))


def exact(several):
    sums = Counter()
    for pairs in several:
        for key, value in pairs:
            sums[key] += value
    return dict(sums)


@given(tables.map(lambda several: [[(key, value // 64) for key, value in pairs] for pairs in several]))
def test_sums_are_exact(several):
    assert as_dict(merged([table_of(pairs) for pairs in several])) == exact(several)


def test_an_accumulator_adds_up_before_its_tables_fill_memory(monkeypatch):
    monkeypatch.setattr(keyed_sums, "_FEWEST", 4)
    accumulator = Accumulator()
    for turn in range(100):
        accumulator.add(table_of([(1, 1), (turn, 2)]))
        assert accumulator.held <= 2 * (turn + 2) + 4
    assert as_dict(accumulator.result()) == exact([[(1, 1), (turn, 2)] for turn in range(100)])


def test_nothing_has_no_sums():
    assert as_dict(Accumulator().result()) == as_dict(merged([NOTHING, NOTHING])) == {}
