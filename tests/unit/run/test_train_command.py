"""`rayagi train` with a fake session; tests/cluster/test_cli.py has the real one."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import gymnasium
import pytest
import torch
from fake_training_session import FakeClock, FakeSession
from gymnasium.envs.registration import EnvSpec

import rayagi.cli.train as train
from actors.errors import GmiLostError, NonFiniteError
from placement.inventory import local_machine
from placement.plan import make_plan
from placement.types import Machine, Node
from rayagi.algorithms.offline_data import other_task
from rayagi.cli import main
from rayagi.envs import SimulationError, env_info
from rayagi.monitoring import report
from rayagi.profiler.trace import read_profile
from rayagi.run import training_loop
from rayagi.run.checkpoints import CheckpointStore
from rayagi.run.csv_log import read_rows
from rayagi.run.folder import open_run
from rayagi.run.training_loop import TrainingLoop
from rayagi.serving.column_layout import ColumnLayout
from rayagi.serving.manifest import UNNAMED_TASK, DatasetFolder, Description
from tests.programs import run_python

TASK = "InvertedPendulum-v5"
pytestmark = pytest.mark.usefixtures("default_signals")
CLOCK = FakeClock()
Loop = partial(TrainingLoop, clock=CLOCK)
"""By the real clock, a request of a second would be thousands of iterations that take no time."""


class FakeOpenSession(FakeSession):
    """The fake session, with the arguments of the command."""

    events: ClassVar = {}
    swell = staticmethod(lambda session: None)
    """What an iteration of this session measures instead of the usual."""

    def __init__(self, spec, *, log, run_name, on_plan, dashboard):
        super().__init__(CLOCK, iteration_s=0.1, events=dict(type(self).events))
        self.plan = make_plan(local_machine(), num_envs=spec.gmi.num_envs, num_gmis=spec.gmi.num_gmis)
        self._on_plan = on_plan

    def __enter__(self):
        self._on_plan(self.plan)
        return self

    def __exit__(self, *error):
        return None

    def collect(self):
        results = super().collect()
        for result in results:
            result.metrics.update(type(self).swell(self) or {})
        self.collected = (tuple(results),) * self.plan.num_gmis
        return results

    def state_dict(self):
        return super().state_dict() | {"num_gmis": self.plan.num_gmis}

    def load_state_dict(self, state):
        super().load_state_dict({"local": [state["shared"]], **state})

    def close(self):
        pass


@pytest.fixture
def fake_with_plots(monkeypatch, tmp_path):
    session = type("Session", (FakeOpenSession,), {"events": {}})
    monkeypatch.setattr(train, "session_of", session)
    monkeypatch.setattr(train, "TrainingLoop", Loop)
    monkeypatch.chdir(tmp_path)
    return session


@pytest.fixture
def fake(fake_with_plots, monkeypatch):
    """Reports without their plots, which take most of the time of a run here."""
    monkeypatch.setattr(report, "save_plots", lambda *given: None)
    monkeypatch.setattr(report, "_PLOTS", ())
    return fake_with_plots


def only_run(out="runs"):
    (path,) = Path(out).iterdir()
    return path


def rayagi(*arguments):
    return main(["train", *arguments])


def test_a_run_leaves_everything_that_it_promises(fake_with_plots, capsys):
    assert rayagi(TASK, "--iterations", "30", "--evaluate-every", "10", "--seed", "5") == 0
    run = only_run()
    wanted = {
        "config.yaml",
        "plan.txt",
        "plan.json",
        "versions.json",
        "run.json",
        "progress.csv",
        "evaluations.csv",
    }
    wanted |= {
        "tensorboard",
        "checkpoints",
        "report.html",
        "learning_curve.png",
        "throughput.png",
        "time_split.png",
    }
    assert wanted <= {entry.name for entry in run.iterdir()}
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], record["seed"], record["counters"]["iteration"]) == ("finished", 5, 30)
    assert len(read_rows(run / "progress.csv")) == 30
    assert [row["evaluation_return_mean"] for row in read_rows(run / "evaluations.csv")] == [100, 200, 300]
    page = (run / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert 'src="http' not in page
    output = capsys.readouterr().out
    assert "Ends after 30 iterations." in output
    assert f"rayagi evaluate runs/{run.name}" in output


def test_a_run_in_a_job_s_working_directory_says_that_it_may_be_deleted(fake, capsys, tmp_path, monkeypatch):
    job = tmp_path / "session_1/runtime_resources/working_dir_files/_ray_pkg_1"
    job.mkdir(parents=True)
    monkeypatch.chdir(job)
    assert rayagi(TASK, "--iterations", "1", "--name", "a") == 0
    said = "which Ray may delete after the job: give --out with a folder that stays."
    assert f"runs/a is in the job's copy of its working directory, {said}" in capsys.readouterr().out
    assert rayagi(TASK, "--iterations", "1", "--out", str(tmp_path)) == 0
    assert said not in capsys.readouterr().out


def test_notices_are_printed_stored_and_with_replan_acted_on(fake, capsys):
    def swell(session):
        if session.plan.num_envs > 16:
            return {"resident_bytes": 0.95 * session.plan.memory_bytes(0)}
        return None

    fake.swell = staticmethod(swell)
    limits = ("--iterations", "90", "--checkpoint-every", "30", "--gmis", "1", "--num-envs", "32")
    assert rayagi(TASK, *limits, "--name", "proposed") == 0
    output = capsys.readouterr().out
    assert "GMI 0 holds" in output
    assert "start with --replan" in output
    assert "Continuing" not in output
    assert "start with --replan" in Path("runs/proposed/notices.log").read_text()
    assert open_run(Path("runs/proposed")).read_config()["gmi"]["num_envs"] == 32

    assert rayagi(TASK, *limits, "--name", "acted", "--replan") == 0
    output = capsys.readouterr().out
    assert "At the next checkpoint the run continues with 16 environments in each GMI." in output
    assert "1 GMI and 16 environments in total instead of 32: the batch is 0.5 times as large" in output
    assert len(Path("runs/acted/notices.log").read_text().splitlines()) == 2
    run = open_run(Path("runs/acted"))
    assert run.read_config()["gmi"]["num_envs"] == 16
    assert json.loads((run.path / "plan.json").read_text())["num_envs"] == 16
    assert len(read_rows(run.progress_csv)) == 90
    assert rayagi("--resume", "runs/acted", "--iterations", "100") == 0


def test_without_a_limit_the_run_takes_ten_minutes_with_a_message(fake, capsys):
    fake.events = {3: KeyboardInterrupt()}
    assert rayagi(TASK) == 130
    assert "Ends after 10 min of training." in capsys.readouterr().out


def test_a_resumed_run_has_each_iteration_once_and_continues(fake, capsys):
    assert rayagi(TASK, "--iterations", "20", "--name", "a", "--checkpoint-every", "5") == 0
    # A crash after the checkpoint: rows of iterations that no checkpoint holds.
    with Path("runs/a/progress.csv").open("a") as file:
        line = Path("runs/a/progress.csv").read_text().splitlines()[-1]
        file.write(f"21{line[2:]}\n22{line[2:]}\n")
    assert rayagi("--resume", "runs/a", "--iterations", "40") == 0
    rows = read_rows(Path("runs/a/progress.csv"))
    assert [row["iteration"] for row in rows] == list(range(1, 41))
    assert [row["env_steps_total"] for row in rows] == [64 * i for i in range(1, 41)]
    assert rows[-1]["episodes_total"] == 40
    assert "at iteration 20 in runs/a" in capsys.readouterr().out


class Resized(gymnasium.Env):
    """Its sizes change between runs."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (self.obs_dim,))
        self.action_space = gymnasium.spaces.Box(-self.most, self.most, (2,))

    obs_dim, most = 3, 1.0


@pytest.mark.parametrize(
    ("changed", "value", "difference"),
    [
        ("obs_dim", 4, "an observation had 3 numbers and has 4"),
        ("most", 5.0, "actions were 2 reals in [-1, 1] and are 2 reals in [-5, 5]"),
    ],
)
def test_a_run_whose_environment_was_changed_is_not_resumed(
    fake, capsys, monkeypatch, changed, value, difference
):
    monkeypatch.setitem(gymnasium.registry, "Resized-v0", EnvSpec("Resized-v0", entry_point=Resized))
    assert rayagi("Resized-v0", "--iterations", "5", "--name", "a") == 0
    before = Path("runs/a/run.json").read_text()
    monkeypatch.setattr(Resized, changed, value)
    monkeypatch.setattr(train, "session_of", None)  # refused before Ray starts
    capsys.readouterr()
    assert rayagi("--resume", "runs/a", "--iterations", "9") == 2
    error = capsys.readouterr().err
    assert difference in error
    assert "rayagi train --resume" not in error
    assert Path("runs/a/run.json").read_text() == before


@pytest.mark.parametrize("set_back_s", [0.0, 86400.0])
def test_tensorboard_reads_one_curve_from_a_resumed_run(fake, monkeypatch, set_back_s):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert rayagi(TASK, "--iterations", "20", "--name", "a", "--checkpoint-every", "8") == 0
    CheckpointStore(Path("runs/a/checkpoints")).rewind(16)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - set_back_s)
    assert rayagi("--resume", "runs/a", "--iterations", "30") == 0
    events = EventAccumulator(str(Path("runs/a/tensorboard")))
    events.Reload()
    steps = [event.step for event in events.Scalars("progress/episode_return_mean")]
    assert steps == [64 * i for i in range(1, 31)]


def test_a_truncated_checkpoint_falls_back_to_the_one_before_with_a_message(fake, capsys):
    assert rayagi(TASK, "--iterations", "20", "--name", "a", "--checkpoint-every", "8") == 0
    damaged = Path("runs/a/checkpoints/iteration_000020/shared.pt")
    os.truncate(damaged, 100)
    assert rayagi("--resume", "runs/a", "--iterations", "30") == 0
    output = capsys.readouterr().out
    assert "iteration_000020 is damaged: shared.pt has 100 bytes" in output
    assert "continuing from iteration_000016" in output
    assert [row["iteration"] for row in read_rows(Path("runs/a/progress.csv"))] == list(range(1, 31))


@pytest.mark.parametrize(
    "command", [["train", "--resume", "runs/a", "--iterations", "9"], ["report", "runs/a"]]
)
def test_a_bad_cell_is_said_in_one_sentence_and_changes_nothing(fake, capsys, command):
    assert rayagi(TASK, "--iterations", "3", "--name", "a") == 0
    table, record = Path("runs/a/progress.csv"), Path("runs/a/run.json").read_text()
    table.write_text(table.read_text().replace("\n2,128,", "\n2,12 8,"))
    capsys.readouterr()
    assert main(command) == 2
    assert capsys.readouterr().err == (
        "rayagi: runs/a/progress.csv, line 3, column env_steps_total: '12 8' is not a finite number; "
        "correct the cell, or delete the line\n"
    )
    assert Path("runs/a/run.json").read_text() == record


def test_a_run_that_reached_its_limit_asks_for_a_larger_one(fake, capsys):
    assert rayagi(TASK, "--iterations", "5", "--name", "a") == 0
    assert rayagi("--resume", "runs/a") == 2
    assert "has already reached its limit (5 iterations)" in capsys.readouterr().err
    assert json.loads(Path("runs/a/run.json").read_text())["status"] == "finished"


def test_what_is_typed_on_a_resume_replaces_the_limit_that_was(fake, capsys):
    assert rayagi(TASK, "--env-steps", "320", "--name", "a") == 0
    assert rayagi("--resume", "runs/a", "--env-steps", "640") == 0
    assert read_rows(Path("runs/a/progress.csv"))[-1]["env_steps_total"] == 640
    assert rayagi("--resume", "runs/a") == 2
    # The advice is a command that works.
    (advice,) = re.findall(r"rayagi train (--resume runs/a --time 1h)", capsys.readouterr().err)
    fake.events = {25: lambda: os.kill(os.getpid(), signal.SIGINT)}
    assert rayagi(*advice.split()) == 130
    assert "Ends after 1 h of training." in capsys.readouterr().out


def test_the_end_of_a_falling_learning_rate_cannot_be_moved(fake, capsys):
    linear = ["--set", "ppo.lr_schedule=linear", "--env-steps", "640"]
    assert rayagi(TASK, *linear, "--iterations", "5", "--name", "a") == 0
    assert rayagi("--resume", "runs/a", "--env-steps", "1280") == 2
    assert "the learning rate of this run falls to zero over 640 steps" in capsys.readouterr().err
    assert rayagi("--resume", "runs/a", "--time", "1h") == 0
    assert read_rows(Path("runs/a/progress.csv"))[-1]["env_steps_total"] == 640
    capsys.readouterr()
    assert rayagi("--resume", "runs/a", "--time", "2h") == 2
    assert "Its learning rate has fallen to zero there" in capsys.readouterr().err


def machine_of(num_cores):
    node = Node(name="a", cores=tuple(range(num_cores)), memory_total_bytes=2**30)
    return lambda: Machine(nodes=(node,), origin="local")


def test_a_resumed_run_keeps_its_number_of_gmis_on_another_machine(fake, capsys, monkeypatch):
    this_module = sys.modules[__name__]
    monkeypatch.setattr(this_module, "local_machine", machine_of(2))
    assert rayagi(TASK, "--iterations", "5", "--name", "a") == 0
    monkeypatch.setattr(this_module, "local_machine", machine_of(4))
    assert rayagi("--resume", "runs/a", "--iterations", "9") == 0
    assert len(json.loads(Path("runs/a/plan.json").read_text())["slices"]) == 2
    monkeypatch.setattr(this_module, "local_machine", machine_of(1))
    capsys.readouterr()
    assert rayagi("--resume", "runs/a", "--iterations", "19") == 2
    error = capsys.readouterr().err
    assert "num_gmis=2" in error
    assert "rayagi train InvertedPendulum-v5 --config runs/a/config.yaml --gmis N" in error
    record = json.loads(Path("runs/a/run.json").read_text())
    assert (record["status"], record["limits"]["iterations"]) == ("finished", 9)


def test_a_run_that_cannot_be_begun_with_leaves_no_folder(fake, capsys):
    assert rayagi(TASK, "--init", "runs/none") == 2
    assert "runs/none: there is no such run folder" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_with_the_same_networks(fake, monkeypatch):
    given = []

    def state_of(run, spec, *, trust_modules):
        given.append(str(run))
        return {"iteration": 0, "learner": {"weights": torch.full((3,), 7.0)}}

    monkeypatch.setattr(train, "initial_state_from", state_of)
    assert rayagi(TASK, "--iterations", "1", "--name", "old") == 0
    assert rayagi(TASK, "--init", "runs/old", "--iterations", "5", "--name", "a") == 0
    assert given == ["runs/old"]
    shutil.rmtree("runs/a/checkpoints")
    Path("runs/a/checkpoints").mkdir()
    assert rayagi("--resume", "runs/a", "--iterations", "6") == 0
    assert given == ["runs/old", str(Path("runs/old").absolute())]
    # With a checkpoint the other run is not read
    assert rayagi("--resume", "runs/a", "--iterations", "7") == 0
    assert len(given) == 2


def test_what_a_resumed_run_learns_cannot_be_changed(fake, capsys):
    assert rayagi(TASK, "--iterations", "5", "--name", "a") == 0
    assert rayagi("--resume", "runs/a", "--gmis", "1", "--set", "ppo.gamma=0.9") == 2
    assert "--gmis, --set cannot change on --resume" in capsys.readouterr().err
    assert rayagi("--resume", "runs/a", "--init", "runs/a") == 2
    assert "--init cannot change on --resume" in capsys.readouterr().err
    assert rayagi("--resume", "runs/a", "--seed", "0") == 2
    assert "--seed cannot change on --resume" in capsys.readouterr().err
    assert rayagi("--resume", "runs/a", "--out", "elsewhere") == 2
    assert "--out cannot change on --resume" in capsys.readouterr().err
    assert rayagi("Ant-v5", "--resume", "runs/a") == 2
    assert "is a run of InvertedPendulum-v5, not of Ant-v5" in capsys.readouterr().err


def test_ctrl_c_saves_and_says_how_to_resume(fake, capsys):
    fake.events = {25: lambda: os.kill(os.getpid(), signal.SIGINT)}
    assert rayagi(TASK, "--time", "1h", "--name", "a") == 130
    output = capsys.readouterr().out
    assert "Finishing the current request" in output
    assert "rayagi train --resume runs/a" in output
    record = json.loads(Path("runs/a/run.json").read_text())
    assert record["status"] == "interrupted"
    last = CheckpointStore(Path("runs/a/checkpoints")).load()
    assert last.counters["iteration"] == record["counters"]["iteration"] >= 25
    fake.events = {}
    assert rayagi("--resume", "runs/a", "--iterations", str(record["counters"]["iteration"] + 5)) == 0


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP, as its terminal closed")],
)
def test_sigterm_and_a_closed_terminal_save_too(fake, number, reason):
    fake.events = {25: lambda: os.kill(os.getpid(), number)}
    assert rayagi(TASK, "--time", "1h", "--name", "a") == 130
    assert CheckpointStore(Path("runs/a/checkpoints")).load().counters["iteration"] >= 25
    record = json.loads(Path("runs/a/run.json").read_text())
    assert (record["status"], record["reason"]) == ("interrupted", reason)


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_pipe_whose_reader_left_loses_nothing(tmp_path, number):
    code = """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        import test_train_command as module
        import rayagi.cli.train as train
        from rayagi.cli import main

        def interrupted():
            sys.stdin.readline()  # the reader of our output has left
            os.kill(os.getpid(), int(sys.argv[2]))

        class Session(module.FakeOpenSession):
            events = {25: interrupted}

        train.session_of, train.TrainingLoop = Session, module.Loop
        sys.exit(main(["train", module.TASK, "--time", "1h", "--name", "a"]))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(Path(__file__).parent), str(int(number))],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    process.stdout.readline()
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait(timeout=120) == 130
    assert CheckpointStore(tmp_path / "runs/a/checkpoints").load().counters["iteration"] >= 25
    assert (tmp_path / "runs/a/report.html").exists()
    assert json.loads((tmp_path / "runs/a/run.json").read_text())["status"] == "interrupted"


def test_a_second_ctrl_c_quits_at_once_and_checkpoints_stay(fake, capsys):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    fake.events = {25: twice}
    assert rayagi(TASK, "--time", "1h", "--name", "a", "--checkpoint-every", "10") == 130
    assert CheckpointStore(Path("runs/a/checkpoints")).load().counters["iteration"] == 20
    error = capsys.readouterr().err
    assert "stopped at once" in error
    assert "The last good checkpoint is iteration_000020" in error
    assert "rayagi train --resume runs/a" in error


@pytest.mark.parametrize("phase", ["iteration", "evaluation", "state"])
def test_sigterm_while_an_environment_hangs_ends_the_run_soon_and_says_what_is_saved(
    fake, capsys, monkeypatch, phase
):
    def hang(*given, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        assert not threading.Event().wait(60)

    def hang_in_later(session):
        fake.events = {}
        if phase == "evaluation":
            session.evaluate = hang
        if phase == "state":
            session.state_dict = hang

    fake.swell = staticmethod(lambda session: hang_in_later(session) if session.iteration >= 25 else None)
    if phase == "iteration":
        fake.events = {25: hang}
    monkeypatch.setattr(training_loop, "END_LIMIT_S", -1.7)  # and twice the second of the request before
    monkeypatch.setattr(training_loop, "LONG_END_LIMIT_S", 0.1)
    options = ["--checkpoint-every", "10", "--evaluate-every", "26"]
    assert rayagi(TASK, "--time", "1h", "--name", "a", *options) == 130
    assert CheckpointStore(Path("runs/a/checkpoints")).load().counters["iteration"] == 20
    first, *notes = capsys.readouterr().err.splitlines()
    assert first.startswith("rayagi: stopped: SIGTERM, and no answer of the GMIs for 0 s")
    assert "The last good checkpoint is iteration_000020. Continue from it with:" in notes
    record = json.loads(Path("runs/a/run.json").read_text())
    assert (record["status"], record["reason"]) == ("interrupted", first.removeprefix("rayagi: "))


def test_ctrl_c_while_it_starts_leaves_no_folder_and_says_so(fake, capsys, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "__enter__", interrupted)
    assert rayagi(TASK, "--time", "1h", "--name", "a") == 130
    assert not Path("runs/a").exists()
    assert "no run folder is left" in capsys.readouterr().err


def test_a_second_ctrl_c_in_the_first_iteration_leaves_no_folder(fake):
    fake.events = {1: KeyboardInterrupt()}
    assert rayagi(TASK, "--time", "1h", "--name", "a") == 130
    assert not Path("runs/a").exists()


def test_ctrl_c_while_a_resumed_run_starts_leaves_what_there_is(fake, capsys, monkeypatch):
    assert rayagi(TASK, "--iterations", "5", "--name", "a") == 0

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "__enter__", interrupted)
    assert rayagi("--resume", "runs/a", "--iterations", "9") == 130
    assert CheckpointStore(Path("runs/a/checkpoints")).load().name == "iteration_000005"
    assert "The last good checkpoint is iteration_000005" in capsys.readouterr().err


@pytest.mark.parametrize("signal_s_exception", [KeyboardInterrupt, SystemExit])  # Ctrl-C, SIGTERM
def test_a_signal_while_closing_does_not_lose_the_report(fake, capsys, monkeypatch, signal_s_exception):
    def interrupted(self, *error):
        raise signal_s_exception

    monkeypatch.setattr(fake, "__exit__", interrupted)
    assert rayagi(TASK, "--iterations", "5", "--name", "a") == 0
    assert Path("runs/a/report.html").exists()
    assert json.loads(Path("runs/a/run.json").read_text())["status"] == "finished"


def test_how_a_run_ended_is_recorded_before_ray_ends(fake, monkeypatch):
    """`ray job stop` and batch systems kill what has not ended after some seconds."""
    recorded = []

    def leave(self, *error):
        recorded.append(open_run(Path("runs/a")).record)

    monkeypatch.setattr(fake, "__exit__", leave)
    assert rayagi(TASK, "--iterations", "5", "--name", "a") == 0
    assert [(record.status, record.counters["iteration"]) for record in recorded] == [("finished", 5)]


def test_what_draws_the_report_is_imported_while_the_gmis_and_ray_end(fake, monkeypatch):
    order = []

    @contextmanager
    def noted(module):
        order.append(f"begins to import {module}")
        yield
        order.append("has imported")

    monkeypatch.setattr(train, "import_in_background", noted)
    monkeypatch.setattr(fake, "__exit__", lambda *session_and_error: order.append("closes"))
    assert rayagi(TASK, "--iterations", "1") == 0
    assert order == ["begins to import matplotlib.figure", "closes", "has imported"]


def test_the_address_of_the_dashboard_is_printed(fake, capsys, monkeypatch):
    monkeypatch.setattr(train, "get_dashboard_url", lambda: "127.0.0.1:8265")
    assert rayagi(TASK, "--iterations", "5", "--dashboard") == 0
    assert "Ray's dashboard: http://127.0.0.1:8265" in capsys.readouterr().out


def test_a_killed_run_is_not_reported_as_running(fake, capsys):
    assert rayagi(TASK, "--iterations", "5", "--name", "a") == 0
    # After SIGKILL the status is the last one written, and the lock is released.
    folder = open_run(Path("runs/a"))
    folder.update(status="running", reason="")
    assert main(["report", "runs/a"]) == 0
    assert re.search(
        r"status  killed, or ended by a full disk; continue with rayagi train --resume runs/a",
        capsys.readouterr().out,
    )
    folder.lock()
    assert main(["report", "runs/a"]) == 0
    assert re.search(r"status  running\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"value_loss": math.nan}, "value_loss became nan at iteration 25 (1,600 environment steps)"),
        (
            NonFiniteError("a reward", 25, "rollout step 3, environment 7"),
            "a reward became NaN or infinite in iteration 25",
        ),
        (SimulationError(7, 3, "qacc"), "qacc"),
    ],
)
def test_nan_stops_the_run_and_the_last_good_checkpoint_stays(fake, capsys, event, message):
    fake.events = {25: event}
    assert rayagi(TASK, "--time", "1h", "--name", "a", "--checkpoint-every", "10") == 1
    error = capsys.readouterr().err
    assert message in error
    assert "The last good checkpoint is iteration_000020" in error
    assert "Traceback" not in error
    assert CheckpointStore(Path("runs/a/checkpoints")).load().name == "iteration_000020"
    assert json.loads(Path("runs/a/run.json").read_text())["status"] == "failed"
    # Continuing would reach the same NaN again; the advice is a command that works.
    assert "--resume" not in error
    (advice,) = re.findall(r"rayagi train (.*)", error)
    assert advice == f"{TASK} --config runs/a/config.yaml --set ppo.learning_rate=0.0005"
    fake.events = {}
    assert rayagi(*advice.split(), "--iterations", "5", "--name", "b") == 0
    assert "learning_rate: 0.0005" in Path("runs/b/config.yaml").read_text()


def test_nan_before_the_first_checkpoint_reports_that_there_is_none(fake, capsys):
    fake.events = {1: {"value_loss": math.nan}}
    assert rayagi(TASK, "--time", "1h", "--name", "a") == 1
    error = capsys.readouterr().err
    assert "No checkpoint had been saved yet" in error
    assert "last good checkpoint" not in error
    assert Path("runs/a/config.yaml").exists()


def test_after_a_lost_gmi_the_run_can_be_resumed(fake, capsys):
    fake.events = {25: GmiLostError(1, "GMI 1", "10 training iterations", "its node died")}
    assert rayagi(TASK, "--time", "1h", "--name", "a", "--checkpoint-every", "10") == 1
    (advice,) = re.findall(r"rayagi train (.*)", capsys.readouterr().err)
    fake.events = {}
    assert rayagi(*advice.split(), "--iterations", "30") == 0
    assert [row["iteration"] for row in read_rows(Path("runs/a/progress.csv"))] == list(range(1, 31))


def test_an_unexpected_error_leaves_its_traceback_in_the_run_folder(fake, capsys):
    fake.events = {5: RuntimeError("surprise")}
    assert rayagi(TASK, "--time", "1h", "--name", "a") == 1
    error = capsys.readouterr().err
    assert "unexpected RuntimeError: surprise" in error
    assert "The traceback is in runs/a/error.log" in error
    assert "Traceback (most recent call last)" in Path("runs/a/error.log").read_text()
    assert "Traceback" not in error


def test_more_gmis_than_cores_leave_no_empty_folder(fake, capsys):
    assert rayagi(TASK, "--gmis", "4096", "--time", "1h") == 2
    assert "num_gmis=4096" in capsys.readouterr().err
    assert list(Path("runs").iterdir()) == []


def test_a_read_only_folder_is_named(fake, capsys):
    # A file in place of a folder fails even for root, who ignores permissions.
    Path("runs").write_text("")
    assert rayagi(TASK, "--time", "1h") == 1
    error = capsys.readouterr().err
    assert "cannot write runs" in error
    assert "--out" in error


def test_a_folder_that_is_renamed_meanwhile_is_not_made_anew(fake, capsys):
    """Else there would be two: one with the settings, one with the checkpoints of later."""
    fake.events = {25: lambda: Path("runs/a").rename("runs/b")}
    assert rayagi(TASK, "--time", "1h", "--name", "a", "--checkpoint-every", "10") == 1
    error = capsys.readouterr().err
    assert re.match(
        r"rayagi: cannot write runs/a/checkpoints/\.iteration_000030\.\d+: No such file or directory; .*\n"
        r"runs/a was removed or renamed while the run used it. A renamed one continues with:\n",
        error,
    )
    assert [path.name for path in Path("runs").iterdir()] == ["b"]
    fake.events = {}
    assert main(["train", "--resume", "runs/b", "--iterations", "30"]) == 0
    assert [row["iteration"] for row in read_rows(Path("runs/b/progress.csv"))] == list(range(1, 31))


def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path):
    code = """
        import resource, sys
        sys.path.insert(0, sys.argv[1])
        import test_train_command as module
        import rayagi.cli.train as train
        from rayagi.cli import main

        def fill_up():
            # From here on, no file can grow past a size that progress.csv has already passed.
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

        class Session(module.FakeOpenSession):
            events = {25: fill_up}

        train.session_of, train.TrainingLoop = Session, module.Loop
        sys.exit(main(["train", module.TASK, "--time", "1h", "--name", "a", "--checkpoint-every", "10"]))
    """
    done = run_python(code, Path(__file__).parent, cwd=tmp_path, check=False)
    assert done.returncode == 1, done.stderr
    assert "cannot write runs/a/" in done.stderr
    assert "File too large; free space there" in done.stderr
    assert "--out" not in done.stderr
    assert "The last good checkpoint is iteration_000020" in done.stderr
    assert CheckpointStore(tmp_path / "runs/a/checkpoints").load().name == "iteration_000020"


SMALL_DISK = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
"""Runs a shell command in a mount namespace of its own: what it mounts is gone when it ends."""


def can_mount():
    command = [*SMALL_DISK, "mount -t tmpfs -o size=1m tmpfs /mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace of one's own")
def test_a_run_on_a_disk_that_fills_up_ends_with_a_sentence_and_resumes_once_there_is_space(tmp_path):
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import test_train_command as module
        import rayagi.cli.train as train
        from rayagi.cli import main

        def fill_up():
            with open("filler", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1000))
                except OSError:
                    pass

        class Session(module.FakeOpenSession):
            events = {25: fill_up}

        train.session_of, train.TrainingLoop = Session, module.Loop
        sys.exit(main(["train", *sys.argv[2:]]))
    """
    train = [sys.executable, "-c", textwrap.dedent(code), str(Path(__file__).parent)]
    script = """
        mount -t tmpfs -o size=3m tmpfs "$0"; cd "$0"
        "$@" InvertedPendulum-v5 --time 1h --name a --checkpoint-every 10 2>"$0.error" && exit 3
        ls -A runs/a runs/a/checkpoints >"$0.files"
        rm filler
        "$@" --resume runs/a --iterations 24 >"$0.resumed"
        cp runs/a/progress.csv "$0.csv"
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        [*SMALL_DISK, script, str(disk), *train], capture_output=True, timeout=240, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    error = (tmp_path / "disk.error").read_text()
    full = r"No space left on device \(0 B of 3 MiB are free\); free space there, or make it writable"
    assert re.match(
        rf"rayagi: cannot write runs/a/\S+: {full}\nThe last good checkpoint is iteration_000020", error
    )
    files = (tmp_path / "disk.files").read_text().split()
    assert "iteration_000020" in files
    assert not [name for name in files if name.endswith(".tmp") or name.startswith(".iteration")]
    assert "at iteration 20 in runs/a" in (tmp_path / "disk.resumed").read_text()
    assert [row["iteration"] for row in read_rows(tmp_path / "disk.csv")] == list(range(1, 25))


def test_a_run_can_be_profiled(fake, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "mine")
    inherited = []
    fake.swell = staticmethod(lambda session: inherited.append(dict(os.environ)))
    assert rayagi(TASK, "--iterations", "2", "--profile", "5", "--name", "a") == 0
    run = Path("runs/a")
    settings = json.loads(inherited[0]["RAYAGI_PROFILE"])
    assert settings["profile"] == str((run / "profile").absolute())
    assert settings["schedule"] == {"skip": 2, "warm_up": 1, "record": 5, "repeat": 1}
    startup, mine = inherited[0]["PYTHONPATH"].split(os.pathsep)
    assert (Path(startup) / "sitecustomize.py").is_file()
    assert mine == "mine"
    assert os.environ["PYTHONPATH"] == "mine"
    assert "RAYAGI_PROFILE" not in os.environ
    assert main(["train", "--resume", str(run), "--iterations", "4", "--profile", "5"]) == 0
    assert {each.name for each in run.glob("profile*")} == {"profile", "profile-2"}
    # What a report's estimate for the whole run is of: each session's own iterations.
    assert [read_profile(run / name).iterations for name in ("profile", "profile-2")] == [2, 2]


def test_only_the_workers_of_a_local_ray_can_be_profiled(fake, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert rayagi(TASK, "--iterations", "2", "--profile", "5") == 2
    assert "--profile needs a local Ray" in capsys.readouterr().err


def test_a_dataset_of_another_task_of_the_same_sizes_is_named(tmp_path):
    layout = ColumnLayout.for_env(env_info("HalfCheetah-v5"))
    assert layout == ColumnLayout.for_env(env_info("Walker2d-v5"))
    for task in ("Walker2d-v5", "HalfCheetah-v5", UNNAMED_TASK):
        folder = tmp_path / task
        DatasetFolder.create(folder, Description(task=task, format="parquet", layout=layout))
    expected = f"{tmp_path / 'Walker2d-v5'} is of Walker2d-v5: check that its observations and actions mean the same as "
    assert other_task(str(tmp_path / "Walker2d-v5"), "HalfCheetah-v5") == f"{expected}HalfCheetah-v5's."
    for silent in ("HalfCheetah-v5", UNNAMED_TASK, "walks.pt"):
        assert other_task(str(tmp_path / silent), "HalfCheetah-v5") == ""


def test_actions_of_a_dataset_that_are_all_beyond_the_tasks_range_are_refused(fake, capsys):
    """The pendulum's force is within 3."""
    steps = {"obs": torch.zeros(4, 4), "reward": torch.ones(4), "terminated": torch.tensor([0, 1, 0, 1])}
    outputs = {}
    for name, actions in (("inside", [0.0, 3, -3, 1]), ("some", [0.0, 5, -3, 1]), ("all", [5.0, 5, -6, 4])):
        torch.save({**steps, "action": torch.tensor(actions)[:, None]}, f"{name}.pt")
        code = rayagi(
            TASK, "--algorithm", "td3", "--dataset", f"{name}.pt", "--iterations", "1", "--name", name
        )
        outputs[name] = (code, *capsys.readouterr())
    assert outputs["inside"][0] == outputs["some"][0] == 0
    assert outputs["all"][0] == 2
    assert (
        "has component 0 of every action beyond InvertedPendulum-v5's range: it is from -6 to 5"
        in outputs["all"][2]
    )
    assert not Path("runs/all").exists()


def test_the_parts_of_a_datasets_observations_are_named_and_kept(fake, tmp_path, capsys):
    parts = {"obs.cart": torch.zeros(4, 1), "obs.rest": torch.zeros(4, 3), "action": torch.zeros(4, 1)}
    torch.save({**parts, "reward": torch.ones(4), "terminated": torch.tensor([0, 1, 0, 1])}, "d.pt")
    run = (TASK, "--algorithm", "td3", "--dataset", "d.pt", "--iterations", "1", "--name", "a")
    assert rayagi(*run) == 2
    assert (
        "say which of them are InvertedPendulum-v5's, in order, with --obs-keys A,B"
        in capsys.readouterr().err
    )
    assert rayagi(*run, "--obs-keys", "cart, rest") == 0
    data = open_run(Path("runs/a")).read_spec(trust_modules=False).data
    assert (data.path, data.obs_keys) == (str(tmp_path / "d.pt"), ("cart", "rest"))
    assert rayagi("--resume", "runs/a", "--obs-keys", "rest,cart") == 2
    assert "--obs-keys cannot change on --resume" in capsys.readouterr().err


def test_a_replay_that_cannot_hold_the_dataset_is_refused_before_anything_starts(fake, capsys):
    steps = {"obs": torch.zeros(4, 4), "action": torch.zeros(4, 1), "reward": torch.ones(4)}
    torch.save({**steps, "terminated": torch.tensor([0, 1, 0, 1])}, "d.pt")
    sizes = ("--set", "td3.learning_starts=1", "--set", "td3.capacity=3")
    assert rayagi(TASK, "--algorithm", "td3", "--dataset", "d.pt", "--iterations", "1", *sizes) == 2
    assert "td3.capacity = 3: is less than the dataset's 4 steps; use at least 4" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_run_that_a_signal_ends_at_once_waits_for_no_statistics_of_gmis(tmp_path):
    asked = []
    session = SimpleNamespace(experience=lambda: asked.append(1) or {})
    folder = SimpleNamespace(path=tmp_path)
    for error in (KeyboardInterrupt, SystemExit):
        train._keep_experience(folder, session, error, error(), None)
    assert asked == []
    train._keep_experience(folder, session, None, None, None)
    assert asked == [1]


@pytest.mark.parametrize("limit", [["--env-steps", "64"], ["--iterations", "1"]])
def test_commands_of_messages_can_be_pasted_whatever_the_run_is_called(fake, capsys, limit):
    linear = (
        ["--set", "ppo.lr_schedule=linear", "--set", "total_env_steps=64"] if "--env-steps" in limit else []
    )
    assert rayagi(TASK, *limit, *linear, "--name", "Lauf für Ä") == 0
    capsys.readouterr()
    for change in (["--seed", "5"], *([["--env-steps", "128"]] if linear else [])):
        assert rayagi("--resume", "runs/Lauf für Ä", *change) == 2
        command = capsys.readouterr().err.partition(f"rayagi train {TASK} ")[2]
        assert shlex.split(command)[:2] == ["--config", "runs/Lauf für Ä/config.yaml"]
