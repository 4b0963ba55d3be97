from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayagi.run.limits import Limits, Position, iterations_until, seconds_left, should_stop


def position(**values):
    defaults = {
        "iteration": 0,
        "env_steps": 0,
        "train_s": 0.0,
        "evaluation_return": None,
        "training_return": None,
        "training_episodes": 100,
    }
    return Position(**(defaults | values))


def test_nothing_stops_a_run_without_limits():
    far = position(iteration=10**9, env_steps=10**12, train_s=1e9, evaluation_return=1e9, training_return=1e9)
    assert should_stop(Limits(), far, "training") is None


@pytest.mark.parametrize(
    ("limits", "reached", "name"),
    [
        (Limits(iterations=5), {"iteration": 5}, "iterations"),
        (Limits(env_steps=5), {"env_steps": 7}, "env_steps"),
        (Limits(time_s=5.0), {"train_s": 5.0}, "time_s"),
        (Limits(stop_return=5.0), {"training_return": 5.0}, "stop_return"),
    ],
)
def test_each_limit_stops_the_run_once_it_is_reached_and_not_before(limits, reached, name):
    assert should_stop(limits, position(), "training") is None
    assert should_stop(limits, position(**reached), "training").limit == name


def test_the_return_that_counts_is_the_sources():
    both = position(evaluation_return=10.0, training_return=1.0)
    assert should_stop(Limits(stop_return=5.0), both, "evaluation") is not None
    assert should_stop(Limits(stop_return=5.0), both, "training") is None


def test_a_training_return_counts_once_a_hundred_episodes_ended():
    limits = Limits(stop_return=5.0)
    assert should_stop(limits, position(training_return=9.0, training_episodes=99), "training") is None
    assert should_stop(limits, position(training_return=9.0, training_episodes=100), "training") is not None
    early = position(evaluation_return=9.0, training_episodes=0)
    assert should_stop(limits, early, "evaluation") is not None


def test_a_negative_stop_return_is_not_reached_before_there_is_a_return():
    assert should_stop(Limits(stop_return=-100.0), position(), "training") is None


def test_the_nearest_limit_gives_the_time_left():
    limits = Limits(time_s=100.0, env_steps=1000)
    now = position(train_s=10.0, env_steps=500)
    assert seconds_left(limits, now, steps_per_s=100.0, iteration_s=1.0) == 5.0
    assert seconds_left(Limits(stop_return=1.0), now, steps_per_s=100.0, iteration_s=1.0) is None


@given(limit=st.integers(1, 10**9), done=st.integers(0, 10**9), per_iteration=st.integers(1, 10**5))
def test_iterations_until_a_step_limit_reach_it_and_not_one_more(limit, done, per_iteration):
    count = iterations_until(
        Limits(env_steps=limit), iteration=0, env_steps=done, steps_per_iteration=float(per_iteration)
    )
    assert done + count * per_iteration >= limit
    assert count == 0 or done + (count - 1) * per_iteration < limit


def test_limits_survive_being_stored():
    limits = Limits(time_s=1.5, stop_return=-3.0)
    assert Limits.from_dict(asdict(limits)) == limits


def test_the_text_says_which_return_counts():
    assert Limits(stop_return=900).text("evaluation") == "evaluation return >= 900"
    assert Limits(time_s=300, stop_return=9).text("training") == (
        "5 min of training, or mean return of the last 100 episodes >= 9"
    )


def test_one_iteration_is_not_several():
    assert Limits(iterations=1).text("training") == "1 iteration"
    stop = should_stop(Limits(iterations=1), position(iteration=1), "training")
    assert stop is not None
    assert stop.reason == "1 iteration done"
