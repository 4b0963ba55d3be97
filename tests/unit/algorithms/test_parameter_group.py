"""Groups of networks with an optimiser each: what is restored, and how targets follow."""

import pytest
import torch

from actors.protocols import ActionSpec, EnvInfo
from collectives.solo import SoloCommunicator
from rayagi.algorithms.td3_bc import TD3BCSpec
from rayagi.algorithms.td3_bc.learner import TD3BCUpdater, make_model
from rayagi.config.spec import NetworkSpec

BOX = ActionSpec(kind="continuous", dim=2, low=(-1.0, -1.0), high=(1.0, 1.0))
INFO = EnvInfo(env_id="x", engine="x", obs_dim=3, action=BOX, max_episode_steps=None)


def updater(seed=0):
    spec = TD3BCSpec()
    model = make_model(INFO, NetworkSpec(hidden=(8,), activation="relu"), spec, seed)
    return TD3BCUpdater(model, spec, SoloCommunicator())


def step(made):
    for group in made.groups.values():
        group.flat.gradients.fill_(1.0)
        group.step()
    made.follow(0.5)
    made.steps += 1


def test_a_restored_updater_makes_the_steps_of_the_saved_one():
    saved, other = updater(), updater(seed=1)
    step(saved)
    state = saved.state_dict()
    step(other)
    step(other)
    other.load_state_dict(state)
    for made in (saved, other):
        step(made)
    assert other.steps == saved.steps == 2
    wanted, found = saved.state_dict(), other.state_dict()
    for name, values in wanted["model"].items():
        assert torch.equal(found["model"][name], values), name
    for network, module in wanted["targets"].items():
        for name, values in module.items():
            assert torch.equal(found["targets"][network][name], values), name


def test_restoring_clears_gradients_that_were_not_finite():
    made = updater()
    state = made.state_dict()
    for group in made.groups.values():
        group.flat.gradients.fill_(float("nan"))  # padding between parameters included
    made.load_state_dict(state)
    assert all((group.flat.gradients == 0).all() for group in made.groups.values())


def test_seconds_of_gradient_reduction_are_counted_over_all_networks_from_begin_update():
    made = updater()
    made.critics.sync_s, made.policy.sync_s = 0.25, 0.5
    assert made.sync_s == pytest.approx(0.75)
    made.begin_update()
    assert made.sync_s == 0
