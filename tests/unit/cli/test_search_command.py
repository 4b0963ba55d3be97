"""Output of `rayagi search` for hand-made trials."""

from __future__ import annotations

import errno
import json
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from placement.search import Trial, TrialFailure, TrialMeasurement
from rayagi.cli import search as searching_command
from rayagi.cli.main import main
from rayagi.cli.parser import build_parser
from rayagi.cli.search import _line, run_options, save_plots, summary
from rayagi.cli.search_explain import (
    FEWEST,
    MOST,
    Explained,
    _iterations,
    best_and_second,
    explanation_text,
)
from rayagi.config.spec import RunSpec
from rayagi.coordinator.searching import SearchResult, SearchSettings
from rayagi.monitoring.search_plots import _draw_saturation
from rayagi.profiler.overlap import breakdown
from tests.unit.profiler.test_report import iterations
from tests.unit.profiler.traces import profile

MIB = 2**20


def measured(steps_per_s, mib):
    return TrialMeasurement(steps_per_s=steps_per_s, memory_bytes=mib * MIB, relative_error=0.02)


@pytest.fixture
def result():
    first = Trial(
        gmis_per_gpu=2, num_envs=8, verdict="first", outcome=measured(1000, 400),
        system_steps_per_s=2000.0, score=2000.0, best=True
    )  # fmt: skip
    best = Trial(
        gmis_per_gpu=2, num_envs=16, verdict="going on", outcome=measured(1500, 420), saturation=10.0,
        system_steps_per_s=3000.0, score=3000.0, best=True,
    )  # fmt: skip
    no_room = Trial(
        gmis_per_gpu=2, num_envs=32, verdict="no memory", outcome=None, projected_bytes=460.0 * MIB
    )
    crashed = Trial(
        gmis_per_gpu=1, num_envs=8, verdict="failed", outcome=TrialFailure(kind="crashed", reason="signal 11")
    )
    return SearchResult(
        task="Ant-v5", settings=SearchSettings(), best=best, trials=(first, best, no_room, crashed), complete=False,
        untried={3: (8, 16, 32), 1: (16, 64), 4: (8, 16, 32)},
        on_gpus=False, memory_bytes=900 * MIB, duration_s=61.0,
    )  # fmt: skip


def test_the_table_has_all_trials_and_the_command_that_uses_the_best(result):
    lines = summary(result).splitlines()
    assert lines[2].split() == ["2", "16", "3,000", "2", "%", "420", "MiB", "-", "10.00", "best"]
    assert lines[3].split() == ["2", "32", "-", "-", "-", "460", "MiB", "-", "no", "memory"]
    assert lines[4].split()[-1] == "failed"
    text = "\n".join(lines)
    assert "3,000 steps/s, found in 1 min 01 s. The budget ended the search" in text
    assert (
        "the search; the same command continues it. Not tried: 3-4 GMIs of 8-32 environments; 1 GMI of 16"
        in text
    )
    again = summary(replace(result, settings=SearchSettings(again=True)))
    assert "the same command without --again continues it." in again
    assert text.endswith(
        "Use it:\n  rayagi train Ant-v5 --gmis 2 --num-envs 16\n"
        "or let each machine use its own best:\n  rayagi train Ant-v5 --gmis auto --num-envs auto"
    )


def test_the_commands_that_use_the_best_have_the_searchs_own_options(result):
    words = ["--algorithm", "sac", "--seed", "3", "--set", "env.kwargs={a: 1}", "--set", "sac.tau=0.01"]
    arguments = build_parser().parse_args(["search", "Ant-v5", "--num-envs", "16", "--budget", "1m", *words])
    assert run_options(arguments) == tuple(words)
    one = replace(result, settings=SearchSettings(num_envs=16))
    train = "  rayagi train Ant-v5 --algorithm sac --seed 3 --set 'env.kwargs={a: 1}' --set sac.tau=0.01"
    assert summary(one, words).splitlines()[-4:] == [
        "Use it:",
        f"{train} --gmis 2 --num-envs 16",
        "or let each machine use its own best:",
        f"{train} --gmis auto --num-envs 16",
    ]
    fixed = replace(one, settings=SearchSettings(gmis=2))
    assert summary(fixed).endswith("rayagi train Ant-v5 --gmis 2 --num-envs auto")
    on_gpus = summary(replace(fixed, on_gpus=True))
    assert on_gpus.endswith("rayagi train Ant-v5 --set gmi.gmis_per_gpu=2 --num-envs auto")


@pytest.mark.parametrize(
    "settings", [SearchSettings(gmis=2, num_envs=16), SearchSettings(objective="time_to_return")]
)
def test_a_search_whose_result_no_run_takes_by_itself_does_not_offer_it(result, settings):
    assert summary(replace(result, settings=settings)).endswith(
        "Use it:\n  rayagi train Ant-v5 --gmis 2 --num-envs 16"
    )


def test_the_end_of_a_row_and_repeated_measurements_are_reported():
    plain = Trial(gmis_per_gpu=2, num_envs=64, verdict="plateau", outcome=measured(1000, 400), saturation=4.0)
    ended = replace(
        plain, system_steps_per_s=2000.0, reason="+3.0 % over the fastest before it, 5 % required"
    )
    assert _line(ended) == (
        "    2 x 64        2,000 steps/s +- 2 %  Sat 4.00  plateau: +3.0 % over the fastest before it, 5 % required"
    )
    going_on = replace(ended, verdict="going on")
    assert _line(going_on).endswith("Sat 4.00  (+3.0 % over the fastest before it, 5 % required)")
    left_out = Trial(
        gmis_per_gpu=1, num_envs=16, verdict="cannot win", outcome=None, reason="at most 2,100 steps/s"
    )
    assert _line(left_out) == "    1 x ...   not tried, cannot win: at most 2,100 steps/s"
    slow = TrialFailure(kind="too long", reason="an iteration would last 40 s; the limit is 25 s")
    too_long = Trial(gmis_per_gpu=2, num_envs=4096, verdict="failed", outcome=slow)
    assert _line(too_long) == "    2 x 4096  too long: an iteration would last 40 s; the limit is 25 s"
    refused = TrialFailure(kind="cannot be planned", reason="80 GMIs of 1 core each: it has 64 cores")
    refused = Trial(gmis_per_gpu=10, num_envs=128, verdict="failed", outcome=refused)
    assert _line(refused) == "   10 x 128   cannot be planned: 80 GMIs of 1 core each: it has 64 cores"


def test_a_tie_is_reported_with_the_result(result):
    again = replace(
        result.best,
        verdict="again",
        saturation=None,
        reason="1.0 % behind 2 x 32, within noise, with a smaller batch",
    )
    text = summary(replace(result, best=again, trials=(*result.trials, again), complete=True))
    assert text.splitlines()[5].endswith("again, best")
    assert "in 1 min 01 s. It is 1.0 % behind 2 x 32, within noise, with a smaller batch.\n" in text
    assert "It was measured only once, briefly." in summary(result)


def test_trials_of_the_coarse_pass_are_in_the_table_where_nothing_followed(result):
    alone = Trial(
        gmis_per_gpu=1, num_envs=16, verdict="coarse", outcome=measured(900, 400), system_steps_per_s=900.0
    )
    failure = TrialFailure(kind="out of memory", reason="no 8 GiB left")
    failed = Trial(gmis_per_gpu=1, num_envs=128, verdict="coarse", outcome=failure)
    trials = (replace(result.trials[0], verdict="coarse"), alone, failed, *result.trials)
    rows = summary(replace(result, trials=trials)).splitlines()[1:7]
    assert [row.split()[:2] for row in rows] == [
        ["1", "16"],
        ["1", "128"],
        ["2", "8"],
        ["2", "16"],
        ["2", "32"],
        ["1", "8"],
    ]
    assert rows[0].split()[-1] == "coarse"
    assert rows[1].endswith("out of memory")


def test_figures_13_and_14_are_drawn(result, tmp_path):
    paths = save_plots(result, tmp_path / "figures")
    assert [path.name for path in paths] == ["saturation.png", "memory.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_values_of_sat_beyond_the_axis_are_triangles_at_its_end():
    sats = {16: None, 32: 10.0, 64: 16.0, 128: 0.5, 256: -2.5, 512: float("-inf"), 1024: float("inf")}
    trials = [
        Trial(
            gmis_per_gpu=2,
            num_envs=envs,
            verdict="going on",
            outcome=measured(1000, 400),
            saturation=sat,
            system_steps_per_s=2000.0,
        )
        for envs, sat in sats.items()
    ]
    figure = Figure()
    _draw_saturation(figure, {2: trials}, 900 * MIB)
    lines = {line.get_marker(): line for line in figure.axes[1].get_lines()}
    assert {marker: list(lines[marker].get_xdata()) for marker in "o^v"} == {
        "o": [32, 64, 128, 256, 512, 1024],
        "^": [64, 1024],
        "v": [256, 512],
    }
    assert list(lines["o"].get_ydata()) == [10.0, 10.0, 0.5, -2.0, -2.0, 10.0]
    assert (set(lines["^"].get_ydata()), set(lines["v"].get_ydata())) == ({10.0}, {-2.0})
    assert figure.axes[1].get_ylabel() == "Sat (triangles: beyond)"


def again(gmis, envs, score, steps_per_s=1000.0):
    return Trial(
        gmis_per_gpu=gmis, num_envs=envs, verdict="again", outcome=measured(steps_per_s, 400), score=score,
        system_steps_per_s=score,
    )  # fmt: skip


def with_error(trial, relative_error):
    return replace(trial, outcome=replace(trial.outcome, relative_error=relative_error))


def test_a_winner_within_a_large_noise_is_reported_as_undecided(result):
    winner, second, third = (
        with_error(again(2, envs, score), error)
        for envs, score, error in ((256, 1919.0, 0.52), (512, 1844.0, 0.83), (1024, 500.0, 0.1))
    )
    shown = replace(result, best=winner, trials=(*result.trials, third, second, winner), complete=True)
    # 1919 (1 - 0.52) = 921: 1844 (1 + 0.83) is above it, 500 (1 + 0.1) below.
    undecided = "The measurements do not decide between 2 x 256 (+- 52 %), 2 x 512 (+- 83 %). Repeat the search with --again"
    assert undecided in summary(shown)
    # One of the two is uncertain: it may be the faster one.
    sure = with_error(winner, 0.01)
    assert "2 x 256 (+- 1 %), 2 x 512 (+- 83 %)" in summary(replace(shown, best=sure, trials=(second, sure)))


def test_without_a_validation_single_trials_are_undecided(result):
    first, best, *others = result.trials
    text = summary(replace(result, trials=(with_error(first, 0.8), best, *others)))
    assert "briefly.\nThe measurements do not decide between 2 x 16 (+- 2 %), 2 x 8 (+- 80 %).\n" in text
    row = [again(1, 2**place, 100.0 * place) for place in range(4)]
    vague = tuple(replace(with_error(trial, 0.9), verdict="coarse") for trial in row)
    best = replace(vague[-1], verdict="first")
    text = summary(replace(result, best=best, trials=(*vague, best)))
    assert "1 x 8 (+- 90 %), 1 x 4 (+- 90 %), 1 x 2 (+- 90 %).\n" in text
    vague = tuple(replace(trial, score=300.0) for trial in vague)
    assert "1 x 2 (+- 90 %) and 1 more.\n" in summary(replace(result, best=best, trials=(*vague, best)))


def test_the_second_is_another_configuration_and_one_that_was_measured_again(result):
    first, best, *_ = result.trials
    # Only single trials: the best-scored one that is not the best. Failures have no score.
    assert best_and_second(result) == [best, first]
    # The best was measured again, with another verdict: it is not its own second. A single trial may score higher by luck.
    winner, runner_up = again(2, 16, 2900.0), again(1, 64, 2500.0)
    trials = (*result.trials, again(1, 32, 2400.0), runner_up, winner)
    assert best_and_second(replace(result, best=winner, trials=trials)) == [winner, runner_up]
    assert best_and_second(replace(result, trials=(best,))) == [best]


def test_ten_seconds_are_profiled_within_limits():
    spec = RunSpec()
    steps = spec.learning.rollout_length * 16
    # An iteration of 16 environments lasts steps / speed seconds.
    assert _iterations(spec, again(2, 16, 0.0, steps_per_s=steps)) == 10
    assert _iterations(spec, again(2, 16, 0.0, steps_per_s=steps / 60)) == FEWEST
    assert _iterations(spec, again(2, 16, 0.0, steps_per_s=steps * 60)) == MOST


def test_the_explanation_has_both_per_environment_steps_and_what_helps_the_best(result, tmp_path):
    first, best, *_ = result.trials
    fast, slow = (
        Explained(
            trial=trial, folder=tmp_path / name, found=breakdown(profile(iterations([ms] * 5))),
            note="Times include the profiler's own: why", env_steps=steps, sentences=sentences,
        )
        for trial, name, ms, steps, sentences in (
            (best, "best", 4, 2000.0, ["GMI 1 is late"]), (first, "second", 6, 1000.0, ["of the second"])
        )
    )  # fmt: skip
    lines = explanation_text([fast, slow]).splitlines()
    assert lines[:4] == [
        "Why, by profiles of both",
        f"  A: 2 GMIs of 16 environments, 3,000 steps/s in the search: {tmp_path}/best",
        f"  B: 2 GMIs of 8 environments, 2,000 steps/s in the search: {tmp_path}/second",
        "  Times include the profiler's own: why",
    ]
    # 4 ms in an iteration of 2,000 steps, 6 ms in one of 1,000
    (act,) = (line for line in lines if line.split()[:2] == ["act", "all"])
    assert act.split()[2:8] == ["2", "ms", "6", "ms", "4", "ms"]
    assert "Mean time per 1,000 environment steps." in explanation_text([fast, slow])
    assert lines[-4:] == [
        "What would help the best", "  - GMI 1 is late", "", f"All of it: rayagi profile report {tmp_path}/best"
    ]  # fmt: skip
    alone = explanation_text([replace(fast, sentences=[])])
    assert alone.startswith("Only one configuration was measured; its profile\n")
    assert "What would help" not in alone


def test_an_explanation_needs_a_local_ray_and_says_so_before_it_searches(capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["search", "Ant-v5", "--explain"]) == 2
    assert "--explain needs a local Ray" in capsys.readouterr().err


def test_options_of_the_search():
    given = build_parser().parse_args(["search", "Ant-v5", "--budget", "5m", "--objective", "time_to_return"])
    assert (given.budget, given.objective, given.again, given.json) == (300.0, "time_to_return", False, False)
    given = build_parser().parse_args(["train", "Ant-v5", "--gmis", "auto", "--num-envs", "auto"])
    assert (given.gmis, given.num_envs) == ("auto", "auto")


def test_a_plan_of_numbers_that_nobody_searched_says_what_to_do(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = "tests/data/machines/cpu2.json"
    assert main(["plan", "Ant-v5", "--gmis", "auto", "--machine", machine]) == 2
    assert "Run `rayagi search Ant-v5` first" in capsys.readouterr().err


@pytest.fixture
def found(result, monkeypatch):
    """In the place of a search, which returns the result."""
    monkeypatch.setattr(searching_command, "search", lambda *_, **__: found.append(1) or result)
    found = []
    return found


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_folder_of_figures_that_cannot_be_written_is_reported_before_the_search(
    capsys, tmp_path, found, words
):
    (tmp_path / "file").touch()
    assert main(["search", "Ant-v5", "--out", str(tmp_path / "file" / "figures"), *words]) == 1
    assert "choose another folder with --out" in capsys.readouterr().err
    assert found == []


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_result_is_printed_even_if_the_figures_cannot_be_written(
    capsys, tmp_path, found, monkeypatch, words
):
    def save_search_plots(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rayagi.monitoring.search_plots.save_search_plots", save_search_plots)
    assert main(["search", "Ant-v5", "--out", str(tmp_path), *words]) == 1
    out, err = capsys.readouterr()
    assert "No space left on device" in err
    if words:
        assert json.loads(out)["best"]["num_envs"] == 16
    else:
        assert "Best by throughput: 2 GMIs, 16 environments each" in out


@pytest.mark.parametrize("words", [[], ["--explain"]])
@pytest.mark.parametrize(
    ("option", "value"), [("--gpu", "H100"), ("--gpus-per-node", "4"), ("--cores-per-node", "64")]
)
def test_options_of_a_forecast_need_a_cluster(capsys, option, value, words):
    assert main(["plan", "Ant-v5", option, value, *words]) == 2
    assert f"{option} needs --nodes N" in capsys.readouterr().err


def test_a_cluster_beyond_the_limit_is_refused(capsys):
    assert main(["plan", "Ant-v5", "--nodes", "200", "--gpus-per-node", "8"]) == 2
    assert "at most 1024 GPUs" in capsys.readouterr().err
