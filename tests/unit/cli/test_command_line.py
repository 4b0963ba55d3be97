import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayagi.cli import main, settings
from rayagi.cli.failures import KNOWN, explain
from rayagi.cli.parser import build_parser
from rayagi.run.folder import create_run
from tests.programs import run_python


def run_cli(*arguments):
    """The exit code; argparse raises SystemExit."""
    try:
        return main(arguments)
    except SystemExit as left:
        return left.code


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("code", "unneeded", "said"),
    [
        ("main(['--help'])", {"torch", "ray", "gymnasium", "mujoco", "matplotlib", "rich"}, "usage: rayagi"),
        ("main(['envs'])", {"ray"}, "HalfCheetah-v5"),
        ("main(['plan', 'Ant-v5'])", {"ray", "torch"}, "simulator+agent+trainer"),
        ("main(['comm', 'plan', '--layout', '2x2', '--size', '1MB'])", {"ray", "torch"}, "2x2"),
        # A run is checked and planned before torch is loaded: ``session.py`` imports it while Ray starts.
        ("import rayagi.cli.train, rayagi.envs; rayagi.envs.env_info('Ant-v5')", {"torch", "scipy"}, ""),
        ("import rayagi.envs; rayagi.envs.env_info('CartPole-v1')", {"torch"}, ""),
    ],
)
def test_a_command_loads_only_what_it_needs(code, unneeded, said):
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    program = f"""
        import sys
        from rayagi.cli import main
        try:
            {code}
        except SystemExit:
            pass
        print({unneeded} & set(sys.modules))
    """
    done = run_python(program, env=kept)
    assert done.stdout.splitlines()[-1] == "set()"
    assert said in done.stdout


@pytest.mark.parametrize(
    "command",
    ["train", "evaluate", "info", "plan", "envs", "report", "cleanup", "comm", "comm plan", "comm bench"],
)
def test_every_command_explains_itself(command, capsys):
    assert run_cli(*command.split(), "--help") == 0
    assert "usage: rayagi" in capsys.readouterr().out


def test_the_version_is_printed(capsys):
    assert run_cli("--version") == 0
    assert capsys.readouterr().out.startswith("rayagi 0.")


def test_options_are_read_as_people_write_them():
    arguments = build_parser().parse_args(
        [
            "train",
            "Ant-v5",
            "--time",
            "1h30m",
            "--env-steps",
            "2M",
            "--checkpoint-every",
            "30s",
            "--set",
            "a=1",
            "--set",
            "b=2",
        ]
    )
    assert arguments.time == 5400
    assert arguments.env_steps == 2_000_000
    assert arguments.checkpoint_every == ("time_s", 30.0)
    assert arguments.set == ["a=1", "b=2"]
    assert build_parser().parse_args(["train", "A", "--checkpoint-every", "30"]).checkpoint_every == (
        "iterations",
        30,
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--gmis", "0"),
        ("--gmis", "-2"),
        ("--num-envs", "0"),
        ("--iterations", "-1"),
        ("--env-steps", "0"),
        ("--env-steps", "2X"),
        ("--time", "5 parsecs"),
        ("--time", "0s"),
        ("--evaluate-every", "0"),
        ("--checkpoint-every", "0"),
        ("--stop-return", "nan"),
        ("--stop-return", "inf"),
        ("--stop-return", "high"),
        ("--seed", "-1"),
        ("--seed", "x"),
        ("--backend", "cuda"),
        ("--name", "a/b"),
    ],
)
def test_a_bad_value_names_option_and_value(option, value, capsys):
    assert run_cli("train", "Ant-v5", option, value) == 2
    error = capsys.readouterr().err
    assert f"argument {option}:" in error
    assert value in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train",), "which task?"),
        (
            ("train", "Ant-v5", "--num-env", "3"),
            "rayagi train: error: unrecognized arguments: --num-env 3; did you mean --num-envs? rayagi train --help",
        ),
        (("envs", "--qwxz"), "unrecognized arguments: --qwxz; rayagi envs --help lists what it takes"),
        (("replay", "info", "x", "--jso"), "rayagi replay info: error: unrecognized arguments: --jso"),
        (("train", "Antt-v5"), "did you mean Ant-v5"),
        (("plan", "HalfCheeta-v5"), "did you mean HalfCheetah-v5"),
        (("envs", "halfcheeta-v55"), "did you mean HalfCheetah-v5"),
        (("plan", "Ant-v5", "--gmis", "4096"), "num_gmis=4096"),
        (("train", "Ant-v5", "--set", "ppo.num_minibatches=7"), "must divide ppo.rollout_length"),
        (("train", "Ant-v5", "--set", "ppo.learning_rat=1e-4"), "ppo.learning_rate"),
        (("train", "Ant-v5", "--set", "gmi.num_envs=-1"), "gmi.num_envs = -1"),
        (("train", "Ant-v5", "--set", "ppo.rollout_length=0"), "ppo.rollout_length = 0"),
        (("train", "Ant-v5", "--config", "missing.yaml"), "missing.yaml: no such file"),
        (("train", "--resume", "runs/missing"), "no such run folder"),
        (("evaluate", "runs/missing"), "no such run folder"),
        (("report", "runs/missing"), "no such run folder"),
        (("plan", "Ant-v5", "--machine", "missing.json"), "missing.json"),
        (("evaluate", "runs/x", "--video", "out.txt"), ".mp4"),
        (("evaluate", "runs/x", "--video", "out.webm"), ".mp4"),
        (("evaluate", "runs/x", "--video", "no/such/out.mp4"), "there is no folder no/such"),
        (
            ("train", "rayagi/Ant-v0", "--set", "env.kwargs.xml_file=/no.xml"),
            "/no.xml: there is no such file",
        ),
        (("train", "rayagi/Ant-v0", "--set", "env.kwargs.reset_noise=wide"), "reset_noise is 'wide'"),
        (("train", "rayagi/Ant-v0", "--set", "env.engine=nonsense"), "there is no engine 'nonsense'"),
        (
            ("train", "isaaclab/X", "--set", "env.kwargs.python=/no/python"),
            "python=/no/python is no executable here",
        ),
        (("policy-server", "runs/x", "--port", "0", "--token-file", "no.txt"), "no.txt: No such file"),
        (
            ("policy-server", "runs/x", "--port", "0", "--threads", "99999999999"),
            "--threads 99999999999: this process may",
        ),
        (("plan", "isaacgym/Ant"), "has no package 'isaacgym'"),
    ],
)
def test_bad_input_gets_one_message_and_exit_code_2(arguments, message, capsys):
    assert run_cli(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(Path().glob("runs/*"))


def test_a_name_with_a_byte_that_is_no_utf_8_is_refused(capsys):
    assert run_cli("train", "Ant-v5", "--name", "a\udce4") == 2
    assert "argument --name: 'a\\udce4' is no text in UTF-8" in capsys.readouterr().err


def test_a_config_file_that_raises_is_named_with_its_line(capsys):
    Path("bad.py").write_text("x = 1\nraise RuntimeError('broken on purpose')\n")
    assert run_cli("train", "Ant-v5", "--config", "bad.py") == 2
    error = capsys.readouterr().err
    assert "bad.py" in error
    assert "broken on purpose" in error
    assert "line 2" in error or ":2" in error


def test_an_unknown_key_in_a_config_file_is_named_with_the_nearest(capsys):
    Path("bad.yaml").write_text("ppo:\n  gama: 0.9\n")
    assert run_cli("train", "Ant-v5", "--config", "bad.yaml") == 2
    error = capsys.readouterr().err
    assert "ppo.gama" in error
    assert "ppo.gamma" in error


@pytest.mark.parametrize("command", [("evaluate",), ("report",), ("train", "--resume")])
def test_a_run_of_another_version_is_refused(command, capsys):
    folder = create_run(Path("runs"), "Ant-v5", seed=0, rayagi_version="9.9", name="old")
    folder.unlock()
    stored = json.loads((folder.path / "run.json").read_text())
    (folder.path / "run.json").write_text(json.dumps(stored | {"schema_version": 99}))
    assert run_cli(*command, "runs/old") == 2
    assert "layout 99, written by rayagi 9.9" in capsys.readouterr().err


def test_a_run_without_iterations_has_no_report_yet(capsys):
    create_run(Path("runs"), "Ant-v5", seed=0, rayagi_version="0.1", name="new")
    assert run_cli("report", "runs/new") == 2
    assert "no finished iteration" in capsys.readouterr().err


def test_debug_shows_the_traceback(capsys):
    assert run_cli("train", "Antt-v5", "--debug") == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_the_plan_is_a_table_of_gmis(capsys):
    assert run_cli("plan", "Ant-v5", "--gmis", "1", "--num-envs", "7") == 0
    output = capsys.readouterr().out
    assert "simulator+agent+trainer" in output
    assert " 7 " in output


@pytest.mark.parametrize(
    "command", [["envs"], ["plan", "Ant-v5", "--gmis", "1"], ["comm", "plan", "--layout", "4x3"]]
)
def test_a_reader_that_leaves_a_listing_early_is_no_failure(command):
    process = subprocess.Popen(
        [sys.executable, "-m", "rayagi", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")


def test_a_reader_that_leaves_does_not_hide_a_failure(monkeypatch, capsys):
    from rayagi.cli import train

    def broken(arguments):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(train, "run", broken)
    assert run_cli("train", "Ant-v5") == 1
    assert "Broken pipe" in capsys.readouterr().err


def test_engines_whose_environments_are_not_listed_say_how_to_name_them(capsys):
    assert run_cli("envs", "isaac") == 0
    output = capsys.readouterr().out
    assert "isaacgym/Ant" in output
    assert "isaaclab/Isaac-Ant-Direct-v0" in output


def test_environments_are_found_by_part_of_their_name(capsys):
    assert run_cli("envs", "PENDULUM") == 0
    output = capsys.readouterr().out
    assert "InvertedPendulum-v5" in output
    assert "Pendulum-v1" in output
    assert "HalfCheetah" not in output


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_error_exists(name):
    from importlib import import_module

    module, _, cls = name.rpartition(".")
    assert issubclass(getattr(import_module(module), cls), Exception)


def test_the_cause_of_a_remote_error_is_reported():
    from ray.exceptions import RayTaskError

    from actors.errors import NonFiniteError

    inner = NonFiniteError("a reward", 7, "rollout step 3, environment 1")
    remote = RayTaskError("iterate", "long remote traceback", inner).as_instanceof_cause()
    explanation = explain(remote)
    assert explanation.exit_code == 1
    assert explanation.error is inner


def test_an_unexpected_error_is_not_explained():
    assert explain(KeyError("x")) is None


def test_a_wrong_number_of_gmis_is_told_of_auto(capsys):
    assert run_cli("train", "Ant-v5", "--gmis", "x") == 2
    assert "or 'auto'" in capsys.readouterr().err


def test_a_machine_is_read_after_what_killed_runs_left_is_undone(monkeypatch):
    calls = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(settings, "recover_this_host", lambda: calls.append("recover"))
    monkeypatch.setattr(settings, "local_machine", lambda: calls.append("read"))
    settings.machine_of_run()
    assert calls == ["recover", "read"]
