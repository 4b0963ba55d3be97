"""Which points the grid has, what is measured again, and the verdict: on formulas, without processes."""

from __future__ import annotations

import pytest

from experiments.search import run as experiment
from placement.search import TrialMeasurement

TASK = "Ant-v5"


@pytest.fixture
def speeds(monkeypatch):
    """Steps per second of a GMI by point; the probe that answers with them takes note of what it was asked."""

    class Table(dict):
        def __call__(self, spec, machine, settings):
            return self

        def __enter__(self):
            def probe(gmis, num_envs):
                self.asked.append((gmis, num_envs))
                return TrialMeasurement(steps_per_s=self[gmis, num_envs], memory_bytes=2**28)

            return probe

        def __exit__(self, *about):
            pass

    made = Table()
    made.asked = []
    monkeypatch.setattr(experiment, "SessionProbe", made)
    monkeypatch.setattr(experiment, "wait_until_quiet", lambda: None)
    return made


@pytest.fixture
def journal(tmp_path):
    return experiment.Journal(tmp_path / "results.jsonl")


def test_a_row_ends_where_iterations_last_longer_than_40_s(speeds, journal):
    # Ant-v5 has 64 steps an iteration. 2 GMIs of 2000 steps/s: 2 x 1024 x 64 / 4000 = 33 s, twice that is too long.
    # 1 GMI, of 3400 steps/s at its fastest: 2048 x 64 / 3400 = 38.6 s, though at 3000 it would be 43.7.
    sizes = (16, 32, 64, 128, 256, 512, 1024, 2048)
    speeds |= {(2, size): 2000.0 for size in sizes} | {(1, size): 3000.0 for size in sizes}
    speeds[1, 64] = 3400.0
    experiment.grid(journal, TASK, (2, 1))
    assert set(speeds.asked[:12]) == {(gmis, size) for gmis in (2, 1) for size in sizes[:6]}
    assert speeds.asked[12:] == [(2, 1024), (1, 1024), (1, 2048)]


def test_what_is_done_is_not_done_again(speeds, journal, tmp_path):
    speeds |= {(gmis, num_envs): 500.0 for gmis in (2, 1) for num_envs in (16, 32, 64, 128, 256, 512)}
    experiment.grid(journal, TASK, (2, 1))
    done = len(speeds.asked)
    experiment.grid(experiment.Journal(tmp_path / "results.jsonl"), TASK, (2, 1))
    assert len(speeds.asked) == done == 12


def measured(journal, totals, repeat=0):
    for (gmis, num_envs), total in totals.items():
        journal.add(
            {
                "kind": "grid", "task": TASK, "repeat": repeat, "gmis": gmis, "num_envs": num_envs,
                "system_steps_per_s": total, "duration_s": 20.0,
            }
        )  # fmt: skip


def test_the_judging_goes_forwards_and_backwards_by_turns_in_gmis_that_stay(speeds, journal, tmp_path):
    totals = {(2, 64): 950.0, (2, 128): 960.0, (1, 256): 990.0}
    measured(journal, totals)
    speeds |= {point: total / point[0] for point, total in totals.items()}
    experiment.judged(journal, TASK, (2, 64), repeats=3)
    forwards = [(1, 256), (2, 64), (2, 128)]
    assert speeds.asked == [*forwards[::-1], *forwards, *forwards[::-1]]
    experiment.judged(experiment.Journal(tmp_path / "results.jsonl"), TASK, (2, 64), repeats=4)
    assert speeds.asked[9:] == forwards


def search_found_2_x_128(journal):
    row = {"kind": "search", "task": TASK, "gmis": 2, "num_envs": 128}
    journal.add(row | {"measurements": 9, "duration_s": 15.0})


def test_the_best_three_and_what_was_found_are_measured_again(journal):
    measured(journal, {(2, 32): 800.0, (2, 64): 950.0, (2, 128): 960.0, (2, 256): 1000.0, (1, 256): 990.0})
    assert experiment.finalists(journal, TASK, (2, 64)) == [(2, 256), (1, 256), (2, 128), (2, 64)]
    assert experiment.finalists(journal, TASK, (2, 256)) == [(2, 256), (1, 256), (2, 128)]
    # also where the grid does not have it
    assert experiment.finalists(journal, TASK, (2, 4096))[-1] == (2, 4096)


def test_the_verdict_is_by_the_grid_s_own_figures(journal):
    measured(journal, {(2, 64): 900.0, (2, 128): 960.0, (2, 256): 1000.0})
    search_found_2_x_128(journal)
    # 960 of 1000; 15 s of three points of 20 s
    assert (
        experiment.verdict(journal, TASK) == "| Ant-v5 | 2 x 128 | 0.960 | 9, 15 | 3, 60 | 0.25 | - | - | - |"
    )
    journal.add(
        {
            "kind": "training",
            "task": TASK,
            "predicted_steps_per_s": 990.0,
            "measured_steps_per_s": 900.0,
            "error": 0.1,
        }
    )
    assert experiment.verdict(journal, TASK).endswith("| 990 | 900 | +10.0% |")


def test_repeats_alone_judge_where_there_are_some(journal):
    measured(journal, {(2, 64): 900.0, (2, 128): 960.0, (2, 256): 1000.0})
    search_found_2_x_128(journal)
    for repeat, (found, best) in enumerate([(950.0, 980.0), (970.0, 970.0), (700.0, 990.0)], start=1):
        measured(journal, {(2, 128): found, (2, 256): best}, repeat)
    # means 2620 / 3 and 2940 / 3: 2 x 256 was lucky with its 1000; standard deviations 150.4 and 10: sqrt((150.4 / 873.3)^2
    # + (10 / 980)^2) / sqrt(3) * 0.891
    assert "| 0.891 +- 0.089 |" in experiment.verdict(journal, TASK)
