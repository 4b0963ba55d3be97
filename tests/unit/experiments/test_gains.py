"""When GMIs gain: the layouts that are compared, and the words for what was measured."""

import os

import numpy as np
import pytest

from experiments.gains.cores import speeds, waiting_over_shared
from experiments.gains.robot import Robot
from experiments.gains.run import CASES, LAYOUTS, headline, ratios, spec_of

ROWS = [
    {"case": "waits", "by_model": 1.94, "steps_per_s": {LAYOUTS[0]: 100, LAYOUTS[1]: 190}},
    {"case": "waits", "by_model": 1.98, "steps_per_s": {LAYOUTS[0]: 100, LAYOUTS[1]: 210}},
    {"case": "neighbour", "by_model": None, "steps_per_s": {LAYOUTS[0]: 80, LAYOUTS[1]: 40}},
]


def test_ratios_are_taken_within_a_repeat():
    assert ratios(ROWS) == {"waits": [1.9, 2.1], "neighbour": [0.5]}


def test_the_headline_names_the_model_s_ratio_where_there_is_one():
    assert headline({"rows": ROWS}) == (
        "waits 2.00 (1.90-2.10 of 2; by the model 1.96 (1.94-1.98)), neighbour 0.50 (0.50-0.50 of 1)"
    )


def test_both_layouts_have_the_same_environments_and_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for case in CASES:
        one, each = (spec_of(case, layout).gmi for layout in LAYOUTS)
        assert (one.num_gmis, one.num_envs, one.threads_per_gmi) == (1, case.num_envs, 2)
        assert (each.num_gmis, each.num_envs, each.threads_per_gmi) == (2, case.num_envs // 2, 1)


def test_the_robot_moves_by_a_tenth_of_the_action_and_is_paid_for_being_near_zero():
    robot = Robot()
    (start,), _ = robot.reset(seed=0)
    (at,), reward, terminated, truncated, _ = robot.step(np.array([0.5], np.float32))
    assert np.isclose(at, start + 0.05)
    assert np.isclose(reward, -(at**2))
    assert not terminated
    assert not truncated


@pytest.mark.parametrize("slow", [1.0, 2.0, 4.0])
def test_gmis_wait_for_the_core_that_is_slower_throughout(slow):
    """A piece takes 1 s on one core and ``slow`` on the other: GMIs do 2 / slow a second, threads 1 + 1 / slow."""
    ends = [[float(n) for n in range(1, 101)], [slow * n for n in range(1, int(100 / slow) + 1)]]
    assert waiting_over_shared(ends, 2.0) == pytest.approx((2 / slow) / (1 + 1 / slow))


def test_gmis_wait_for_whichever_core_is_slow_unless_a_round_spans_both_speeds():
    """Two cores take turns of 4 s: one does a piece a second, the other two. Threads always do three a second."""
    fast, slow = [0.5] * 8, [1.0] * 4
    ends = [list(np.cumsum((first + second) * 20)) for first, second in ((fast, slow), (slow, fast))]
    assert waiting_over_shared(ends, 2 / 1.5) == pytest.approx(
        2 / 3
    )  # two pieces each, at the slower core's speed
    assert waiting_over_shared(ends, 8.0) == pytest.approx(1)
    assert list(speeds(ends[0], 4.0)[:2]) == [2.0, 1.0]
