"""`rayagi serve` with GMIs in this process, and its errors before anything starts."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pyarrow.dataset
import pytest
import torch
from saved_runs import saved_run

import rayagi.cli.serve as command
from actors.gmi import GmiContext, GmiIdentity
from collectives.solo import SoloCommunicator
from placement.inventory import local_machine
from rayagi.cli import main
from rayagi.config.convert import run_spec_from_dict, run_spec_to_dict
from rayagi.run.errors import DiskError
from rayagi.run.folder import open_run
from rayagi.serving.dataset import open_dataset
from rayagi.serving.errors import WriterError


class SessionInThisProcess:
    """Builds the real programs of the plan here, one after another; ``fails_at`` is the request that raises."""

    fails_at = None

    def __init__(self, spec, *, factory, make_plan, run_name, on_plan):
        self.plan = make_plan(local_machine())
        self._spec, self._factory, self._requests = spec, factory, 0
        on_plan(self.plan)

    def __enter__(self):
        self.programs = [
            self._factory(
                GmiContext(
                    identity=GmiIdentity(
                        index=index,
                        num_gmis=self.plan.num_gmis,
                        slice=gmi_slice,
                        roles=self.plan.roles_of(index),
                        task=self._spec.env.id,
                    ),
                    communicator=SoloCommunicator(),
                    device=torch.device("cpu"),
                )
            )
            for index, gmi_slice in enumerate(self.plan.slices)
        ]
        return self

    def run(self, *args, timeout_s):
        self._requests += 1
        if self._requests == self.fails_at:
            raise DiskError("data/s000-g000-00000.parquet", "No space left on device", "free space there")
        return [program.gmi_run(*args) for program in self.programs]

    def __exit__(self, *error):
        for program in self.programs:
            program.close()


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Runs the command in a folder with a run; returns its exit code."""
    monkeypatch.chdir(tmp_path)
    saved_run(Path("runs"), iterations=(4, 9))
    monkeypatch.setattr(command, "Session", type("Session", (SessionInThisProcess,), {}))
    return lambda *options: main(["serve", "runs/a", "--gmis", "1", *options])


def test_the_next_commands_can_be_pasted_whatever_the_dataset_is_called(serve, capsys):
    assert serve("--out", "my d'ü", "--steps", "4", "--num-envs", "2") == 0
    lines = capsys.readouterr().out.partition("Next:\n")[2].splitlines()
    path = str(Path("my d'ü").absolute())
    assert [shlex.split(line) for line in lines] == [
        ["rayagi", "replay", "info", path],
        ["rayagi", "export", path, "--to", "rllib", f"{path}-rllib"],
    ]


def test_a_dataset_with_its_statistics_and_origin(serve, capsys):
    options = ["--format", "arrow", "--rows-per-file", "60"]
    assert serve("--out", "d", "--steps", "150", "--num-envs", "2", *options) == 0
    output = capsys.readouterr().out
    assert "150 environment steps" in output
    assert "150 rows in 3 files" in output
    assert "step of all environments of a GMI: p50" in output
    assert main(["replay", "info", re.search(r"Next:\n  rayagi replay info (\S+)", output)[1]]) == 0
    assert pyarrow.dataset.dataset("d/data", format="ipc").count_rows() == 150
    statistics = json.loads(Path("d/statistics.json").read_text())
    assert (statistics["rows"], statistics["files"]) == (150, 3)
    (session,) = json.loads(Path("d/provenance.json").read_text())["sessions"]
    assert (session["task"], session["checkpoint"], session["seed"]) == (
        "InvertedPendulum-v5",
        "iteration_000009",
        0,
    )
    assert (session["status"], session["template"], session["num_gmis"]) == ("finished", "dp_only", 1)
    assert session["policy_version"] == 9
    assert {"torch", "ray", "cpu_model", "python", "git_commit"} <= session["machine"].keys()
    assert session["step"]["count"] == 75


@pytest.mark.slow
def test_appending_adds_other_episodes(serve, capsys):
    assert serve("--out", "d", "--steps", "100", "--num-envs", "2") == 0
    assert serve("--out", "d", "--steps", "100") == 2
    assert "holds a dataset already; add to it with --append" in capsys.readouterr().err
    assert (
        serve(
            "--out", "d", "--steps", "60", "--append", "--num-envs", "2", "--checkpoint", "iteration_000004"
        )
        == 0
    )
    assert serve("--out", "d", "--steps", "60", "--append", "--seed", "1") == 2
    assert "--seed 1 was used in this dataset before" in capsys.readouterr().err
    assert serve("--out", "d", "--steps", "60", "--append", "--format", "arrow") == 2
    assert "is of format parquet" in capsys.readouterr().err
    saved_run(Path("runs"), "CartPole-v1", name="b")
    assert main(["serve", "runs/b", "--out", "d", "--append", "--steps", "10"]) == 2
    assert "d holds InvertedPendulum-v5" in capsys.readouterr().err
    table = pyarrow.dataset.dataset("d/data").to_table()
    assert table.num_rows == 160
    assert set(zip(*(table[name].to_pylist() for name in ("session", "policy_version")), strict=True)) == {
        (0, 9),
        (1, 4),
    }
    episodes = [
        set(table.filter(pyarrow.compute.field("session") == s)["episode"].to_pylist()) for s in range(2)
    ]
    assert not episodes[0] & episodes[1]
    assert [each["seed"] for each in json.loads(Path("d/provenance.json").read_text())["sessions"]] == [0, 1]


def test_without_a_folder_nothing_is_written(serve, capsys):
    before = sorted(Path().rglob("*"))
    assert serve("--steps", "50", "--explore") == 0
    assert "exploring" in capsys.readouterr().out
    assert sorted(Path().rglob("*")) == before
    assert serve("--append", "--steps", "10") == 2


def test_a_failure_says_what_is_complete(serve, capsys, monkeypatch):
    command.Session.fails_at = 3
    assert serve("--out", "d", "--time", "1h", "--num-envs", "2", "--rows-per-file", "200") == 1
    error = capsys.readouterr().err
    assert "cannot write data/s000-g000-00000.parquet: No space left on device; free space there" in error
    rows = open_dataset("d").statistics.rows
    files = len(open_dataset("d").files)
    assert (
        f"Complete and readable in {Path('d/data').absolute()}: {files} files of this session with {rows:,} rows."
        in error
    )
    assert files > 1
    (session,) = json.loads(Path("d/provenance.json").read_text())["sessions"]
    assert session["status"] == "failed"
    assert "No space left" in session["reason"]


def test_a_session_that_adds_no_file_says_that_the_dataset_is_as_it_was(serve, capsys, monkeypatch):
    assert serve("--out", "d", "--steps", "10", "--num-envs", "2") == 0
    before = [file.statistics.rows for file in open_dataset("d").files]
    monkeypatch.setattr(
        command.Session, "__enter__", lambda self: (_ for _ in ()).throw(WriterError(0, "did not start"))
    )
    assert serve("--out", "d", "--steps", "10", "--append") == 1
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"No file of this session was completed: {Path('d').absolute()} holds what it held before."
    ]
    assert [file.statistics.rows for file in open_dataset("d").files] == before


@pytest.mark.parametrize("signal_s_exception", [KeyboardInterrupt, SystemExit])  # Ctrl-C, SIGTERM
def test_a_signal_while_closing_changes_nothing_of_the_dataset(serve, monkeypatch, signal_s_exception):
    def interrupted(self, *error):
        SessionInThisProcess.__exit__(self, *error)
        raise signal_s_exception

    monkeypatch.setattr(command.Session, "__exit__", interrupted)
    assert serve("--out", "d", "--steps", "10", "--num-envs", "2") == 0
    (session,) = json.loads(Path("d/provenance.json").read_text())["sessions"]
    assert session["status"] == "finished"
    assert open_dataset("d").statistics.rows == 10


def test_the_session_of_a_killed_process_is_not_left_running(serve):
    assert serve("--out", "d", "--steps", "10", "--num-envs", "2") == 0
    provenance = Path("d/provenance.json")
    (first,) = json.loads(provenance.read_text())["sessions"]
    killed = {name: value for name, value in first.items() if name not in ("ended", "reason")}
    provenance.write_text(json.dumps({"sessions": [killed | {"status": "running"}]}))
    assert serve("--out", "d", "--steps", "10", "--num-envs", "2", "--append") == 0
    sessions = json.loads(provenance.read_text())["sessions"]
    assert [session["status"] for session in sessions] == ["failed", "finished"]
    assert sessions[0]["reason"] == "its process was killed, or the disk was full"


def test_a_start_that_fails_leaves_no_folder(serve, capsys, monkeypatch):
    monkeypatch.setattr(
        command.Session, "__enter__", lambda self: (_ for _ in ()).throw(WriterError(0, "did not start"))
    )
    assert serve("--out", "d", "--steps", "10") == 1
    assert "the writer of GMI 0 did not start" in capsys.readouterr().err
    assert not Path("d").exists()
    assert serve("--out", "e", "--steps", "10", "--template", "dp_mp", "--gmis", "3") == 2
    assert not Path("e").exists()


def test_a_checkpoint_of_another_task_is_refused_at_set_up(serve, capsys):
    other = open_run(saved_run(Path("runs"), "CartPole-v1", name="b"))
    config = run_spec_from_dict(open_run(Path("runs/a")).read_config())
    other.write_config(run_spec_to_dict(config))
    assert main(["serve", "runs/b", "--out", "d"]) == 2
    assert "iteration_000004 does not fit InvertedPendulum-v5" in capsys.readouterr().err
    assert main(["policy-server", "runs/b", "--port", "0"]) == 2
    assert main(["serve", "runs/nothing"]) == 2
    assert main(["serve", "runs/a", "--checkpoint", "iteration_000001"]) == 2


def test_options_that_make_no_sense(serve, capsys):
    assert main(["policy-server", "runs/a"]) == 2
    assert "where should it listen? Give --port P, --unix PATH" in capsys.readouterr().err
    Path("token").write_text("short\n")
    assert main(["policy-server", "runs/a", "--port", "0", "--token-file", "token"]) == 2
    assert "of 16 characters at least" in capsys.readouterr().err
    Path("token").write_text("cl\u00e9-tr\u00e8s-secr\u00e8te-1234\n", encoding="utf-8")
    assert main(["policy-server", "runs/a", "--port", "0", "--token-file", "token"]) == 2
    assert "the token is not printable ASCII" in capsys.readouterr().err
    for options in (
        ["--template", "mp_mp"],
        ["--greedy", "--explore"],
        ["--steps", "0"],
        ["--format", "csv"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["serve", "runs/a", *options])


def test_auto_asks_the_throughput_model(serve, monkeypatch):
    """The choice itself is tested in tests/unit/coordinator/test_template_choice.py."""
    from rayagi.coordinator import template_choice
    from rayagi.serving.templates import chosen_template

    monkeypatch.setattr(
        template_choice, "chosen", lambda spec, machine, log, serving, measure: f"{spec} {serving}"
    )
    job = SimpleNamespace(spec="a run")
    options = {"machine": local_machine, "log": print}
    assert chosen_template(job, "auto", num_agents=None, **options) == "a run True"
    assert chosen_template(job, "dp_mp", num_agents=None, **options) == "dp_mp"
    # Only mp_dp has agents to count: nothing else could take the number, and one agent is another plan than two.
    assert chosen_template(job, "auto", num_agents=2, **options) == "mp_dp"
