"""The third paper's figures: measurements are kept, resumed and reported; every loop that collects data collects it."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from experiments.fusion import collection, complexity, pipeline, run, simulators
from experiments.fusion.figure import Case, Size, measure
from experiments.fusion.records import Records, by
from experiments.fusion.settings import Settings
from experiments.fusion.timing import cost
from rayagi.envs.errors import KernelError

HERE = {"cpu_model": "this one", "cores": 2, "date": "today", "git_commit": "a"}
QUICK = Size(quick=True, seconds=0.001, repeats=2, threads=1)


def test_what_is_measured_is_not_measured_again(tmp_path):
    made, measured = [], []

    def case(number):
        def make():
            made.append(number)
            return lambda: measured.append(number) or {"per_s": 10.0 * number}

        return Case({"form": "c", "num_envs": number}, make)

    path = tmp_path / "measurements.jsonl"
    records = Records(path, HERE)
    records.add("8", {"form": "c", "num_envs": 1}, 0, {"per_s": 9.0}, None)
    measure("8", [[case(1), case(2)]], 2, records, None)
    assert measured == [2, 1, 2]
    again = Records(path, HERE | {"date": "tomorrow"})
    assert again.rows == records.rows
    measure("8", [[case(1), case(2)]], 2, again, None)
    assert made == [1, 2]
    (labels, values), _ = again.of("8")
    assert labels == {"form": "c", "num_envs": 1}
    assert [one["per_s"] for one in values] == [9.0, 10.0]
    assert len(again.origins) == 1
    assert len(Records(path, HERE | {"git_commit": "b"}).origins) == 2


def test_the_way_of_waiting_that_is_faster_counts(tmp_path):
    path = tmp_path / "measurements.jsonl"
    records = Records(path, HERE)
    rates = {
        ("torch", None): (3.0, 4.0, 50.0),
        ("torch", "PASSIVE"): (5.0, 1.0, 2.0),
        ("c", "PASSIVE"): (7.0,),
    }
    rates |= {("c", None): (6.0, 6.0)}
    for (form, waiting), values in rates.items():
        for repeat, value in enumerate(values):
            records.add("8", {"form": form}, repeat, {"steps_per_s": value}, waiting)
    assert records.has("8", {"form": "c"}, 1, None)
    assert not records.has("8", {"form": "c"}, 1, "PASSIVE")
    for read in (records, Records(path, HERE)):
        found = {labels["form"]: [one["steps_per_s"] for one in values] for labels, values in read.of("8")}
        assert found == {"torch": [3.0, 4.0, 50.0], "c": [7.0]}


def test_another_machine_s_measurements_are_left_alone(tmp_path):
    path = tmp_path / "measurements.jsonl"
    Records(path, HERE)
    with pytest.raises(SystemExit, match="with another cores; give another --out"):
        Records(path, HERE | {"cores": 64})
    path.write_text(path.read_text() + "no json\n")
    with pytest.raises(SystemExit, match=r"measurements.jsonl, line 2: this is no measurement: no json"):
        Records(path, HERE)


def test_a_case_that_cannot_run_is_told_and_left_out(tmp_path, capsys):
    def fail():
        raise KernelError("CartPole in CUDA", "there is no CUDA device")

    records = Records(tmp_path / "m.jsonl", HERE)
    cases = [Case({"form": "cuda"}, fail), Case({"form": "c"}, lambda: lambda: {"x": 1.0})]
    measure("8", [cases], 1, records, None)
    assert [labels for labels, _ in records.of("8")] == [{"form": "c"}]
    assert (
        "8 {'form': 'cuda'} is left out: CartPole in CUDA: there is no CUDA device" in capsys.readouterr().out
    )


def test_the_cost_of_a_call(monkeypatch):
    now = 0.0

    def call():
        nonlocal now
        now += 0.25

    monkeypatch.setattr("experiments.fusion.timing.time.perf_counter", lambda: now)
    monkeypatch.setattr("experiments.fusion.timing.time.process_time", lambda: 2 * now)
    found = cost(call, lambda: None, at_least_s=1.0)
    assert found == pytest.approx((0.25, 0.5))
    assert found.rates(10.0) == pytest.approx({"steps_per_s": 40.0, "steps_per_cpu_s": 20.0})


def test_gains_are_of_the_same_repeat(tmp_path):
    records = Records(tmp_path / "m.jsonl", HERE)
    for steps, rates in ((1, (2.0, 4.0)), (100, (20.0, 80.0))):
        for repeat, rate in enumerate(rates):
            labels = {"form": "c", "num_envs": 64, "copies": 16, "compute": 1, "steps": steps}
            records.add("9", labels, repeat, {"steps_per_cpu_s": rate}, "PASSIVE")
    assert complexity.gains(records) == {(64, 100, 16, 1): [10.0, 20.0]}
    assert list(by(records.of("9"), "steps")) == [(1,), (100,)]
    assert "| 64 | 100 | 1 | S=16: 20 (10 - 20) |" in complexity.findings(records)
    complexity.draw(records, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_every_figure_asks_for_what_it_draws():
    for name, entry in run.FIGURES.items():
        cases = [case for group in entry.groups(QUICK) for case in group]
        keys = [json.dumps(dict(case.labels), sort_keys=True) for case in cases]
        assert len(set(keys)) == len(keys) >= 2, name


def test_mujoco_s_ant_is_measured_beside_the_others():
    rates = simulators.ants(2, QUICK)()
    assert 10 < rates["steps_per_s"] < 1e6


def loops():
    for form in collection.MOST_STEPS:
        package = {"xla": "jax", "envpool": "envpool"}.get(form)
        missing = package is not None and find_spec(package) is None
        marks = [pytest.mark.skipif(missing, reason=f"no {package}")]
        marks += [pytest.mark.slow] if form == "torch.compile" else []
        yield pytest.param(form, marks=marks)


@pytest.mark.parametrize("form", loops())
def test_every_loop_collects_what_a_learner_needs(form):
    """CartPole without skill: episodes end, pole and cart within their limits when an action is taken."""
    loop = collection.collector(form, 6, 120, 1)
    found = loop.collect()
    loop.wait()
    if form == "c, fused policy":
        obs, actions, rewards = found.obs, found.actions, found.rewards
        ended = found.terminated | found.truncated
    elif form == "xla":
        obs, actions, rewards, ended = (torch.from_numpy(__import__("numpy").array(one)) for one in found)
    else:
        columns = ([torch.as_tensor(one) for one in column] for column in zip(*found, strict=True))
        obs, actions, rewards, ended = (torch.stack(column) for column in columns)
    assert obs.shape == (120, 6, 4)
    assert actions.shape == rewards.shape == ended.shape == (120, 6)
    assert set(actions.unique().tolist()) == {0, 1}
    assert 6 <= int(ended.sum()) <= 120 * 6 // 8
    assert (obs[:, :, 2].abs() <= 12 * 2 * 3.15 / 360 + 0.1).all()
    assert loop.counts().api_calls >= 1


def trained(name, **changes):
    settings = replace(Settings(), num_envs=64, **changes)
    iterate, iterations = pipeline.loop(name, settings, 1)
    return [iterate() for _ in range(40 // iterations)]


@pytest.mark.parametrize(
    "name",
    [
        "rayagi-fused",
        pytest.param("purejax", marks=pytest.mark.skipif(find_spec("jax") is None, reason="no jax")),
        pytest.param("envpool", marks=pytest.mark.skipif(find_spec("envpool") is None, reason="no envpool")),
    ],
)
def test_every_pipeline_learns(name):
    """Without skill an episode lasts 22 steps; 40 updates of 2048 steps each at least triple that."""
    lengths = trained(name)
    assert lengths[-1] > 66


def test_the_pipelines_table():
    rows = [
        {"repeat": repeat, "num_envs": 256, "loop": name, "steps_per_s": rate, "steps_per_cpu_s": rate / 2}
        for name, rates in (("rayagi-fused", (300.0, 400.0)), ("purejax", (100.0, 200.0)))
        for repeat, rate in enumerate(rates)
    ] + [{"repeat": 0, "num_envs": 256, "loop": "envpool", "failed": "no envpool"}]
    text = pipeline.table(rows)
    assert (
        "| 256 | purejax | 150 (100 - 200) | 2.50 (2.00 - 3.00) | 75 (50 - 100) | 2.50 (2.00 - 3.00) |"
        in text
    )
    assert "- envpool, N = 256, failed: no envpool" in text
