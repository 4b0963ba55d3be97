"""The papers' figures: drawn from committed rows, and the page that quotes them; headlines by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments.papers import readings, rl_scope
from experiments.papers.__main__ import PAGE, PICTURES, Runs, chosen, found_rows, main
from experiments.papers.catalogue import EXHIBITS, PAPERS
from experiments.papers.findings import CLAIMS
from experiments.papers.page import text, where
from experiments.papers.rows import load, newest, origin_of, origins_of
from experiments.profiler import survey

MEASURED = found_rows(EXHIBITS, None)
ORIGIN = {"date": "2026-11-01T00:00:00+00:00", "git_commit": "abc", "cpu_model": "CPU", "cores": 2}


def test_the_page_is_what_the_committed_rows_say():
    assert PAGE.read_text(encoding="utf-8") == text(MEASURED, PICTURES, PAGE), (
        "run python -m experiments.papers all --draw"
    )


@pytest.mark.parametrize("exhibit", MEASURED, ids=lambda each: each.key)
def test_every_figure_is_drawn_from_its_rows_and_is_committed(exhibit, tmp_path):
    rows = load(MEASURED[exhibit])
    assert origin_of(rows)["git_commit"]
    assert exhibit.ours(rows)
    if exhibit.draw is None:
        return
    path = tmp_path / "figure.png"
    exhibit.draw(rows, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    committed = (
        MEASURED[exhibit].parent / exhibit.picture if exhibit.picture else PICTURES / f"{exhibit.key}.png"
    )
    assert committed.exists()


def test_no_picture_is_left_of_an_exhibit_that_is_gone():
    drawn = {f"{each.key}.png" for each in MEASURED if each.draw is not None and not each.picture}
    assert {path.name for path in PICTURES.iterdir()} == drawn


def test_what_is_not_measured_says_why_and_claims_name_exhibits():
    keys = [exhibit.key for exhibit in EXHIBITS]
    assert len(set(keys)) == len(keys)
    for exhibit in EXHIBITS:
        assert exhibit.paper in PAPERS
        assert exhibit.differs
        # The axes are those of a figure from rows; without rows there are none.
        assert (exhibit.axes == "none") == (exhibit.measuring is None) == (exhibit.ours is None)
    for claim in CLAIMS:
        assert claim.paper in PAPERS
        assert set(claim.shown) <= set(keys)


def test_the_newest_rows_by_their_own_date(tmp_path):
    for name, date in (("a", "2026-11-02"), ("b", "2026-11-01"), ("c", "2026-11-03")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"origin": ORIGIN | {"date": date}, "kind": name}))
    assert newest(tmp_path, "*.json").name == "c.json"
    assert newest(tmp_path, "*.json", lambda rows: rows["kind"] != "c").name == "a.json"
    assert newest(tmp_path, "*.csv") is None
    with pytest.raises(ValueError, match="do not say where they are from"):
        origin_of({"rows": [{"x": 1}]})


def test_rows_of_several_runs_have_the_dates_of_the_first_and_the_last():
    old = ORIGIN | {"date": "2026-10-30T10:00:00+00:00", "git_commit": "old"}
    assert where(origins_of({"rows": [{"origin": ORIGIN}]})) == "CPU, 2 cores, 2026-11-01, abc"
    assert where(origins_of({"rows": [{"origin": ORIGIN}, {"origin": old}]})) == (
        "CPU, 2 cores, 2026-10-30 to 2026-11-01, abc"
    )


def grid(task, envs, steps_per_s, mib):
    return {
        "kind": "grid",
        "task": task,
        "gmis": 1,
        "num_envs": envs,
        "steps_per_s": steps_per_s,
        "memory_bytes": mib * 2**20,
    }


GRID = [
    *(grid("Ant", 16, speed, 100) for speed in (900, 1000, 5000)),
    grid("Ant", 32, 1500, 110), grid("Ant", 64, 1800, 140), grid("Ant", 128, 1350, 150),
]  # fmt: skip


def test_the_grid_s_headlines_by_hand():
    assert readings.throughput_by_envs(GRID) == "Ant 1,800 steps/s with 64, 0.75 of that with 128"
    # 32: 50 % for 10 %: 5. 64: 20 % for 27.3 %: 0.73. 128: loses.
    assert readings.saturation(GRID) == "Ant below 0.1 first with 128"
    # 64: 110 + 32 / 16 * 10 = 130 for 140, 7.1 % too low.
    # 128: 140 + 64 / 32 * 30 = 200 for 150, 33.3 % too high.
    assert readings.projection(GRID) == "20.2 % off in the median of 2, 33 % at most"


def test_ratios_are_taken_within_a_repeat():
    rows = {
        "rows": [
            {"task": "Ant", "repeat": repeat, "peer": peer, "steps_per_s": speed}
            for repeat, speeds in enumerate(((100, 50, 40), (300, 100, 30)))
            for peer, speed in zip(("rayagi-2x1", "rayagi-1x2", "cleanrl"), speeds, strict=True)
        ]
    }
    assert readings.several_over_one(rows) == "2.50 times on average: Ant 2.50 (2.00-3.00 of 2)"
    assert readings.over_peers(rows) == "6.25 times on average: Ant 6.25 (2.50-10.00 of 2)"


def test_templates_and_predictions_by_hand():
    def row(template, speed, memory, predicted):
        case = {"task": "Ant", "kind": "serving", "template": template, "num_envs": 16, "simulators": 1}
        return {
            "case": case, "group": "Ant serving", "name": template, "repeat": 0, "steps_per_s": speed,
            "proportional_bytes": memory, "predicted": predicted,
        }  # fmt: skip

    rows = {"rows": [row("dp_only", 200, 30, 220), row("dp_mp", 100, 60, 120), row("mp_dp", 160, 50, 100)]}
    assert readings.templates(rows) == (
        "serving: dp_only over dp_mp 2.00 for 0.50 times its memory; "
        "serving: dp_only over mp_dp 1.25 for 0.60 times its memory"
    )
    # mp_dp is predicted below dp_mp, and is faster: 2 of 3. Errors 10, 20, 37.5 %.
    assert (
        readings.predictions(rows, serving=True)
        == "2 of 3 pairs in the right order; error 20 % in the median"
    )


def surveyed(library, algorithm, task, **ns):
    return {
        "case": f"{library} {algorithm} {task}", "library": library, "algorithm": algorithm, "task": task, "env_steps": 10.0,
        "ns": [[*key.split("__"), value] for key, value in ns.items()], "transitions": [["python", "backend", 30.0]],
    }  # fmt: skip


def test_the_survey_s_shares_by_hand():
    rows = [
        surveyed(
            "sb3",
            "ppo",
            "Walker2d-v5",
            simulation__simulator=30,
            simulation__python=10,
            inference__backend=20,
            x__python=40,
        ),
        surveyed("sb3", "a2c", "Walker2d-v5", simulation__simulator=60, backpropagation__backend=40),
        surveyed("sb3", "sac", "Walker2d-v5", simulation__simulator=10, backpropagation__backend=90),
    ]
    assert survey.shares(rows[0]) == {
        ("simulation", "simulator"): 0.3, ("simulation", "python"): 0.1, ("inference", "backend"): 0.2,
        ("other", "python"): 0.4,
    }  # fmt: skip
    assert rl_scope.algorithms({"rows": rows}) == (
        "sb3: sac 10.0 %, ppo 40.0 %, a2c 60.0 %, least on-policy over most off-policy 4.0"
    )
    assert "| sb3 ppo Walker2d-v5 | 20.0 % | 40.0 % | 0.0 % | 40.0 % | 30.0 % |" in survey.table(rows, 7)
    assert survey.table(rows, 7).splitlines()[-1].endswith("| 3.0 |")


def test_stages_of_rayagi_s_own_operations():
    # A whole rollout in one call: acting is inference, the rest of the simulator's time simulation.
    row = surveyed(
        "rayagi", "ppo", "Walker2d-v5",
        collect__simulator=50, collect__python=5, learn__kernel_update=30, __python=5,
        **{"collect__kernel_act+simulator": 10},
    )  # fmt: skip
    assert survey.shares(row) == {
        ("simulation", "simulator"): 0.5, ("inference", "kernel"): 0.1, ("inference", "python"): 0.05,
        ("backpropagation", "kernel"): 0.3, ("other", "python"): 0.05,
    }  # fmt: skip


def test_stages_of_a_collection_that_goes_step_by_step():
    row = surveyed(
        "rayagi", "sac", "Walker2d-v5", simulate__simulator=30, simulate__python=10, act__backend=20, collect__python=5,
        reduce__communication=5, learn__backend=30,
    )  # fmt: skip
    stages = {name: round(survey.of_stage(row, name), 2) for name in survey.STAGES}
    assert stages == {"inference": 0.25, "simulation": 0.4, "backpropagation": 0.35, "other": 0.0}


def test_every_library_of_the_survey_runs_in_its_own_environment():
    peers = Path("/peers")
    cases = {(case.library, case.algorithm): case for case in survey.CASES if 4 in case.figures}
    pythons = {library: survey.command(case, peers, peers)[0] for (library, _), case in cases.items()}
    assert pythons == {
        "rayagi": sys.executable, "rllib": sys.executable, "sample-factory": "/peers/sf/bin/python",
        "sb3": "/peers/base/bin/python", "cleanrl": "/peers/base/bin/python", "skrl": "/peers/base/bin/python",
    }  # fmt: skip
    # skrl's example of PPO has four environments of 1,024 steps, Sample Factory's of APPO 64 of 64.
    steps = {key: survey.env_steps(case, peers) for key, case in cases.items() if key[0] != "rayagi"}
    assert steps["sb3", "ppo"] == 2048
    assert steps["skrl", "ppo"] == steps["sample-factory", "appo"] == 4096
    assert steps["skrl", "sac"] == 100
    assert steps["rllib", "ppo"] is None


def test_a_figure_that_a_paper_does_not_have_is_one_sentence():
    with pytest.raises(SystemExit, match=r"gear has no figure 12 with results; it has 5, 6, 7, 8, 4\.4"):
        chosen("gear", ["12"])
    assert [each.label for each in chosen("gmi-drl", ["9a", "T6"])] == ["Figure 9a", "Table 6"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_plan_says_what_runs_what_is_missing_and_what_cannot(tmp_path, monkeypatch, capsys):
    def planned(*arguments):
        monkeypatch.setattr("sys.argv", ["papers", *arguments, "--out", str(tmp_path), "--plan"])
        assert main() == 0
        return capsys.readouterr().out

    printed = planned("rl-scope", "--quick")
    assert "skipped  rl-scope Figure 4, rl-scope Figure 5, rl-scope Figure 7: give --peers" in printed
    assert "nothing  rl-scope Figure 8: needs a GPU" in printed
    assert printed.endswith("0 experiments, about 0 minutes\n")
    printed = planned("gear", "--full", "--figure", "6")
    assert "  10 min gear Figure 6: python -m experiments.replay.figures batch --write\n" in printed


def test_what_ran_by_this_commit_does_not_run_again(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(
        "experiments.papers.__main__.python_m", lambda command: ran.append(command) or int(len(ran) == 1)
    )
    arguments = [
        "papers",
        "gear",
        "--figure",
        "5",
        "6",
        "--quick",
        "--peers",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr("sys.argv", arguments)
    assert main() == 1  # the first one fails, the second runs all the same
    assert "failed with exit code 1; the others go on" in capsys.readouterr().out
    assert len(ran) == 2
    assert main() == 0
    assert len(ran) == 3  # only the one that had failed
    assert "done     gear Figure 6" in capsys.readouterr().out
    monkeypatch.setattr("experiments.papers.__main__.origin", lambda: ORIGIN)
    assert main() == 0
    assert len(ran) == 5  # by another commit


def test_a_damaged_record_of_runs_is_one_sentence(tmp_path):
    (tmp_path / "runs.json").write_text("{")
    with pytest.raises(SystemExit, match="is damaged: delete it"):
        Runs(tmp_path)


@pytest.mark.slow
def test_a_quick_figure_is_measured_and_drawn(tmp_path):
    command = [
        sys.executable,
        "-m",
        "experiments.papers",
        "gear",
        "--quick",
        "--figure",
        "6",
        "--out",
        str(tmp_path),
    ]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=280, check=True
    )
    assert "1 experiments, about 3 minutes" in ran.stdout
    assert "1 of 1 measured" in (tmp_path / "papers.md").read_text()
    assert (tmp_path / "figures" / "gear_figure-6.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "quick" / "runs.json").read_text())
