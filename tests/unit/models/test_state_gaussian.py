"""``network.free_log_std = false``: the network gives the standard deviation for each state, in every algorithm."""

import math
from dataclasses import replace

import pytest
import torch

from rayagi.algorithms.trpo import TRPOSpec
from rayagi.config.errors import ConfigError
from rayagi.config.rules import checked
from rayagi.config.spec import NetworkSpec, RunSpec
from rayagi.models.heads import StateGaussianHead
from rayagi.models.networks import make_model
from tests.unit.algorithms.test_program import SPEC, assert_one_gmi_of_2n_and_two_of_n_learn_alike, build
from tests.unit.models.test_networks import INFO

NETWORK = NetworkSpec(hidden=(16, 8), free_log_std=False, initial_log_std=-0.5)


@pytest.mark.parametrize("changes", [{}, {"shared": True}, {"core": "gru", "core_size": 6}])
def test_the_standard_deviation_starts_where_it_is_set_and_depends_on_the_state(changes):
    model = make_model(INFO, replace(NETWORK, **changes))
    assert isinstance(model.head, StateGaussianHead)
    assert not model.fits_kernels
    obs, state = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)), torch.zeros(64, 1)
    outputs = (
        model.outputs(obs)
        if not changes.get("core")
        else model.step(obs, state.new_zeros(64, model.state_dim))[0]
    )
    spread = model.head.distribution(outputs).base_dist.scale
    assert spread.shape == (64, 3)
    # The last layer starts near zero: exp(-0.5) up to what it adds.
    assert spread.detach().log() == pytest.approx(-0.5 * torch.ones(64, 3), abs=0.1)
    assert spread.detach().std(0).min() > 0


@pytest.mark.parametrize("learning", [None, TRPOSpec(rollout_length=8)])
def test_every_number_of_gmis_learns_alike(learning):
    spec = replace(SPEC, network=NETWORK)
    if learning is not None:
        spec = replace(spec, algorithm="trpo", learning=learning)
        assert math.isfinite(build(spec).iterate().metrics["policy_loss"])
        return
    assert_one_gmi_of_2n_and_two_of_n_learn_alike(spec)


def test_before_the_first_step_the_learner_finds_the_probabilities_that_acted():
    spec = replace(SPEC, network=NETWORK, learning=replace(SPEC.learning, learning_rate=1e-12))
    metrics = build(spec).iterate().metrics
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert math.isfinite(metrics["entropy"])


def test_a_squashed_gaussian_has_no_such_output():
    with pytest.raises(
        ConfigError, match=r"network\.free_log_std = False: is for network\.head = 'gaussian'"
    ):
        checked(RunSpec(network=replace(NETWORK, head="squashed_gaussian")))
