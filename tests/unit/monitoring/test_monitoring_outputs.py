import io

import numpy as np
import pytest
from rich.console import Console

from actors.protocols import IterationResult
from rayagi.monitoring.plots import save_plots, time_shares
from rayagi.monitoring.progress import LiveProgress, PlainProgress, Tracker, sparkline
from rayagi.monitoring.ray_metrics import Exporter
from rayagi.monitoring.report import mean_speed
from rayagi.run.limits import Limits, Position

PNG = b"\x89PNG\r\n\x1a\n"


def row(i, **values):
    return {
        "iteration": i,
        "env_steps": 100,
        "env_steps_total": 100.0 * i,
        "train_s": 0.5 * i,
        "steps_per_second": 200.0,
        "episode_return_mean": float(i),
        "iteration_s": 0.5,
        "simulate_s": 0.3,
        "act_s": 0.05,
        "update_s": 0.1,
        "sync_s": 0.0,
        "resident_bytes": 2.0**28,
        **values,
    }


def position(i):
    return Position(
        iteration=i, env_steps=100 * i, train_s=0.5 * i, evaluation_return=None, training_return=float(i)
    )


def test_time_shares_add_up_and_name_the_rest():
    shares = time_shares([row(1), row(2)])
    assert shares == pytest.approx(
        {"simulate": 0.6, "act": 0.1, "update": 0.2, "synchronise": 0.0, "other": 0.1}
    )


@pytest.mark.parametrize("count", [1, 3, 5000])
def test_plots_are_drawn_of_short_and_long_runs(tmp_path, count):
    rows = [row(i) for i in range(1, count + 1)]
    del rows[0]["episode_return_mean"]
    evaluation = {**row(1), "evaluation_return_mean": 5.0, "evaluation_return_std": 1.0}
    paths = save_plots(rows, [evaluation], tmp_path, "Ant-v5")
    assert [path.name for path in paths] == ["learning_curve.png", "throughput.png", "time_split.png"]
    assert all(path.read_bytes()[:8] == PNG for path in paths)


def test_mean_speed_is_steps_over_the_time_they_took():
    # 100 steps at 200/s and 100 steps at 50/s: 200 steps in 0.5 s + 2 s.
    assert mean_speed([row(1), row(2, steps_per_second=50.0)]) == pytest.approx(80.0)


def test_plain_lines_come_at_most_every_few_seconds():
    lines, now = [], [0.0]
    progress = PlainProgress(Limits(iterations=100), lines.append, every_s=5.0, clock=lambda: now[0])
    for i in range(1, 21):
        now[0] = float(i)
        progress.iterated([row(i)], position(i))
    assert [line.split("  ")[0] for line in lines] == [
        "iteration 1",
        "iteration 6",
        "iteration 11",
        "iteration 16",
    ]
    assert lines[0] == "iteration 1  100 steps  200 steps/s  return 1.0  50 s left"


def test_an_evaluation_is_a_line_of_its_own():
    lines = []
    PlainProgress(Limits(), lines.append).evaluated(
        {"iteration": 50, "evaluation_return_mean": 812.44, "evaluation_return_std": 3.0}, best=True
    )
    assert lines == ["iteration 50  evaluation return 812.4 +- 3.0  best so far"]


def test_the_panel_shows_the_runs_figures():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    progress = LiveProgress("Ant-v5", Limits(iterations=100), "evaluation", console)
    with progress:
        progress.evaluated({"evaluation_return_mean": 901.5}, best=True)
        progress.saved("iteration_000040")
        for i in range(1, 51):
            progress.iterated([row(i)], position(i))
    text = console.file.getvalue()
    for figure in ("50.0", "901.5 (best 901.5)", "iteration_000040", "256 MiB", "25 s", "▁"):
        assert figure in text


def test_the_sparkline_spans_low_to_high():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0] * 4, 2) == "▁▁"
    assert sparkline([], 8) == ""


def test_speed_is_smoothed_but_starts_at_the_first_value():
    tracker = Tracker(Limits())
    tracker.iterated([row(1, steps_per_second=1000.0)])
    assert tracker.steps_per_s == 1000.0
    tracker.iterated([row(2, steps_per_second=0.1)])
    assert tracker.steps_per_s == pytest.approx(0.1)
    tracker.iterated([row(3, steps_per_second=200.0)])
    assert 0.1 < tracker.steps_per_s < 200.0


def test_without_ray_the_exporter_does_nothing():
    exporter = Exporter({"run": "r", "task": "Ant-v5", "gmi": "0", "slice": "cpu[0]"})
    exporter.export(IterationResult(iteration=1, metrics={"env_steps": 0.0, "value_loss": np.nan}))


def test_an_exporter_needs_every_tag():
    with pytest.raises(ValueError, match="must be"):
        Exporter({"run": "r"})
