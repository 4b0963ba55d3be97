"""Off-policy learners whose batches come from a device's gatherer: the same training, bit for bit, on the CPU.

``train`` runs on a GPU too (tests/gpu).
"""

from dataclasses import replace

import pytest
import torch

from actors.gmi import GmiContext
from rayagi.algorithms import off_policy
from rayagi.algorithms.dqn import DQNSpec
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.sac import SACSpec
from rayagi.algorithms.td3 import TD3Spec
from rayagi.config.spec import GmiSpec, NetworkSpec, RunSpec
from rayagi.device_replay.choice import WAYS
from rayagi.envs import make_env_factory
from tests.fakes.point import make_point

pytestmark = pytest.mark.usefixtures("one_torch_thread")

COMMON = {"batch_size": 32, "learning_starts": 16, "capacity": 64, "rollout_length": 8}
"""The third rollout of 32 transitions overwrites the first."""
SPEC = RunSpec(gmi=GmiSpec(num_envs=4), network=NetworkSpec(hidden=(16, 12)), seed=3)
SPECS = {
    "sac": SACSpec(**COMMON, updates_per_step=0.25),
    "sac, 3 steps": SACSpec(**COMMON, updates_per_step=0.25, n_step=3),
    "td3": TD3Spec(**COMMON, updates_per_step=0.25),
    "dqn": DQNSpec(**COMMON, updates_per_step=0.25),
    "dqn, prioritised": DQNSpec(**COMMON, updates_per_step=0.25, prioritized=True),
    "dqn, prioritised, frames": DQNSpec(**COMMON, updates_per_step=0.25, prioritized=True, n_step=3),
}


def train(name, device="cpu", way=None, iterations=3):
    """Train for some iterations, with noise that does not depend on the device.

    Args:
        name: of SPECS
        device: of networks and batches
        way: of WAYS; None: what the learner has

    Returns:
        The metrics of every iteration, and the learner.
    """
    context = GmiContext.local("", device=device)
    spec = replace(SPEC, algorithm=name.split(",")[0], learning=SPECS[name])
    make_env = make_env_factory("CartPole-v1") if name.startswith("dqn") else make_point
    if "frames" in name:
        make_env = make_env_factory("tests.fakes.echo:Stacked-v0", kwargs={"kind": "gray"})
    program = TrainingFactory(spec, make_env)(context)
    learner, generator = program.learner, torch.Generator().manual_seed(1)
    if way is not None:
        subscriptions = learner.layout.subscriptions
        learner._gatherer = WAYS[way](learner.replay, subscriptions, learner._share, torch.device(device))
    updater = learner.updater
    if name.startswith("sac"):
        updater.noise = lambda count: torch.randn((count, updater._dim), generator=generator).to(device)
    if name == "td3":
        updater.noise = lambda shape: torch.randn(shape, generator=generator).to(device)
    return [program.iterate().metrics for _ in range(iterations)], learner


@pytest.mark.parametrize("name", ["sac", "sac, 3 steps", "dqn, prioritised", "dqn, prioritised, frames"])
def test_every_way_trains_as_the_cpus_gather_does(name):
    _, plain = train(name)
    wanted = plain.updater.state_dict()["model"]
    for way in WAYS:
        metrics, learner = train(name, way=way)
        assert [each["gradient_steps"] for each in metrics] == [8, 8, 8]
        for part, tensor in learner.updater.state_dict()["model"].items():
            assert torch.equal(tensor, wanted[part]), (way, part)


def test_a_learner_on_a_cuda_device_has_the_gatherer_of_devices(monkeypatch):
    _, learner = train("sac", iterations=1)
    made = []
    monkeypatch.setattr(off_policy, "DeviceGatherer", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(learner.policy, "device", torch.device("cuda", 0))
    learner._make_gatherer()
    assert made == [(learner.replay, learner.layout.subscriptions, 32, torch.device("cuda", 0))]
