"""Minibatch steps that a GPU repeats as one graph, run eagerly on a CPU and compared with the ordinary ones."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.gmi import GmiContext
from rayagi.algorithms import program as programs
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.ppo.captured import CapturedStepsPPOLearner
from rayagi.algorithms.ppo.learner import PPOLearner
from rayagi.config.spec import GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import make_env_factory

sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))
from no_waiting import NoWaiting

SPEC = RunSpec(
    gmi=GmiSpec(num_envs=8),
    network=NetworkSpec(hidden=(16, 8)),
    learning=PPOSpec(
        rollout_length=32, num_minibatches=2, num_epochs=2, normalize_rewards=True, lr_schedule="kl_adaptive"
    ),
    seed=3,
)
TASKS = ("CartPole-v1", "Pendulum-v1")
"""Discrete and continuous actions; the number of episodes that end differs between rollouts of the first."""


def program(task, monkeypatch=None):
    if monkeypatch is not None:
        monkeypatch.setattr(programs, "_captured", lambda *_: "steps")
    context = GmiContext.local(task)
    return TrainingFactory(replace(SPEC, env=replace(SPEC.env, id=task)), make_env_factory(task))(context)


@pytest.mark.parametrize("task", TASKS)
def test_iterations_are_those_of_the_ordinary_learner(task, monkeypatch):
    plain, captured = program(task), program(task, monkeypatch)
    assert type(plain.learner) is PPOLearner
    assert type(captured.learner) is CapturedStepsPPOLearner
    ended = set()
    for _ in range(4):
        found, expected = captured.iterate().metrics, plain.iterate().metrics
        ended.add(len(captured.rollout.finals))
        for name in (
            "policy_loss",
            "value_loss",
            "approx_kl",
            "grad_norm",
            "explained_variance",
            "learning_rate",
        ):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    assert task != "CartPole-v1" or len(ended) > 1
    weights = (each.learner.updater.flat.parameters for each in (captured, plain))
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_what_is_captured_waits_for_nothing(task, monkeypatch):
    """The optimiser's step apart, which has a form of its own for graphs."""
    learner = program(task, monkeypatch)
    learner.iterate()
    learner.learner.updater.optimiser.step = lambda: None
    with NoWaiting():
        learner.learner.run()


def test_a_saved_state_goes_on(monkeypatch):
    straight, resumed = program("CartPole-v1", monkeypatch), program("CartPole-v1", monkeypatch)
    straight.iterate()
    resumed.iterate()
    resumed.iterate()
    rollout = straight.rollout
    resumed.learner.load_state(straight.learner.shared_state(), straight.learner.local_state())
    assert resumed.learner.learn(rollout) == straight.learner.learn(rollout)
