"""What the experiments make of their measurements, worked out by hand."""

import pytest

from collectives.alphabeta import AlphaBetaModel, CostCoefficients
from collectives.layout import Layout
from collectives.planner import plan_composition
from experiments.allreduce.projection import (
    Trained,
    Work,
    arms,
    measured_rows,
    nominal_table,
    projected_rows,
    table,
    with_more_members,
    with_other_reductions,
)
from experiments.allreduce.timestamps import Log, split
from experiments.allreduce.trainers import MODELS


def logs():
    # Two iterations of 1 s, two collectives each. In the first, member 1 comes 0.2 s later and both end 0.1 s after that,
    # the one that waited 0.01 s later. In the others both come together.
    first = Log(
        operations=[
            ("all_reduce", 400, 0.1, 0.41),
            ("all_gather", 8, 0.5, 0.6),
            ("all_reduce", 400, 1.1, 1.15),
            ("all_reduce", 400, 1.2, 1.25),
        ],
        iterations=[(0.0, 1.0), (1.0, 2.0)],
    )
    second = Log(
        operations=[("all_reduce", 400, 0.3, 0.4), *first.operations[1:]], iterations=first.iterations
    )
    return [first, second]


def test_waiting_for_the_other_member_is_apart_from_what_the_operation_costs():
    found = split(logs())
    assert (found.iterations, found.operations) == (2, 2.0)
    assert found.iteration_s == pytest.approx(1.0)
    # (0.41 - 0.3) + 0.1 + 0.05 + 0.05 of 2 s; the last member itself left at 0.4.
    assert found.reducing_share == pytest.approx(0.31 / 2)
    assert found.last_member_share == pytest.approx(0.30 / 2)
    assert found.waiting_shares == pytest.approx((0.2 / 2, 0.0))
    assert found.waiting_share == pytest.approx(0.1 / 2)
    # Member 0 was inside for 0.31 + 0.2 s, member 1 for 0.1 + 0.2 s.
    assert found.in_collectives_share == pytest.approx((0.51 + 0.30) / 2 / 2)
    # The gradients' three: 0.11, 0.05, 0.05 s.
    assert found.reducing_us == pytest.approx(50_000)


def test_logs_of_members_that_did_different_things_are_refused():
    first, second = logs()
    second.operations.pop()
    with pytest.raises(ValueError, match="3, 4"):
        split([first, second])
    with pytest.raises(ValueError, match="operations"):
        split([Log(), Log()])


def test_the_models_have_the_sizes_of_table_7():
    # Ant-v5 has 105 observations and 8 actions; two networks, a standard deviation per action, padded to rows of 512.
    hidden = 105 * 200 + 200 + 200 * 128 + 128 + 128 * 64 + 64
    assert MODELS[0].gradient_bytes() == 4 * 512 * -(-(2 * hidden + 64 * 8 + 8 + 8 + 64 + 1) // 512)
    sizes = [model.gradient_bytes() / 4 for model in MODELS]
    assert [f"{size:.1e}" for size in sizes] == ["1.1e+05", "2.9e+05", "1.5e+06"]


WORK = Work(steps=1000, reductions=10)


def test_throughput_follows_from_what_a_reduction_costs():
    # 1000 steps in 1 s, of which 10 reductions of 10 ms; at 20 ms each it is 1.1 s.
    assert with_other_reductions(1000.0, WORK, 0.01, 0.02) == pytest.approx(1000 / 1.1)
    # Twice the members on the same cores: 2 x 0.9 s of computing and 10 reductions of 30 ms for 2000 steps.
    assert with_more_members(1000.0, WORK, 0.01, 0.03, 2.0) == pytest.approx(2000 / 2.1)


def model(ip_s, rp_s):
    lines = {
        ("ip", op): CostCoefficients(ip_s, 0.0, 0.0, 0.0) for op in ("all_reduce", "reduce", "broadcast")
    }
    lines |= {
        ("rp", op): CostCoefficients(rp_s, 0.0, 0.0, 0.0) for op in ("all_reduce", "reduce", "broadcast")
    }
    return AlphaBetaModel(origin="by hand", coefficients=lines)


def test_the_baseline_trains_beside_the_choice_or_else_the_next_best():
    # On 2x2, ip_only is one step by ip; hybrid(2) and har are three, two of them or one by rp.
    rings_cheap = plan_composition(Layout.parse("2x2"), 1000, model(0.1, 0.01))
    assert arms(rings_cheap) == {"ip_only": "baseline", "rp_only": "chosen"}
    rings_dear = plan_composition(Layout.parse("2x2"), 1000, model(0.01, 0.1))
    assert arms(rings_dear) == {"ip_only": "baseline, chosen", "har": "runner-up"}


def test_rows_say_what_was_measured_and_what_was_projected():
    plan = plan_composition(Layout.parse("2x2"), 1000, model(0.1, 0.01))
    trained = Trained(plan=plan, work=WORK, rates={"ip_only": [400.0, 500.0, 600.0], "rp_only": [900.0]})
    rows = measured_rows("2G2T", "AT", trained)
    assert [row.basis for row in rows] == ["measured, devices are labels"] * 2
    # 2 s an iteration, of which 10 x 0.1 s; rp_only's three steps take 0.03 s: 1 s + 0.3 s.
    assert rows[1].projected_steps_per_s == pytest.approx(1000 / 1.3)
    larger = plan_composition(Layout.parse("4x4"), 1000, model(0.1, 0.01))
    rows += projected_rows("4G4T", "AT", larger, trained)
    assert rows[2].basis == "projected from 2x2"
    # Four times the computing, 4 x 1 s, and 10 x 0.1 s for 4000 steps.
    assert rows[2].steps_per_s == pytest.approx(4000 / 5)
    text = table(rows)
    assert "| 2G2T | AT | rp_only | chosen | 900 | 900 - 900 | 1.800 |" in text
    assert "| 4G4T | AT | ip_only | baseline | 800 | - | 1.000 |" in text


def test_the_nominal_table_compares_ip_only_with_the_choice():
    text = nominal_table({"4G4T": "4x4"}, {"SH": 6_000_000})
    assert text.count("\n") == 2
    assert "| 4G4T | SH |" in text
