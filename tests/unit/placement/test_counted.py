"""Counts in messages agree with their nouns."""

import pytest

from collectives import errors as of_collectives
from placement import errors as of_placement


@pytest.mark.parametrize("counted", [of_placement.counted, of_collectives.counted])
def test_one_is_singular_and_several_are_not(counted):
    assert [counted(number, "row") for number in (1, 2, 3000)] == ["1 row", "2 rows", "3,000 rows"]
    assert [counted(number, "batch", "batches") for number in (1, 2)] == ["1 batch", "2 batches"]


def test_none_is_a_word_or_a_digit():
    assert of_placement.counted(0, "batch", "batches") == "no batches"
    assert of_collectives.counted(0, "thread") == "0 threads"
