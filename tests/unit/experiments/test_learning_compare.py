"""The table of the comparison with other libraries, by hand."""

import sys
from pathlib import Path

from experiments.learning.compare import PEERS, late_rate, python_of, reached, table

STILL = [[10.0, 100.0, 990.0, 1.0], [50.0, 500.0, 20.0, 1.0], [101.0, 900.0, 60.0, 1.0]]


def test_the_last_evaluation_counts_and_not_the_best():
    assert [reached(STILL, second) for second in (5.0, 10.0, 60.0, 200.0)] == [None, 990.0, 20.0, 60.0]


def test_the_table_is_a_mean_over_seeds_and_empty_where_a_seed_was_not_evaluated():
    late = [[60.0, 300.0, 40.0, 1.0], [100.0, 700.0, 100.0, 1.0]]
    rows = [
        {"task": "Ant-v5", "variant": "sac", "seed": seed, "curve": curve}
        for seed, curve in enumerate((STILL, late))
    ]
    lines = table({"time": 100.0, "variants": ["sac", "sb3-sac"], "rows": rows}).splitlines()
    assert lines[0] == "| task | variant | steps | after 25 s | after 50 s | after 100 s |"
    # After 100 s, with the 2 % that an evaluation may be late: 60 and 100. 800 steps in the mean.
    assert lines[2:] == ["| Ant-v5 | sac | 1 k | - | - | 80 (60 - 100) |"]


def test_what_a_library_does_before_its_first_evaluation_does_not_count_as_its_rate():
    assert late_rate([[20.0, 100.0, 0.0, 0.0], [42.0, 1200.0, 0.0, 0.0]]) == 50.0
    assert late_rate([[20.0, 100.0, 0.0, 0.0]]) == 5.0


def test_each_library_runs_in_the_environment_that_has_it():
    found = {name: python_of(name, Path("/peers")) for name in PEERS}
    assert found.pop("rllib-ppo") == Path(sys.executable)
    assert found.pop("sf-ppo") == Path("/peers/sf/bin/python")
    assert set(found.values()) == {Path("/peers/base/bin/python")}
