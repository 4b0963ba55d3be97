"""What the throughput experiment says of turns."""

import sys

import pytest

from experiments.throughput import turns
from experiments.throughput.turns import Turn, summarise


def turn(share, layout="2x1", stolen=0.0):
    return Turn(layout, 5000.0 * share, limit_before=4000.0, limit_after=6000.0, stolen_cores=stolen)


def test_a_turn_is_compared_with_the_limits_before_and_after_it():
    assert turn(0.8).share == pytest.approx(0.8)
    # Of two cores the host kept 0.4: 0.8 / (1 - 0.2)
    assert turn(0.8, stolen=0.4).share_of_what_was_left == pytest.approx(1.0)


def test_each_layout_has_a_row_with_mean_error_and_spread():
    told = summarise([turn(0.7), turn(0.8), turn(0.9), turn(1.0, "1x2", stolen=0.2), turn(0.5, "1x2")])
    # stdev(0.7, 0.8, 0.9) = 0.1, over sqrt(3): 0.058
    assert "| 2x1 | 3 | 4000 | 5000 | 0.800 +- 0.058 | 0.80 (0.70 - 0.90) | 0.0% | 0.800 |" in told
    # stdev(1.0, 0.5) = 0.354, over sqrt(2): 0.25; kept: (0.1 + 0) / 2; left: (1 / 0.9 + 0.5) / 2
    assert "| 1x2 | 2 | 3750 | 5000 | 0.750 +- 0.250 |" in told
    assert told.endswith("| 5.0% | 0.806 |")


def test_too_few_turns_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["turns", "--rounds", "1"])
    with pytest.raises(SystemExit, match="2"):
        turns.main()
    assert "--rounds must be at least 2" in capsys.readouterr().err
