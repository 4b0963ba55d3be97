"""Networks of users, through Ray: one from a file by the commands, and an RLModule by RLlib's interface."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core.rl_module import MultiRLModule, RLModuleSpec

from rayagi import PPOConfig
from rayagi.cli import main
from rayagi.coordinator.cluster import connected
from rayagi.policy_module import PolicyModule
from rayagi.run.folder import open_run
from rayagi.serving.policy_server.served_policy import ServedPolicy
from tests.fakes.rl_modules import Trunk

pytestmark = pytest.mark.cluster

NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, obs_dim, output_dim, width):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs_dim, width), nn.Tanh())
        self.outputs, self.value = nn.Linear(width, output_dim), nn.Linear(width, 1)

    def forward(self, obs):
        hidden = self.trunk(obs)
        return self.outputs(hidden), self.value(hidden).squeeze(-1)
"""


@pytest.mark.slow
def test_a_network_from_a_file_is_trained_evaluated_served_and_resumed(tmp_path, monkeypatch, capsys):
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    network = ("--set", "network.module=net.py:Net", "--set", "network.module_kwargs={width: 9}")
    small = ("--backend", "cpu", "--gmis", "2", "--num-envs", "4", "--set", "ppo.rollout_length=16")
    trained = main(["train", "Pendulum-v1", "--name", "run", "--iterations", "2", *small, *network])
    assert trained == 0, capsys.readouterr().err
    assert main(["evaluate", "runs/run", "--episodes", "2"]) == 0
    saved = open_run(Path("runs/run")).checkpoints.load("last").state
    model = saved["shared"]["learner"]["model"]
    assert model["network.module.trunk.0.weight"].shape == (9, 3)
    obs = torch.tensor([[0.3, -0.2, 1.0]])
    policy = ServedPolicy(Path("runs/run"), "last")
    answers = policy.current.act(obs.numpy())
    assert answers.shape == (1, 1)
    assert np.isfinite(answers).all()
    assert main(["train", "--resume", "runs/run", "--iterations", "3"]) == 0, capsys.readouterr().err
    resumed = open_run(Path("runs/run")).checkpoints.load("last")
    assert resumed.counters["iteration"] == 3


@pytest.mark.slow
def test_an_rl_module_is_trained_saved_and_restored_by_rllib_s_interface(tmp_path):
    config = (
        PPOConfig()
        .environment("Pendulum-v1")
        .gmi(num_gmis=1, num_envs=4, threads_per_gmi=1)
        .training(rollout_length=16)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=Trunk, model_config={"width": 9}))
    )
    obs = {"obs": torch.tensor([[0.3, -0.2, 1.0]])}
    with connected():
        algo = config.build_algo()
        try:
            algo.train()
            path, module = algo.save_to_path(tmp_path / "checkpoint"), algo.get_module()
        finally:
            algo.stop()
        wanted = module.forward_inference(obs)["action_dist_inputs"]
        assert isinstance(module, PolicyModule)
        assert wanted.shape == (1, 2)  # mean and log standard deviation
        modules = MultiRLModule.from_checkpoint(f"{path}/learner_group/learner/rl_module")
        assert torch.equal(modules["default_policy"].forward_inference(obs)["action_dist_inputs"], wanted)
        restored = Algorithm.from_checkpoint(path)
        try:
            assert torch.equal(restored.get_module().forward_inference(obs)["action_dist_inputs"], wanted)
        finally:
            restored.stop()
