"""Warm-up truncation, and the error of the mean."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.protocols import IterationResult
from rayagi.coordinator.probe import (
    ProbeSettings,
    SteadyState,
    _measure_until_sufficient,
    is_sufficient,
    trim_warmup,
)


def test_the_first_value_never_counts():
    found = trim_warmup([9.0, 2.0, 2.0, 2.0])
    assert (found.warm_up, found.num_kept, found.mean_s, found.relative_error) == (1, 3, 2.0, 0.0)


def test_a_slow_start_is_left_out():
    # MSER: dropping 3 leaves no deviation at all; dropping fewer leaves some.
    found = trim_warmup([9.0, 5.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert (found.warm_up, found.mean_s) == (3, 2.0)


def test_no_more_than_half_is_left_out():
    assert trim_warmup([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).warm_up <= 3


def test_the_error_is_student_s():
    # 1 and 3: mean 2, variance 2, standard error sqrt(2 / 2) = 1; t(1) = 12.7062, relative 6.3531
    found = trim_warmup([7.0, 1.0, 3.0])
    assert found.relative_error == pytest.approx(6.3531, rel=1e-5)
    assert trim_warmup([7.0, 1.0]).relative_error == math.inf


def test_what_the_caller_knows_to_be_unlike_the_rest_never_counts():
    # 1.0 thrice, then 2.0: the first four do not count, although leaving out one or two would look as even
    found = trim_warmup([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], least=4)
    assert (found.warm_up, found.num_kept, found.mean_s) == (4, 2, 2.0)
    # where half of the series is more than that, MSER may leave out more: here 3, after which nothing deviates
    assert trim_warmup([9.0, 9.0, 9.0, 2.0, 2.0, 2.0], least=2).warm_up == 3


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=60))
def test_of_any_series(seconds):
    found = trim_warmup(seconds)
    assert found.warm_up + found.num_kept == len(seconds)
    assert 1 <= found.warm_up <= max(1, len(seconds) // 2)
    kept = seconds[found.warm_up :]
    assert min(kept) * (1 - 1e-9) <= found.mean_s <= max(kept) * (1 + 1e-9)


def steady(kept, mean_s, error):
    return SteadyState(warm_up=1, num_kept=kept, mean_s=mean_s, relative_error=error)


SETTINGS = ProbeSettings(
    relative_error=0.03,
    min_duration_s=2.0,
    loose_after_s=10.0,
    loose_error=0.1,
    max_duration_s=30.0,
    iteration_s=1.0,
)


@pytest.mark.parametrize(
    ("found", "elapsed_s", "enough"),
    [
        (steady(4, 0.5, 0.03), 2.5, True),  # tight: four iterations, two seconds, 3 %
        (steady(3, 1.0, 0.01), 4.0, False),  # too few to be sure of it so early
        (steady(8, 0.1, 0.01), 1.0, False),  # too short
        (steady(8, 0.5, 0.08), 9.0, False),
        (steady(8, 0.5, 0.08), 11.0, True),  # after ten seconds 10 % will do
        (steady(8, 0.5, 0.5), 11.0, False),
        (steady(2, 9.0, 0.5), 31.0, True),  # after thirty whatever there is
        (steady(1, 20.0, math.inf), 31.0, False),
    ],
)
def test_when_a_measurement_will_do(found, elapsed_s, enough):
    assert is_sufficient(SETTINGS, found, elapsed_s) is enough


class Timed:
    """A session whose iterations take these times, on a clock of their own; the last time goes on for ever."""

    def __init__(self, *seconds):
        self.seconds, self.done, self.now, self.requests = seconds, 0, 0.0, []

    def submit(self, count):
        self.requests.append(count)

    def collect(self, timeout_s):
        results = []
        for _ in range(self.requests[-1]):
            took = self.seconds[min(self.done, len(self.seconds) - 1)]
            self.done += 1
            self.now += took
            results.append(IterationResult(iteration=self.done, metrics={"iteration_s": took}))
        return results

    def watched(self, warm_up=1):
        return _measure_until_sufficient(self, SETTINGS, warm_up, clock=lambda: self.now)


def test_short_iterations_are_asked_for_by_the_half_second():
    session = Timed(0.5, 0.125)
    results, steady = session.watched()
    # one of 0.5 s, one again since that is half a second, then four of 0.125 s each time until two seconds are kept:
    # of 1 + 1 + 4 n iterations the first is left out, and 1 + 4 n >= 16 for n = 4
    assert session.requests == [1, 1, 4, 4, 4, 4]
    assert (len(results), steady.warm_up, steady.mean_s) == (18, 1, 0.125)


def test_iterations_that_warm_up_are_waited_for():
    session = Timed(1.0)
    results, steady = session.watched(warm_up=6)
    # four of the same time after six: tight, and longer than two seconds
    assert (len(results), steady.warm_up, steady.num_kept) == (10, 6, 4)


def test_a_slow_candidate_makes_do_with_two():
    session = Timed(12.0, 14.0, 10.0)
    results, steady = session.watched()
    # 14 and 10: mean 12, error 12.7062 * 2 / 12 = 2.12, but 36 s are over
    assert (len(results), steady.num_kept) == (3, 2)
    assert steady.relative_error == pytest.approx(12.7062 * 2 / 12, rel=1e-5)
