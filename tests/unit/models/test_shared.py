"""Networks that policy and value share: one pass, one core, one state, and algorithms that cannot have them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.trpo import TRPOSpec
from rayagi.config.errors import ConfigError
from rayagi.config.rules import checked
from rayagi.config.spec import NetworkSpec
from rayagi.models.networks import make_model
from rayagi.models.recurrent import Sequences
from tests.unit.algorithms import test_collector_learner as decoupled
from tests.unit.algorithms.test_program import (
    SPEC,
    assert_one_gmi_of_2n_and_two_of_n_learn_alike,
    build,
)
from tests.unit.models.test_networks import INFO

CORES = pytest.mark.parametrize("core", ["none", "lstm", "gru"])
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def network(core="none"):
    return NetworkSpec(hidden=(16, 8), core=core, core_size=6, shared=True)


def test_only_the_last_layer_is_the_policy_s_or_the_value_s():
    model = make_model(INFO, network())
    shapes = [tuple(layer.weight.shape) for layer in model.network if isinstance(layer, nn.Linear)]
    assert shapes == [(16, 5), (8, 16), (3 + 1, 8)]
    weight = model.network[-1].weight
    torch.testing.assert_close(weight.norm(dim=1), torch.tensor([0.01, 0.01, 0.01, 1.0]))
    obs = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    outputs, values = model(obs)
    hidden = model.network[:-1](obs)
    torch.testing.assert_close(outputs, hidden @ weight[:3].T)
    torch.testing.assert_close(values, hidden @ weight[3])
    assert torch.equal(model.outputs(obs), outputs)
    assert torch.equal(model.values(obs), values)
    assert not model.fits_kernels


def test_weights_depend_on_the_seed_alone():
    before = torch.get_rng_state()
    one, two, other = (make_model(INFO, network(), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.network[0].weight, other.network[0].weight)


@pytest.mark.parametrize(("core", "state_dim"), [("none", 0), ("gru", 6), ("lstm", 12)])
def test_the_state_is_that_of_one_core(core, state_dim):
    assert make_model(INFO, network(core)).state_dim == state_dim


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_steps_and_passes_give_the_same_outputs_and_values(core):
    model = make_model(INFO, network(core))
    generator = torch.Generator().manual_seed(0)
    observed = torch.randn(6, 2, 5, generator=generator)
    done = torch.zeros(6, 2, dtype=torch.bool)
    done[3, 1] = True
    sequences = Sequences(torch.randn(2, model.state_dim, generator=generator), done)
    outputs, values = (each.unflatten(0, (6, 2)) for each in model(observed.flatten(0, 1), sequences))
    unrolled = model.unroll_values(observed, sequences)
    torch.testing.assert_close(unrolled.outputs.squeeze(-1), values)
    states = sequences.states
    for t in range(6):
        torch.testing.assert_close(model.step_values(observed[t], states), values[t], atol=1e-6, rtol=1e-5)
        stepped, states = model.step(observed[t], states)
        torch.testing.assert_close(stepped, outputs[t], atol=1e-6, rtol=1e-5)
        states = states * ~done[t].unsqueeze(1)
    torch.testing.assert_close(unrolled.last, states, atol=1e-6, rtol=1e-5)


def spec_of(core, **changes):
    return replace(SPEC, network=network(core), learning=replace(SPEC.learning, **changes))


@CORES
def test_before_the_first_step_the_learner_finds_the_probabilities_that_acted(core):
    program = build(spec_of(core, learning_rate=1e-12))
    for _ in range(2):
        assert program.iterate().metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)


@CORES
def test_one_gmi_of_2n_and_two_gmis_of_n_learn_alike(core):
    assert_one_gmi_of_2n_and_two_of_n_learn_alike(spec_of(core))


def test_appo_learns_with_a_shared_network_from_another_gmi_s_rollouts():
    spec = replace(decoupled.APPO, network=network("gru"))

    def parameters(program):
        for _ in range(3):
            program.iterate()
        return program.policy if hasattr(program, "policy") else program.learner.policy

    _, learner = decoupled.run_gmis(spec, 1, 1, parameters)
    start = make_model(learner.info, spec.network, spec.seed)
    assert not torch.equal(learner.model.network.output.weight, start.network.output.weight)


def test_trpo_refuses_shared_networks_with_what_to_do():
    spec = replace(SPEC, algorithm="trpo", learning=TRPOSpec(), network=network())
    with pytest.raises(ConfigError, match=r"network.shared = True: does not go with algorithm = 'trpo'.*use"):
        checked(spec)
    checked(replace(spec, algorithm="ppo", learning=PPOSpec()))
