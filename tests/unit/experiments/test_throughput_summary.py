"""What the throughput experiment says of its rows, and what it counts of a machine."""

import sys

import pytest

from experiments import cores
from experiments.throughput.run import PEERS, cases_of, compare, peer_cases, summarise
from experiments.throughput.watch import run_watched


def row(repeat, case, **values):
    return {"repeat": repeat, "case": case, **values}


def test_ratios_are_within_a_repeat_and_the_limit_counts_what_the_host_left():
    rows = [
        row(0, "rayagi-2x1", steps_per_s=4000.0, stolen_cores=0.1, startup_s=7.0, memory_mib=900),
        row(0, "rayagi-1x2", steps_per_s=4000.0),
        row(0, "limit", limit_steps_per_s=5000.0),
        row(1, "rayagi-1x2", steps_per_s=5000.0),
        row(1, "rayagi-2x1", steps_per_s=3000.0, stolen_cores=0.4, startup_s=8.0, memory_mib=1000),
        row(1, "limit", limit_steps_per_s=5000.0),
    ]
    text = summarise(rows)
    assert "| limit | 2 | 5000 | 5000 - 5000 | - | - | 0.90 (0.80 - 1.00) | 0.70 (0.60 - 0.80) |" in text
    assert "| rayagi-2x1 | 2 | 3500 | 3000 - 4000 | 7.5 | 950 | " in text
    # 0.1 and 0.4 of two cores: 4000 / (5000 * 0.95) = 0.842, 3000 / (5000 * 0.8) = 0.75
    assert (
        "While rayagi-2x1 trained, the host kept 5.0%, 20.0% of the cores' time: of the limit with what was left, "
        "0.80 (0.75 - 0.84)." in text
    )


def test_without_the_limit_nothing_is_said_of_it():
    text = summarise([row(0, "rayagi-2x1", steps_per_s=4000.0, stolen_cores=0.1)])
    assert "the host kept" not in text


def test_tasks_are_compared_with_the_fastest_peer_of_each_repeat():
    def rows(repeat, task, **rates):
        return [row(repeat, name, task=task, steps_per_s=rate) for name, rate in rates.items()]

    text = compare(
        [
            *rows(0, "Ant-v5", **{"rayagi-2x1": 30.0, "rayagi-1x2": 20.0, "sf-async": 10.0, "cleanrl": 15.0}),
            *rows(1, "Ant-v5", **{"rayagi-2x1": 40.0, "sf-async": 20.0, "cleanrl": 15.0, "rllib": 5.0}),
            *rows(0, "Hopper-v5", **{"rayagi-2x1": 30.0, "limit": 99.0}),
            row(0, "pufferlib", task="Hopper-v5", failed="no room"),
        ]
    ).splitlines()
    # Of the peers those that ran.
    assert text[0].startswith("| task | rayagi-1x2 | rayagi-2x1 | sf-async | pufferlib | cleanrl | rllib | ")
    # 30 / 15 and 40 / 20; 20 / 15
    assert text[2] == "| Ant-v5 | 20 | 35 | 15 | - | 15 | 5 | 1.33 (1.33 - 1.33) | 2.00 (2.00 - 2.00) |"
    assert text[3] == "| Hopper-v5 | - | 30 | - | - | - | - | - | - |"  # two of ours, four peers, two ratios


def test_peers_run_in_their_virtual_environments(tmp_path):
    with pytest.raises(SystemExit, match=r"no virtual environment sf; experiments/peers/setup\.sh"):
        peer_cases(tmp_path, "Hopper-v5", 8.0)
    for env in {env for env, _ in PEERS.values()}:
        (tmp_path / env / "bin").mkdir(parents=True)
        (tmp_path / env / "bin" / "python").touch()
    (case,) = cases_of("Hopper-v5", tmp_path, 8.0, ["cleanrl", "limit"])
    python = str(tmp_path / "base" / "bin" / "python")
    assert case.command == (
        python,
        "-m",
        "experiments.peers.run_cleanrl",
        "--task",
        "Hopper-v5",
        "--seconds",
        "8.0",
    )
    with pytest.raises(SystemExit, match="--cases rlib: none of rayagi-2x1"):
        cases_of("Hopper-v5", None, 8.0, ["rlib"])
    # RLlib is where rayagi is; the peers are compared without it, as nobody asked for it.
    (case,) = cases_of("Hopper-v5", None, 8.0, ["rllib"])
    assert case.command[:3] == (sys.executable, "-m", "experiments.peers.run_rllib")
    assert "rllib" not in {case.name for case in cases_of("Hopper-v5", tmp_path, 8.0, None)}


def test_a_command_s_own_time_is_distinguished_from_others():
    busy = "import time; data = bytes(300 * 2**20).replace(b'\\0', b'1'); until = time.process_time() + 4.0\n"
    busy += "while time.process_time() < until: pass\nprint('done')"
    watched = run_watched([sys.executable, "-c", busy], timeout_s=60)
    assert watched.output == "done\n"
    assert 0 < watched.own_cores <= 1.05
    assert 300 < watched.memory_mib < 700  # MiB: the bytes, and Python


def test_what_the_host_took_is_neither_busy_nor_idle(monkeypatch):
    # user, nice, system, idle, iowait, irq, softirq, steal
    monkeypatch.setattr(cores, "_ticks", lambda: [100, 1, 20, 1000, 5, 3, 4, 60])
    assert cores.used_seconds() == (100 + 1 + 20 + 3 + 4) / cores.TICKS_PER_S
    assert cores.stolen_seconds() == 60 / cores.TICKS_PER_S
    assert cores.not_idle_seconds() == 188 / cores.TICKS_PER_S
    assert cores.all_seconds() == 1193 / cores.TICKS_PER_S
