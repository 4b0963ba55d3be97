"""The part of a gradient step's time that its matrix products would take, by hand."""

import pytest

from experiments.off_policy.limits import parts, table

# 1e9 operations at 1e11 per second are 10 ms.
ROW = {
    "task": "Ant-v5",
    "algorithm": "sac",
    "batch": 128,
    "operations": 1e9,
    "turns": [
        {"step_s": 0.02, "flops": 1e11},
        {"step_s": 0.0125, "flops": 1e11},
        {"step_s": 0.02, "flops": 2e11},
    ],
}


def test_the_limit_is_over_the_step_of_the_same_turn():
    assert parts(ROW) == pytest.approx([0.5, 0.8, 0.25])


def test_the_table_has_the_median_and_the_spread():
    assert table([ROW]).splitlines()[-1] == "| Ant-v5 | sac | 128 | 1000 | 20.00 | 0.50 (0.25 - 0.80) |"
