import io
import os
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from actors.protocols import IterationResult
from rayagi.config.errors import ConfigError
from rayagi.monitoring.catalogue import CATALOGUE, DERIVED, EVALUATION, merge
from rayagi.monitoring.plots import draw_learning_curve, save_plots, time_shares
from rayagi.monitoring.progress import LiveProgress, PlainProgress, Tracker, sparkline
from rayagi.monitoring.ray_metrics import Exporter, RunExporter
from rayagi.monitoring.report import mean_rate, summary, write_report
from rayagi.run.folder import create_run, open_run
from rayagi.run.limits import Limits, Position
from tests.programs import run_python

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
        iteration=i,
        env_steps=100 * i,
        train_s=0.5 * i,
        evaluation_return=None,
        training_return=float(i),
        training_episodes=i,
    )


def test_time_shares_add_up_and_name_the_rest():
    shares = time_shares([row(1), row(2)])
    assert shares == pytest.approx(
        {
            "simulate": 0.6,
            "act": 0.1,
            "update": 0.2,
            "synchronise": 0.0,
            "wait for experience": 0.0,
            "other": 0.1,
        }
    )


def test_the_time_of_exchanging_steps_has_its_name():
    shares = time_shares([row(1, exchange_s=0.05), row(2)])
    assert shares["exchange steps"] == pytest.approx(0.05)  # 0.05 s of 1 s
    assert shares["other"] == pytest.approx(0.05)


def test_a_plot_replaces_a_link_and_not_the_file_it_names(tmp_path):
    others = tmp_path / "other.png"
    others.write_text("another's")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/throughput.png").symlink_to(others)
    save_plots([row(1)], [], tmp_path / "run", "Ant-v5")
    assert others.read_text() == "another's"
    assert (tmp_path / "run/throughput.png").read_bytes().startswith(PNG)
    assert not (tmp_path / "run/throughput.png").is_symlink()


def test_a_report_of_a_folder_whose_name_is_no_unicode(tmp_path):
    run = create_run(tmp_path, "Ant-v5", seed=1, rayagi_version="0", name="a")
    run = open_run(run.path.rename(tmp_path / os.fsdecode(b"b\xff")))
    run.progress_csv.write_text(f"{','.join(row(1))}\n{','.join(map(str, row(1).values()))}\n")
    assert "<title>b&#56575;</title>" in write_report(run).read_text()


@pytest.mark.parametrize("content", [b"\xff", b'{"torch"', b"[]", b"null", b"[" * 100_000, None])
def test_a_report_names_the_files_that_cannot_be_read(tmp_path, content):
    run = create_run(tmp_path, "Ant-v5", seed=1, rayagi_version="0", name="a")
    run.progress_csv.write_text(f"{','.join(row(1))}\n{','.join(map(str, row(1).values()))}\n")
    for name in ("versions.json", "experience.json", "prediction.json"):
        if content is None:
            (run.path / name).mkdir()
        else:
            (run.path / name).write_bytes(content)
    (run.path / "plan.txt").mkdir()
    (run.path / "config.yaml").write_bytes(b"\xff")
    page = write_report(run).read_text()
    assert "<th>versions.json</th><td>" in page
    assert (
        "<th>experience</th><td>experience.json is damaged: restore it from a copy, or remove it</td>" in page
    )
    assert (
        "<th>predicted</th><td>prediction.json is damaged: restore it from a copy, or remove it</td>" in page
    )
    assert "plan.txt cannot be read (" in page
    assert "config.yaml cannot be read (" in page


def test_acting_inside_the_simulators_call_is_said_and_not_shown_as_none(tmp_path):
    shares = time_shares([row(1, act_s=0.0), row(2, act_s=0.0)])
    assert shares == pytest.approx(
        {
            "simulate and act, in one call": 0.6,
            "update": 0.2,
            "synchronise": 0.0,
            "wait for experience": 0.0,
            "other": 0.2,
        }
    )
    run = create_run(tmp_path, "Ant-v5", seed=1, rayagi_version="0", name="a")
    header = row(1)
    run.progress_csv.write_text(f"{','.join(header)}\n{','.join(map(str, row(1, act_s=0.0).values()))}\n")
    page = write_report(run).read_text()
    assert '</span>simulate and act, in one call</td><td class="number">60.0 %' in page
    assert "</span>act<" not in page


def test_time_shares_of_gmis_that_work_at_the_same_time_are_of_what_they_did():
    # In 0.5 s: 0.3 simulated, 0.05 acted, 0.1 learned, 0.55 waited: 1.0 s of work, and none left.
    shares = time_shares([row(1, wait_s=0.55)])
    assert shares["wait for experience"] == pytest.approx(0.55)
    assert shares["simulate"] == pytest.approx(0.3)
    assert shares["other"] == pytest.approx(0.0)
    assert sum(shares.values()) == pytest.approx(1.0)


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
    assert mean_rate([row(1), row(2, steps_per_second=50.0)], "env_steps") == pytest.approx(80.0)


def test_an_update_without_steps_beside_it_counts_its_time():
    # 100 steps and 300 learned from in 0.5 s; then none, and 100 learned from, in 1 s.
    apart = [
        row(1, train_samples=300.0, samples_per_second=600.0),
        row(2, env_steps=0, steps_per_second=0.0, train_samples=100.0, samples_per_second=100.0),
    ]
    assert mean_rate(apart, "env_steps") == pytest.approx(100 / 1.5)
    assert mean_rate(apart, "train_samples") == pytest.approx(400 / 1.5)


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


def test_simulation_errors_add_up_in_lines_and_panel_and_are_left_out_if_there_are_none():
    lines = []
    progress = PlainProgress(Limits(), lines.append, every_s=0.0)
    progress.iterated([row(1, faults_unstable=0.0)], position(1))
    progress.iterated([row(2, faults_unstable=2.0), row(3, faults_contact_overflow=1.0)], position(3))
    progress.iterated([row(4, faults_unstable=1.0)], position(4))
    assert ["faults" in line for line in lines] == [False, True, True]
    assert lines[-1].endswith("faults: 3 unstable, 1 contact overflow")
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with LiveProgress("Ant", Limits(iterations=100), "training", console) as live:
        live.iterated([row(1, faults_constraint_overflow=7.0)], position(1))
    assert "simulation errors: 7 constraint overflow" in console.file.getvalue()


def test_the_panel_shows_what_returns_are_made_of():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with LiveProgress("Ant", Limits(iterations=100), "training", console) as live:
        live.iterated([row(1, reward_forward=812.04, reward_effort=-33.1)], position(1))
    assert "reward: forward 812.0, effort -33.1" in console.file.getvalue()


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


@pytest.mark.parametrize(("width", "lines_of_facts"), [(40, 9), (80, 5), (120, 3)])
def test_the_panel_has_as_many_columns_as_the_terminal_has_space_for(width, lines_of_facts):
    console = Console(file=io.StringIO(), width=width)
    progress = LiveProgress("runs/[a]", Limits(), "evaluation", console)
    progress.evaluated({"evaluation_return_mean": 901.5}, best=True)
    progress.saved("iteration_000040")
    console.print(progress.panel(position(1)))
    text = console.file.getvalue()
    assert "runs/[a]" in text  # no mark-up
    assert "…" not in text
    assert len(text.splitlines()) == lines_of_facts + 2  # a border above and below


def test_the_share_done_is_that_of_the_nearest_limit():
    at = Position(
        iteration=5, env_steps=300, train_s=25.0, evaluation_return=None, training_return=None, training_episodes=0
    )  # fmt: skip
    # 25 of 100 s, 300 of 1000 steps, 5 of 8 iterations; 5 of 4 is no more than all.
    shares = [
        Tracker(limits).share_done(at)
        for limits in (
            Limits(time_s=100.0),
            Limits(time_s=100.0, env_steps=1000),
            Limits(time_s=100.0, env_steps=1000, iterations=8),
            Limits(iterations=4),
            Limits(stop_return=10.0),
        )
    ]
    assert shares == [0.25, 0.3, 0.625, 1.0, None]


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


def test_without_ray_the_exporter_does_nothing_and_does_not_load_it():
    code = """
import sys
from rayagi.monitoring.catalogue import CATALOGUE
from rayagi.monitoring.ray_metrics import Exporter
exporter = Exporter(CATALOGUE, {"run": "r", "task": "Ant-v5", "gmi": "0", "slice": "cpu[0]"})
exporter.export({"env_steps": 5.0, "value_loss": 1.0})
print("ray" in sys.modules)
"""
    done = run_python(code)
    assert done.stdout == "False\n"


def test_values_reach_ray_by_their_kind_and_what_is_no_number_does_not(monkeypatch):
    import ray.util.metrics as ray_metrics

    sent = []

    class Sent:
        def __init__(self, name, description, tag_keys):
            self.name = name

        def set_default_tags(self, tags):
            self.tags = tags

        def inc(self, value):
            sent.append((self.name, "inc", value, self.tags["gmi"]))

        def set(self, value):
            sent.append((self.name, "set", value, self.tags["gmi"]))

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr(ray_metrics, "Counter", Sent)
    monkeypatch.setattr(ray_metrics, "Gauge", Sent)
    exporter = Exporter(CATALOGUE, {"run": "r", "task": "Ant-v5", "gmi": "3", "slice": "cpu[0]"})
    exporter.export({"env_steps": 64.0, "episodes": 0.0, "value_loss": np.nan, "entropy": 0.5, "other": 1.0})
    assert sent == [("rayagi_env_steps", "inc", 64.0, "3"), ("rayagi_entropy", "set", 0.5, "3")]
    del sent[:]
    run = RunExporter(run="r", task="Ant-v5")
    run.iterated([row(1), row(2)], position(2))
    run.evaluated({"iteration": 2, "evaluation_return_mean": 7.0}, best=True)
    assert ("rayagi_run_env_steps_total", "set", 200.0, "all") in sent
    assert sent[-1] == ("rayagi_run_evaluation_return_mean", "set", 7.0, "all")


def test_names_of_runs_and_tasks_may_have_any_characters(monkeypatch):
    """With Ray's own metrics, which take ASCII alone."""
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    tags = {"run": "Lauf für Ä", "task": "läufer:Läufer-v0", "gmi": "0", "slice": "cpu[0]"}
    exporter = Exporter(CATALOGUE, tags, prefix="any_characters_")
    exporter.export({"env_steps": 64.0, "entropy": 0.5})
    assert exporter._gauges["entropy"].info["default_tags"]["run"] == r"Lauf f\xfcr \xc4"


def test_every_metric_has_a_name_of_its_own():
    names = [metric.name for metric in {*CATALOGUE, *DERIVED, *EVALUATION}]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("closed_after", [0, 1, 2, 3])
def test_a_terminal_that_closes_does_not_end_the_run(closed_after):
    class Terminal(io.StringIO):
        writes = 0

        def write(self, text):
            self.writes += 1
            if self.writes > closed_after:
                raise OSError(5, "Input/output error")
            return super().write(text)

    stdout = sys.stdout
    terminal = Terminal()
    progress = LiveProgress("Ant-v5", Limits(), "training", Console(file=terminal, force_terminal=True))
    with progress:
        progress.iterated([row(1)], position(1))
        progress.iterated([row(2)], position(2))
    assert terminal.writes == closed_after + 1
    assert sys.stdout is stdout


def test_reward_terms_of_all_gmis_are_those_of_the_run():
    def result(**terms):
        return IterationResult(iteration=3, metrics={"env_steps": 8.0}, reward_terms=terms)

    merged = merge([result(up=[1.0, 2.0], effort=[-1.0, 0.0]), result(), result(up=[3.0], effort=[-2.0])])
    assert merged.reward_terms == {"up": [1.0, 2.0, 3.0], "effort": [-1.0, 0.0, -2.0]}
    alone = result(up=[1.0])
    assert merge([alone]) == alone


def test_a_metric_that_no_catalogue_has_is_refused_rather_than_left_out():
    with pytest.raises(ConfigError, match=r"metric = 'my_norm': .* no catalogue.*metrics=\(LearningMetric"):
        merge([IterationResult(iteration=3, metrics={"env_steps": 8.0, "my_norm": 1.0})])
    # Environments may count errors of their own.
    found = merge([IterationResult(iteration=3, metrics={"env_steps": 8.0, "faults_of_mine": 1.0})])
    assert found.metrics == {"env_steps": 8.0}


def test_histograms_of_all_gmis_are_added():
    def result(**histograms):
        return IterationResult(iteration=3, metrics={"env_steps": 8.0}, histograms=histograms)

    merged = merge([result(replay_age=[1, 2]), result(), result(replay_age=[0, 5], replay_staleness=[4, 0])])
    assert merged.histograms == {"replay_age": [1, 7], "replay_staleness": [4, 0]}


def test_means_over_samples_count_unequal_gmis_by_their_own():
    def result(env_steps, update_s, policy_loss):
        metrics = {"env_steps": env_steps, "update_s": update_s, "policy_loss": policy_loss}
        return IterationResult(iteration=3, metrics=metrics)

    merged = merge([result(600.0, 1.0, 0.2), result(200.0, 2.0, 0.6)]).metrics
    # (3 x 0.2 + 0.6) / 4; times are of GMIs, not of samples.
    assert merged == pytest.approx({"env_steps": 800.0, "update_s": 1.5, "policy_loss": 0.3})
    equal = merge([result(400.0, 1.0, 0.2), result(400.0, 2.0, 0.6)]).metrics
    assert equal["policy_loss"] == pytest.approx(0.4)


def evaluated(steps, mean, std):
    return {
        **row(1),
        "env_steps_total": steps,
        "evaluation_return_mean": mean,
        "evaluation_return_std": std,
        "evaluation_episodes": 10.0,
    }


def test_the_report_names_the_best_and_the_last_evaluation(tmp_path):
    folder = create_run(tmp_path, "Ant-v5", seed=0, rayagi_version="0.1", name="a")
    evaluations = [evaluated(100.0, 2.0, 0.5), evaluated(200.0, 7.0, 1.5), evaluated(300.0, -4.0, 2.5)]
    facts = dict(summary(folder, [row(1)], evaluations))
    assert facts["best evaluation"] == "7.0 +- 1.5 over 10 episodes at 200 steps"
    assert facts["last evaluation"] == "-4.0 +- 2.5 over 10 episodes"
    folder.unlock()


def test_an_evaluation_s_error_bar_is_its_standard_deviation():
    figure = Figure()
    draw_learning_curve(figure, [row(1)], [evaluated(100.0, 2.0, 0.5), evaluated(200.0, 7.0, 1.5)], "Ant-v5")
    for axis in figure.axes:
        (bars,) = axis.containers
        ends = [segment[:, 1].tolist() for segment in bars[2][0].get_segments()]
        assert ends == [[1.5, 2.5], [5.5, 8.5]]


def test_a_run_without_environment_steps_counts_what_it_learns_from():
    lines = []
    progress = PlainProgress(Limits(iterations=10), lines.append, every_s=0.0)
    row = {
        "iteration": 1.0, "env_steps": 0.0, "env_steps_total": 0.0, "steps_per_second": 0.0, "train_samples": 200.0,
        "samples_per_second": 100.0, "episode_return_mean": None,
    }  # fmt: skip
    position = Position(
        iteration=4,
        env_steps=0,
        train_s=8.0,
        evaluation_return=None,
        training_return=None,
        training_episodes=0,
    )
    progress.iterated([row], position)
    # 2 s an iteration, and six are left.
    assert lines == ["iteration 4  100 samples/s  12 s left"]


def test_the_progress_line_has_the_lag_and_its_bound():
    tracker = Tracker(Limits())
    assert tracker.lag_text() == ""
    row = {"steps_per_second": 1.0, "env_steps": 1, "episode_return_mean": None}
    tracker.iterated([{**row, "policy_lag_mean": 0.5, "policy_lag_max": 2.0, "policy_lag_bound": 4.0}])
    tracker.iterated([{**row, "policy_lag_mean": 0.9, "policy_lag_max": 1.0, "policy_lag_bound": 4.0}])
    assert tracker.lag_text() == "0.9, at most 2 (bound 4)"
    tracker.iterated([{**row, "policy_lag_mean": 1.0, "policy_lag_max": 3.0}])
    assert tracker.lag_text() == "1.0, at most 3"
