"""Dict and tuple observations, several choices at once: trained, evaluated, served and exported by the commands."""

import json
from pathlib import Path

import msgpack
import msgpack_numpy
import numpy as np
import pyarrow.dataset
import pytest

from rayagi.cli import main
from rayagi.serving.policy_server.obs_leaves import flat_rows
from rayagi.serving.policy_server.served_policy import ServedPolicy
from tests.fakes.echo import Echo

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_of_this_machine")]

ECHO = "tests.fakes.echo:Echo-v0"
SMALL = ("--backend", "cpu", "--num-envs", "4", "--set", "ppo.rollout_length=16", "--iterations", "3")


def column(folder, name, episode, step):
    """Of all rows, by episode and step."""
    table = pyarrow.dataset.dataset(folder).to_table()
    return np.array(table.sort_by([(episode, "ascending"), (step, "ascending")])[name].to_pylist())


@pytest.mark.parametrize(
    ("obs", "action", "gmis", "options"),
    [
        pytest.param("dict", "multi_discrete", "2", (3, 2, 4), marks=pytest.mark.slow),
        ("tuple", "multi_binary", "1", (2, 2, 2)),
    ],
)
def test_from_training_to_datasets_and_answers(tmp_path, monkeypatch, capsys, obs, action, gmis, options):
    monkeypatch.chdir(tmp_path)
    kwargs = f"env.kwargs={{obs: {obs}, action: {action}}}"
    assert main(["train", ECHO, "--gmis", gmis, "--name", "run", "--set", kwargs, *SMALL]) == 0
    assert main(["evaluate", "runs/run", "--episodes", "4", "--trust-modules"]) == 0
    served = [
        "serve",
        "runs/run",
        "--trust-modules",
        "--out",
        "d",
        "--backend",
        "cpu",
        "--gmis",
        "1",
        "--num-envs",
        "4",
    ]
    assert main([*served, "--steps", "128"]) == 0, capsys.readouterr().err
    actions = column("d/data", "action", "episode", "step")
    assert actions.shape == (128, 3)
    assert (actions.max(0) < options).all()
    assert main(["export", "d", "for_rllib", "--to", "rllib"]) == 0, capsys.readouterr().err
    items = pyarrow.dataset.dataset("for_rllib").to_table()["item"].to_pylist()
    episodes = [msgpack.unpackb(item, object_hook=msgpack_numpy.decode) for item in items]
    exported = [
        row for each in sorted(episodes, key=lambda each: int(each["id_"])) for row in each["actions"]["data"]
    ]
    assert np.array(exported).tolist() == actions.tolist()
    policy = ServedPolicy(Path("runs/run"), "best", trust_modules=True)
    answers = policy.current.act(np.zeros((5, policy.info()["obs_dim"]), np.float32))
    assert answers.shape == (5, 3)
    space = Echo(obs, action).observation_space
    rows, _ = flat_rows(space.sample(), policy.info()["obs_leaves"])
    assert policy.current.act(rows).shape == (1, 3)
    assert tuple(json.loads(json.dumps(policy.info()))["action"]["choices"]) == options
