"""Two GMIs against one: as many environments and cores in both, and the table, by hand."""

import pytest

from experiments.ablation.layouts import LAYOUTS, spec_in, table
from experiments.ablation.waiting import CASES


@pytest.mark.parametrize("case", CASES)
def test_both_layouts_have_two_threads_and_as_many_environments(case):
    two, one = (spec_in(case, layout).gmi for layout in LAYOUTS)
    assert (two.num_gmis, two.threads_per_gmi, one.num_gmis, one.threads_per_gmi) == (2, 1, 1, 2)
    assert 2 * two.envs == one.envs


def test_a_ratio_is_within_a_repeat():
    rates = {"2x1": (30.0, 40.0), "1x2": (20.0, 10.0)}
    rows = [
        {"case": "PPO", "layout": layout, "repeat": repeat, "steps_per_s": rate}
        for layout, found in rates.items()
        for repeat, rate in enumerate(found)
    ]
    # 30 / 20 and 40 / 10; the medians' ratio would be 35 / 15.
    assert table(rows).splitlines()[-1] == "| PPO | 35 (30 - 40) | 15 (10 - 20) | 2.75 (1.50 - 4.00) |"
