"""The mapping experiment's table: medians, ratios within a repeat, and the model's prediction beside them."""

import pytest

from experiments.mapping.cases import cases
from experiments.mapping.plots import draw
from experiments.mapping.summary import rows_of, table

# GMI-DRL §3.1.1: R_s = 10 R_a, T_s = 6 T_a, alpha 0.2, and COM / BW = 2 (T_s + T_a) = 14 s with COM = 32 (2 * 100 + 20 + 4).
COSTS = {
    "task": "Ant-v5", "num_envs": 32, "case": "unit costs", "other_cores": 0.0,
    "simulate_s": 6.0, "act_s": 1.0, "train_s": 2.0,
    "simulator_share": 0.5, "agent_share": 0.05, "trainer_share": 0.1, "resource": "compute",
    "state_bytes": 100.0, "action_bytes": 20.0, "reward_bytes": 4.0, "model_bytes": 1000.0,
    "bandwidth": 32 * 16.0, "alpha": 0.2, "beta": 0.3, "num_steps": 1,
}  # fmt: skip


def line(template, repeat, steps_per_s, resident_mib):
    return {
        "task": "Ant-v5", "num_envs": 32, "mode": "serving", "template": template, "repeat": repeat,
        "case": template, "steps_per_s": steps_per_s, "num_gmis": 2, "num_trainers": 0,
        "resident_bytes": resident_mib * 2**20, "proportional_bytes": 0.5 * resident_mib * 2**20,
    }  # fmt: skip


LINES = [
    line("dp_only", 0, 1000.0, 400),
    line("mp_dp", 0, 500.0, 600),
    line("dp_only", 1, 2000.0, 400),
    line("mp_dp", 1, 600.0, 620),
    line("dp_only", 2, 1000.0, 400),
    {"template": "mp_dp", "repeat": 2, "case": "mp_dp", "failed": "no end within 400 s"},
]


def test_ratios_are_of_the_same_repeat_and_stand_beside_the_model_s():
    alone, shared = rows_of(LINES, [COSTS])
    assert (alone.median, shared.median) == (1000.0, 550.0)
    assert shared.speed == (0.5, 0.3)
    assert shared.memory == pytest.approx(610 / 400)
    # The paper: dp_only is 2.58 times as fast.
    assert shared.predicted_speed == pytest.approx(1 / 2.58, abs=1e-3)
    assert alone.predicted_speed == 1.0


def test_the_table_and_the_plot_show_every_case(tmp_path):
    rows = rows_of(LINES, [COSTS])
    text = table(rows)
    assert (
        "| Ant-v5 | 32 | serving | mp_dp | 2 | 550 | 500 - 600 | 0.40 | 0.30 - 0.50 | 0.39 | 610 | 1.52 | 305 |"
        in text
    )
    draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_without_unit_costs_nothing_is_predicted():
    rows = rows_of(LINES, [{"task": "Ant-v5", "num_envs": 32, "case": "unit costs", "failed": "no"}])
    assert [row.predicted_speed for row in rows] == [None, None]


def test_every_template_of_the_model_is_run():
    found = cases(["Ant-v5"], ["serving", "synchronous"], [32])
    assert [case.template.name for case in found] == [
        "dp_mp",
        "mp_dp",
        "dp_only",
        "dp_only",
        "dp_mp",
        "e_at",
        "ea_t",
    ]
    assert {case.spec.gmi.template for case in found} == {"dp_only", "dp_mp", "e_at", "ea_t"}
