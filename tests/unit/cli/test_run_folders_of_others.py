"""A run folder from somebody else: no command runs code that it names or brings, in processes of their own."""

import os
import subprocess
import sys

import pytest
import torch
import yaml

from rayagi.algorithms.normalisers import ObservationNormaliser
from rayagi.cli import main
from rayagi.config.convert import run_spec_to_dict
from rayagi.config.spec import NetworkSpec, RunSpec
from rayagi.envs import env_info
from rayagi.models.networks import ActorCritic
from rayagi.run.folder import create_run

EVIL = """
from pathlib import Path
import gymnasium
Path({marker!r}).write_text("ran")
gymnasium.register("Evil-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=5)
"""
COMMANDS = [  # the working folder, and the run from there: all commands look for modules in the same place
    pytest.param("runs/evil", ".", "policy-server RUN --port 0", marks=pytest.mark.slow),
    ("runs/evil", ".", "evaluate RUN --episodes 1"),
    (".", "runs/evil", "evaluate RUN --video out.gif"),
    ("runs/evil/checkpoints", "..", "serve RUN --time 1s"),
    ("runs/evil", ".", "train --resume RUN --iterations 1"),
]


@pytest.fixture
def evil(tmp_path):
    """A run folder whose config.yaml names the module in it, and which has modules named like installed ones."""
    spec = RunSpec(network=NetworkSpec(hidden=(8,)))
    info = env_info("CartPole-v1")
    model = ActorCritic(info, spec.network)
    normaliser = ObservationNormaliser(info.obs_dim, spec.learning.obs_clip, torch.device("cpu"))
    shared = {"learner": {"model": model.state_dict()}, "obs_normaliser": normaliser.state_dict()}
    folder = create_run(tmp_path / "runs", "evilmod:Evil-v0", seed=0, rayagi_version="0.1", name="evil")
    config = run_spec_to_dict(spec)
    config["env"]["id"] = "evilmod:Evil-v0"
    folder.write_config(config)
    counters = {"iteration": 4, "env_steps": 4096}
    folder.checkpoints.save({"shared": shared, "local": [], "num_gmis": 1}, counters)
    folder.unlock()
    (folder.path / "evilmod.py").write_text(EVIL.format(marker=str(tmp_path / "marker")))
    for name in ("torch", "yaml", "aiohttp", "matplotlib", "gymnasium", "ray"):
        (folder.path / f"{name}.py").write_text(EVIL.format(marker=str(tmp_path / "marker")))
    return folder.path


def rayagi(*arguments, cwd):
    """The command as installed: unlike python -m, it does not put the working folder on Python's path by itself."""
    code = "import sys; from rayagi.cli.main import run_process; run_process()"
    paths = [entry for entry in sys.path if entry and not entry.startswith(str(cwd))]
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("folder", "run", "command"), COMMANDS)
def test_no_command_imports_a_module_of_the_run_folder(evil, folder, run, command, tmp_path):
    cwd = tmp_path / folder
    done = rayagi(*command.replace("RUN", run).split(), cwd=cwd)
    assert done.returncode == 2, done
    assert not (tmp_path / "marker").exists()
    if command.startswith(("serve", "train")):
        assert "is in a run folder, whose files Ray's processes would import" in done.stderr
    else:
        assert "config.yaml: env.id = 'evilmod:Evil-v0': names the module 'evilmod'" in done.stderr
        assert f"not in the working project, {cwd}" in done.stderr
        assert "--trust-modules" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "CartPole-v1", "--explain"],
        ["plan", "CartPole-v1", "--nodes", "2"],
        ["info", "--cluster"],
    ],
    ids=" ".join,
)
def test_no_command_starts_or_asks_ray_in_a_run_folder(evil, command, tmp_path):
    done = rayagi(*command, cwd=evil)
    assert done.returncode == 2, done
    assert "is in a run folder, whose files Ray's processes would import" in done.stderr
    assert not (tmp_path / "marker").exists()


def test_a_report_is_written_without_the_modules(evil, tmp_path):
    (evil / "progress.csv").write_text(
        "iteration,iteration_s,train_s,env_steps,steps_per_second,env_steps_total\n1,1,1,100,100,100\n2,1,2,100,100,200\n"
    )
    done = rayagi("report", ".", cwd=evil)
    assert done.returncode == 0, done
    assert (evil / "report.html").exists()
    assert not (tmp_path / "marker").exists()


def test_with_trust_the_module_is_imported(evil, tmp_path):
    for name in ("torch", "yaml", "aiohttp", "matplotlib", "gymnasium", "ray"):
        (evil / f"{name}.py").unlink()
    done = rayagi("evaluate", ".", "--episodes", "1", "--trust-modules", cwd=evil)
    assert done.returncode == 0, done
    assert "over 1 episode " in done.stdout
    assert (tmp_path / "marker").exists()


def test_a_module_of_the_working_project_is_imported(evil, tmp_path):
    (evil / "evilmod.py").rename(tmp_path / "evilmod.py")
    done = rayagi("evaluate", "runs/evil", "--episodes", "1", cwd=tmp_path)
    assert done.returncode == 0, done
    assert "over 1 episode " in done.stdout


def test_a_checkpoint_cannot_bring_code(evil, tmp_path, capsys, monkeypatch):
    """A checkpoint is loaded without unpickling classes (torch.load's weights_only)."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "marker"),)

    config = yaml.safe_load((evil / "config.yaml").read_text())
    config["env"]["id"] = "CartPole-v1"
    (evil / "config.yaml").write_text(yaml.safe_dump(config))
    (checkpoint,) = (evil / "checkpoints").glob("iteration_*")
    for file in checkpoint.glob("*.pt"):
        torch.save({"shared": Evil(), "local": []}, file)
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "runs/evil"]) != 0
    assert not (tmp_path / "marker").exists()
    assert "iteration_000004" in capsys.readouterr().err
