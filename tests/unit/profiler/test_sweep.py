"""The sweep in C against the one in NumPy."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.compiler import CompilerError
from rayagi.profiler import sweep
from rayagi.profiler.intervals import MASK_BITS, Part, overlap_by_process, overlap_times

SHIFTS = (0, 2**60)
"""Of times, also where float64 has no whole numbers."""


def as_dicts(times):
    """(cell, mask) -> ns; mask -> ns. Keys ascend."""
    for table in times:
        assert (table.keys[1:] > table.keys[:-1]).all()
    by_cell, total = (dict(zip(each.keys.tolist(), each.sums.tolist(), strict=True)) for each in times)
    return {divmod(key, 1 << MASK_BITS): ns for key, ns in by_cell.items()}, total


def swept(processes):
    return [as_dicts(each) for each in sweep.sweep()(processes)]


def reference(processes):
    return [as_dicts(each) for each in overlap_by_process(processes)]


@st.composite
def parts(draw):
    """Intervals that are disjoint within a cell, in any order."""
    rows = []
    for cell in draw(st.lists(st.integers(0, 5), unique=True, max_size=3)):
        at = 0
        for gap, length, bit in draw(
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 14)), max_size=6)
        ):
            rows.append((bit, cell * 10**6, at + gap, at + gap + length))
            at += gap + length
    ordered = draw(st.permutations(rows)) if draw(st.booleans()) else sorted(rows, key=lambda row: row[2])
    return np.array(ordered, np.int64).reshape(-1, 4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(parts(), max_size=3), max_size=3), st.sampled_from(SHIFTS))
def test_times_are_those_of_the_reference(processes, shift):
    given_parts = [
        [Part(rows[:, 0], rows[:, 1], rows[:, 2] + shift, rows[:, 3] + shift) for rows in several]
        for several in processes
    ]
    assert swept(given_parts) == reference(given_parts)


def test_two_lanes_by_hand():
    #  time    0  1  2  3  4  5  6
    #  lane 1  a  a  a  b  b  .  .    of cell 7
    #  lane 2  .  a  a  a  c  c  .    of cell 7 until 4, then of cell 9
    first = Part(*np.array([[0, 7, 0, 3], [1, 7, 3, 5]]).T)
    second = Part(*np.array([[0, 7, 1, 4], [2, 9, 4, 6]]).T)
    expected = (
        {(7, 0b001): 3, (7, 0b011): 1, (7, 0b010): 1, (9, 0b100): 2},
        {0b001: 3, 0b011: 1, 0b110: 1, 0b100: 1},
    )
    assert swept([[first, second]]) == [expected, expected]
    assert as_dicts(overlap_times([first, second])) == expected


def test_two_processes_by_hand():
    #  time       0  1  2  3  4
    #  process 0  a  a  .  b  .    cell 7
    #  process 1  .  a  a  .  .    cell 7; then a  at 3, cell 9
    first = Part(*np.array([[0, 7, 0, 2], [1, 7, 3, 4]]).T)
    second = Part(*np.array([[0, 7, 1, 3], [0, 9, 3, 4]]).T)
    expected = [
        ({(7, 0b01): 2, (7, 0b10): 1}, {0b01: 2, 0b10: 1}),
        ({(7, 0b01): 2, (9, 0b01): 1}, {0b01: 3}),
        ({(7, 0b01): 3, (7, 0b10): 1, (9, 0b01): 1}, {0b01: 3, 0b11: 1}),
    ]
    assert swept([[first], [second]]) == expected == reference([[first], [second]])


def test_more_sums_than_the_table_has_at_first(monkeypatch):
    monkeypatch.setattr(sweep, "_TABLE_SIZE", 4)
    cells = np.arange(100)
    part = Part(cells % 15, cells, 10 * cells, 10 * cells + cells + 1)
    found, every = swept([[part]])
    assert found[0] == {(cell, 1 << cell % 15): cell + 1 for cell in range(100)}
    assert found == every == as_dicts(overlap_times([part]))


def test_nothing_has_no_time():
    empty = Part(*np.empty((4, 0), np.int64))
    nothing: tuple = ({}, {})
    assert swept([[empty], [empty, empty]]) == [nothing] * 3 == reference([[], []])
    assert swept([]) == [nothing] == reference([])


def test_without_a_compiler_the_reference_is_used(monkeypatch):
    def fail(*_args, **_kwargs):
        raise CompilerError("no C compiler was found")

    monkeypatch.setattr("collectives.kernels.load", fail)
    assert sweep.sweep.__wrapped__() is overlap_by_process
