"""``rayagi comm bench`` with real processes, small and short."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from collectives.profile import CostProfile
from rayagi.cli import comm_bench, main


def is_gone(group, limit_s=20.0):
    """Whether every process of the group ends: multiprocessing's own helpers do so just after their parent."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def run_cli(*arguments):
    """The exit code; argparse leaves by SystemExit."""
    try:
        return main(["comm", *arguments])
    except SystemExit as left:
        return left.code


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """One short benchmark: what it printed, and its folder."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "rayagi", "comm", "bench", "--layouts", "2x1", "1x2+1"]
    command += ["--sizes", "4kB", "40kB", "--time", "1s", "--repeats", "2", "--out", str(folder / "out")]
    command += ["--profile-out", str(folder / "machines" / "this.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def test_it_prints_measurements_beside_both_models_and_writes_all_of_it(bench):
    output, folder = bench
    for layout in ("2x1: 2 processes", "2+1: 3 processes"):
        assert layout in output
    assert re.search(r"^\*? +4,000  ip_only +1 ", output, re.MULTILINE)
    content = json.loads((folder / "out" / "results.json").read_text())
    assert [part["layout"] for part in content["layouts"]] == ["2x1", "2+1"]
    assert {row["composition"] for row in content["rows"] if row["layout"] == "2x1"} == {"ip_only", "rp_only"}
    for row in content["rows"]:
        assert len(row["repeats_s"]) == 2
        assert min(row["median_s"], row["paper_s"], row["model_s"]) > 0
    assert "ip by SharedMemoryTransport" in content["layouts"][0]["transports"]["ip_only"]
    assert (folder / "out" / "cost_model.png").read_bytes().startswith(b"\x89PNG")


def test_its_profile_is_what_comm_plan_reads(bench, capsys):
    _, folder = bench
    profile = folder / "machines" / "this.json"
    assert {point.nbytes for point in CostProfile.load(profile).points} == {4000, 4096, 40_000}
    assert not (folder / "out" / "profile.json").exists()
    assert run_cli("plan", "--layout", "2x1", "--size", "40kB", "--profile", str(profile)) == 0
    assert "alpha-beta: measured on" in capsys.readouterr().out


@pytest.fixture
def measuring(tmp_path):
    """A long benchmark that has measured its profile; its folder is ``tmp_path``."""
    command = [sys.executable, "-m", "rayagi", "comm", "bench", "--layouts", "2x1", "--sizes", "4kB", "40kB"]
    command += ["--time", "1s", "--repeats", "1M", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    limit = threading.Timer(90, process.kill)
    limit.start()
    for line in process.stderr:
        # The profile comes first, and a million repeats take hours.
        if (found := re.match(r"(\d+) of", line)) and int(found[1]) >= 20:
            break
    yield process
    limit.cancel()
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
@pytest.mark.usefixtures("default_signals")
def test_a_signal_keeps_what_was_measured_and_leaves_no_process(measuring, tmp_path, number, name):
    os.killpg(measuring.pid, number)  # as a terminal and `timeout` do: to all of them
    _, error = measuring.communicate(timeout=60)
    assert measuring.returncode == 130, error
    assert f"stopped early by {name}" in error
    assert CostProfile.load(tmp_path / "profile.json").points
    assert json.loads((tmp_path / "results.json").read_text())["rows"]
    assert is_gone(measuring.pid)


@pytest.mark.slow
def test_a_member_that_is_killed_costs_no_measurement_before(measuring, tmp_path):
    # Members are the processes that were started last.
    group = subprocess.run(["pgrep", "-g", str(measuring.pid)], capture_output=True, text=True, check=True)
    os.kill(max(map(int, group.stdout.split())), signal.SIGKILL)
    _, error = measuring.communicate(timeout=60)
    assert measuring.returncode == 1, error
    assert re.search(
        r"rayagi: rank 1 was asked to .* and its process ended with exit code .*\nThe measurements before",
        error,
    )
    assert CostProfile.load(tmp_path / "profile.json").points
    assert json.loads((tmp_path / "results.json").read_text())["rows"]
    assert is_gone(measuring.pid)


@pytest.mark.slow
def test_a_benchmark_that_is_killed_leaves_no_process(measuring):
    measuring.kill()
    measuring.communicate(timeout=60)
    assert is_gone(measuring.pid)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--layouts", "99x9"), "891 processes on"),
        (("--layouts", "99x9"), "`rayagi comm plan --layout 99x9`"),
        (("--layouts", "1x1"), "a single GMI has nothing to reduce"),
        (("--layouts", "4y3"), "'4y3' is not a number of GMIs"),
        (("--compositions", "ip_onyl"), "there is no such composition; there are ip_only, rp_only"),
        (("--layouts", "1x3", "--compositions", "rp_only"), "rp_only on 1x3: m = 3 rings need a ring across"),
        (("--sizes", "441000001B", "--layouts", "2x1"), "float32 elements take 4 bytes each"),
        (("--sizes", "900GB", "--layouts", "2x1"), "more than half of this machine's memory"),
        (("--sizes", "much"), "'much' is not a positive number of bytes"),
        (("--time", "0s"), "not a positive duration"),
        (("--out", "/proc/none"), "cannot write /proc/none"),
        (("--layouts", "2x1", "--profile-out", "/"), "/ is a folder, and a file is written there"),
    ],
)
def test_bad_input_gets_one_message_and_exit_code_2(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_cli("bench", *arguments) == (1 if "--out" in arguments else 2)
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_only_a_folder_that_it_made_is_removed_if_nothing_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(comm_bench, "_measured", lambda *given: "Ctrl-C")
    (tmp_path / "own").mkdir()
    for name in ("own", "new"):
        assert run_cli("bench", "--layouts", "2x1", "--out", str(tmp_path / name)) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_help_teaches_what_is_measured(capsys):
    assert run_cli("bench", "--help") == 0
    text = capsys.readouterr().out
    for said in (
        "--profile-out",
        "Ctrl-C ends the benchmark early",
        "(measured - projected) / projected",
        "nominal",
    ):
        assert said in text
