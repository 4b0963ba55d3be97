"""The mapping experiment: its cases, its table, and the validation that it records."""

from __future__ import annotations

from experiments.mapping.cases import cases
from experiments.mapping.plots import draw
from experiments.mapping.summary import Line, rows_of, table, validation_of

ORIGIN = {"date": "2026-11-25T12:00:00+00:00", "cpu_model": "A", "cores": 2}


def line(name, repeat, steps_per_s, predicted, resident_mib=400):
    return Line(
        case={}, group="Ant-v5 serving", name=name, repeat=repeat, steps_per_s=steps_per_s, predicted=predicted,
        num_gmis=2, resident_bytes=resident_mib * 2**20, proportional_bytes=0.0, busy_before=0.0,
    )  # fmt: skip


LINES = [
    line("mp_dp 1 x 16", 0, 500.0, 660.0, 600),
    line("dp_only 2 x 16", 0, 1000.0, 900.0),
    line("mp_dp 1 x 16", 1, 600.0, 660.0, 620),
    line("dp_only 2 x 16", 1, 2000.0, 900.0),
    line("dp_only 2 x 16", 2, 1000.0, 900.0),
]


def test_medians_stand_beside_the_model_s_and_the_fastest_is_first(tmp_path):
    assert [row.median for row in rows_of(LINES)] == [550.0, 1000.0]
    lines = table(LINES).splitlines()
    assert lines[2] == "| Ant-v5 serving | dp_only 2 x 16 | 2 | 1,000 | 1,000 - 2,000 | 900 | 0.90 | 400 |"
    assert lines[3] == "| Ant-v5 serving | mp_dp 1 x 16 | 2 | 550 | 500 - 600 | 660 | 1.20 | 610 |"
    draw(LINES, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_the_validation_compares_medians():
    found = validation_of(LINES, ORIGIN)
    assert (found.cases, found.pairs, found.right, found.cores, found.date) == (2, 1, 1, 2, "2026-11-25")
    assert round(found.p90_error, 6) == 0.2
    assert found.kinds == ("serving",)


def test_every_template_is_run_with_one_and_two_simulators():
    found = cases(["Ant-v5"], ["serving", "ppo", "appo"], [16])
    assert {(case.kind, case.template) for case in found} == {
        *(("serving", name) for name in ("dp_mp", "mp_dp", "dp_only")),
        *(("ppo", name) for name in ("dp_only", "ea_t", "e_at", "dp_mp")),
        *(("appo", name) for name in ("decoupled", "dp_only")),
    }
    gmis = {(case.kind, case.template, case.simulators): case.num_gmis for case in found}
    assert [gmis["ppo", name, 2] for name in ("dp_only", "ea_t", "e_at", "dp_mp")] == [2, 3, 3, 4]
    assert [gmis["serving", name, 2] for name in ("dp_only", "mp_dp", "dp_mp")] == [2, 3, 4]
    for case in found:
        assert case.spec.gmi.num_gmis == case.num_gmis
