"""The commands as a user types them, on a real Ray and real physics."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rayagi.cli import main
from rayagi.coordinator.cluster import connected
from rayagi.run.checkpoints import CheckpointStore
from rayagi.run.csv_log import read_rows

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("default_signals")]

TASK = "InvertedPendulum-v5"
OWN_TASK = "rayagi/Ant-v0"
SMALL = ["--gmis", "1", "--num-envs", "8", "--set", "ppo.rollout_length=16", "--set", "ppo.num_minibatches=2"]
TIMEOUT_S = 180


@pytest.fixture
def environment():
    """This process's variables, without a cluster that happens to run."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return kept | {"PYTHONPATH": str(Path(__file__).parents[2])}


def start(folder, environment, *arguments, group=False):
    return subprocess.Popen(
        [sys.executable, "-m", "rayagi", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=group,
    )


def rayagi(folder, environment, *arguments):
    process = start(folder, environment, *arguments)
    try:
        output, error = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, error = process.communicate()
        raise AssertionError(f"rayagi {arguments} hangs:\n{output}\n{error}") from None
    return process.returncode, output, error


def read_until(process, pattern):
    """The output up to the first line that matches."""
    output = ""
    for text in process.stdout:
        output += text
        if re.search(pattern, text):
            return output
    raise AssertionError(f"it ended before it printed {pattern}:\n{output}")


def end_group(process):
    """Kill what a failed test would leave, Ray's processes included."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def processes_of(mark):
    """Ids of the processes that have it in their environment, as every child of a marked one has."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in environ.read_bytes():
                yield int(environ.parent.name)


def open_files(pids):
    """Paths outside Ray's own folder that the processes hold open or have mapped, sockets included."""
    sockets = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, *fields = line.split(maxsplit=7)
        if len(fields) == 7:
            sockets[f"socket:[{fields[5]}]"] = fields[6]
    found = set()
    for pid in pids:
        for link in (*Path(f"/proc/{pid}/fd").glob("*"), *Path(f"/proc/{pid}/map_files").glob("*")):
            with suppress(OSError):
                name = os.readlink(link)
                found.add(sockets.get(name, name))
    places = (Path(__file__).parents[2], sys.prefix, sys.base_prefix)  # they may be in /tmp, too
    installed = tuple(os.path.realpath(place) for place in places)
    return {
        name
        for name in found
        if name.startswith(("/tmp/", "/dev/shm/"))
        and not name.startswith(installed)
        and "/ray/session" not in name
    }


def nothing_remains(mark, held, run):
    """Wait for the end of the processes; check that no temporary or half-written file remains."""
    until = time.monotonic() + TIMEOUT_S
    while left := list(processes_of(mark)):
        assert time.monotonic() < until, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
        time.sleep(0.05)
    remaining = {name for name in held if Path(name).exists()}
    assert not {name for name in remaining if not name.startswith(str(run))}
    unfinished = [
        path for path in run.rglob("*") if path.suffix == ".tmp" or path.name.startswith(".iteration")
    ]
    assert unfinished == []


def test_a_run_is_interrupted_leaves_nothing_behind_is_resumed_evaluated_and_reported(tmp_path, environment):
    mark = f"RAYAGI_TEST={tmp_path}"
    marked = environment | dict([mark.split("=")])
    gmis = ["--gmis", str(min(2, len(os.sched_getaffinity(0))))]
    process = start(tmp_path, marked, "train", TASK, *SMALL, *gmis, "--time", "10m", "--name", "a")
    read_until(process, r"^iteration \d+")
    assert len(list(processes_of(mark))) >= 4  # the command, Ray's server and raylet, and a GMI
    held = open_files(processes_of(mark))
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, error) == (130, "")
    assert "rayagi train --resume runs/a" in output
    nothing_remains(mark, held, tmp_path / "runs/a")
    first = read_rows(tmp_path / "runs/a/progress.csv")

    target = int(first[-1]["iteration"]) + 20
    code, output, error = rayagi(
        tmp_path,
        environment,
        "train",
        "--resume",
        "runs/a",
        "--iterations",
        str(target),
        "--evaluate-every",
        "10",
    )
    assert code == 0, error
    rows = read_rows(tmp_path / "runs/a/progress.csv")
    assert rows[: len(first)] == first
    assert [row["iteration"] for row in rows] == list(range(1, target + 1))
    assert [row["env_steps_total"] for row in rows] == [int(gmis[1]) * 128 * i for i in range(1, target + 1)]
    assert json.loads((tmp_path / "runs/a/run.json").read_text())["status"] == "finished"

    code, output, error = rayagi(tmp_path, environment, "evaluate", "runs/a", "--episodes", "3")
    assert code == 0, error
    assert re.search(r"return [\d.,]+ \+- [\d.,]+ over 3 episodes", output)
    code, output, error = rayagi(tmp_path, environment, "report", "runs/a")
    assert code == 0, error
    assert (tmp_path / "runs/a/report.html").exists()


@pytest.mark.slow
def test_a_resumed_run_learns_exactly_what_an_uninterrupted_one_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    small = ["train", OWN_TASK, *SMALL]
    with connected():  # one Ray for the three: what they learn does not depend on who started it
        assert main([*small, "--iterations", "12", "--name", "whole"]) == 0
        assert main([*small, "--iterations", "7", "--name", "parts"]) == 0
        assert main(["train", "--resume", "runs/parts", "--iterations", "12"]) == 0
    measured = (
        "policy_loss",
        "value_loss",
        "grad_norm",
        "episode_return_mean",
        "action_std",
        "episodes_total",
    )
    curves = [
        [[row.get(name) for name in measured] for row in read_rows(tmp_path / "runs" / name / "progress.csv")]
        for name in ("whole", "parts")
    ]
    assert len(curves[0]) == 12
    assert curves[0] == curves[1]


def test_an_unreachable_cluster_is_said_at_once(tmp_path, environment):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        code, _, error = rayagi(tmp_path, environment | {"RAY_ADDRESS": address}, "train", TASK, *SMALL)
    assert code == 2
    assert f"no Ray cluster answers at {address}" in error
    assert "unset RAY_ADDRESS" in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("runs/*"))


def test_more_gmis_than_cores_are_refused_before_anything_starts(tmp_path, environment):
    code, _, error = rayagi(tmp_path, environment, "train", TASK, "--gmis", "4096")
    assert code == 2
    assert "num_gmis=4096" in error


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_search_that_a_signal_ends_says_that_its_measurements_are_kept(tmp_path, environment, number):
    process = start(tmp_path, environment, "search", TASK, "--cache", "cache", "--gmis", "1", group=True)
    try:
        read_until(process, "measuring 1 x")
        process.send_signal(number)
        _, error = process.communicate(timeout=TIMEOUT_S)
    finally:
        end_group(process)
    assert process.returncode == 130
    assert error.splitlines() == [
        "rayagi: stopped at once",
        "All measurements are kept: the same command continues from there.",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_terminal_or_pipe_that_goes_away_loses_nothing(tmp_path, environment, number):
    # As a terminal and `timeout` do: the signal goes to the whole group, and nobody reads any more.
    process = start(tmp_path, environment, "train", TASK, *SMALL, "--time", "10m", "--name", "a", group=True)
    for line in process.stdout:
        if line.startswith("iteration"):
            break
    process.stdout.close()
    process.stderr.close()
    os.killpg(process.pid, number)
    try:
        assert process.wait(timeout=TIMEOUT_S) == 130
    finally:
        end_group(process)
    record = json.loads((tmp_path / "runs/a/run.json").read_text())
    assert record["status"] == "interrupted"
    last = CheckpointStore(tmp_path / "runs/a/checkpoints").load()
    assert last.counters["iteration"] == record["counters"]["iteration"] > 0
    assert (tmp_path / "runs/a/report.html").exists()


@pytest.mark.slow
def test_under_nohup_in_the_background_ctrl_c_and_a_hangup_are_not_for_it_and_sigterm_saves(
    tmp_path, environment
):
    run = [sys.executable, "-m", "rayagi", "train", TASK, *SMALL, "--time", "10m", "--name", "a"]
    # A shell without job control ignores SIGINT for what it starts with &.
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'nohup "$@" & echo $!; wait $!', "sh", *run],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        pid = int(process.stdout.readline())
        output = read_until(process, r"^iteration \d+")
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGHUP)
        output += read_until(process, r"^iteration \d+")
        assert "Finishing" not in output
        os.kill(pid, signal.SIGTERM)
        output += process.communicate(timeout=TIMEOUT_S)[0]
        assert process.returncode == 130, output
    finally:
        end_group(process)
    record = json.loads((tmp_path / "runs/a/run.json").read_text())
    assert (record["status"], record["reason"]) == ("interrupted", "SIGTERM")
    last = CheckpointStore(tmp_path / "runs/a/checkpoints").load()
    assert last.counters["iteration"] == record["counters"]["iteration"] > 0


HANGING = """
import time
from pathlib import Path

import gymnasium
import numpy as np


class Hanging(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        while Path("hang").exists():
            time.sleep(60)
        return np.zeros(3, np.float32), -float(action @ action), False, self.steps % 20 == 0, {}


gymnasium.register("Hanging-v0", entry_point="hanging:Hanging")
"""


@pytest.mark.slow
def test_sigterm_ends_a_run_whose_environments_hang_says_where_and_leaves_nothing(tmp_path, environment):
    (tmp_path / "hanging.py").write_text(HANGING)
    line = 1 + HANGING.splitlines().index("            time.sleep(60)")
    mark = f"RAYAGI_TEST={tmp_path}"
    marked = environment | dict([mark.split("=")])
    options = ["--time", "10m", "--checkpoint-every", "5", "--name", "a"]
    process = start(tmp_path, marked, "train", "hanging:Hanging-v0", *SMALL, *options)
    checkpoints = CheckpointStore(tmp_path / "runs/a/checkpoints")
    while not checkpoints.names():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    held = open_files(processes_of(mark))
    (tmp_path / "hang").touch()
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    first, *notes = error.splitlines()
    assert re.fullmatch(r"rayagi: stopped: SIGTERM, and no answer of the GMIs for \d+ s", first)
    last = checkpoints.load()
    assert re.fullmatch(rf"GMI 0/1 .* is still at {tmp_path}/hanging\.py:{line} in step\.", notes[0])
    assert notes[1:] == [
        f"The last good checkpoint is {last.name}. Continue from it with:",
        "  rayagi train --resume runs/a",
    ]
    nothing_remains(mark, held, tmp_path / "runs/a")
