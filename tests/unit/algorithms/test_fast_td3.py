"""FastTD3's step against hand arithmetic, its noise levels, and what it refuses."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from actors.protocols import ActionSpec
from collectives.solo import SoloCommunicator
from rayagi.algorithms.fast_td3 import FAST_TD3, FastTD3Spec
from rayagi.algorithms.fast_td3.learner import FastTD3Model, FastTD3Updater
from rayagi.algorithms.transitions import Transitions
from rayagi.config.errors import ConfigError
from rayagi.config.presets import preset
from rayagi.config.rules import refuse_unfit_env
from rayagi.config.spec import NetworkSpec
from tests.unit.algorithms.test_fast_sac import BOX, INFO, THREE, constant, transitions

NETWORK = NetworkSpec(hidden=(16, 8), activation="relu")
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def model(spec, info=INFO, seed=0, network=NETWORK):
    return FastTD3Model(info, network, spec, seed)


def updater(network=NETWORK, **settings):
    spec = FastTD3Spec(**settings)
    made = FastTD3Updater(model(spec, network=network), spec, SoloCommunicator(), INFO, weight=1.0)
    made.begin(seed=0, learning_rate_factor=1.0)
    return made


def targets(**settings):
    made = updater(**THREE, **settings)
    # The first target critic is sure of 1, the second of 0
    constant(made.target.module, [-40.0, -40.0, 40.0], [-40.0, 40.0, -40.0])
    return made._targets(transitions([0.25], [0.5]))


def test_both_critics_learn_from_the_distribution_of_the_lower_mean():
    # 0.25 + 0.5 * 0 = 0.25: a quarter to 1, the rest to 0
    assert targets()[:, 0].tolist() == [pytest.approx([0.0, 0.75, 0.25])]


def test_the_lower_mean_is_that_of_what_the_support_holds():
    made = updater(**THREE)
    # Means 0.2 and 0.1. Moved by 0.5: 0.4 at -0.5 and 0.6 at the end, 1, a mean of 0.4; 0.9 at 0.5 and 0.1 at 1, 0.55.
    constant(made.target.module, [math.log(0.4), -40.0, math.log(0.6)], [-40.0, math.log(0.9), math.log(0.1)])
    found = made._targets(transitions([0.5], [1.0]))
    assert found[:, 0].tolist() == [pytest.approx([0.2, 0.2, 0.6])]


def test_without_the_clip_each_critic_has_its_own_target():
    # 0.25 + 0.5 * 1 = 0.75
    found = targets(clipped_double=False)[:, 0].tolist()
    assert found == [pytest.approx([0.0, 0.25, 0.75]), pytest.approx([0.0, 0.75, 0.25])]


def test_the_loss_is_the_sum_of_both_critics_cross_entropies():
    made = updater(**THREE)
    constant(made.target.module, [-40.0, -40.0, 40.0], [-40.0, 40.0, -40.0])
    constant(made.model.critics, [0.0] * 3, [0.0, math.log(2.0), 0.0])  # p: thirds; 1/4, 1/2, 1/4
    # m = (0, 0.75, 0.25): log 3, and 0.75 log 2 + 0.25 log 4 = 1.25 log 2
    assert made.step(transitions([0.25], [0.5]))[0].item() == pytest.approx(math.log(3) + 1.25 * math.log(2))


def logits_of(critics, obs, actions):
    """Each critic's logits, by autograd."""
    hidden = torch.cat((obs, actions), -1)
    for layer, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
        hidden = hidden @ weight + bias
        hidden = hidden if layer == len(critics.weights) - 1 else hidden.relu()
    return hidden


@pytest.mark.parametrize("clipped", [True, False])
def test_gradients_by_hand_are_those_of_autograd(clipped):
    made = updater(**THREE, clipped_double=clipped, max_grad_norm=0.0, learning_rate=1e-12)
    batch = transitions([0.25, -0.5, 1.0], [0.5, 0.0, 0.9])
    with torch.no_grad():
        made.model.critics.weights[-1].normal_(generator=torch.Generator().manual_seed(1))
    critics, policy = copy.deepcopy(made.model.critics), copy.deepcopy(made.model.policy)
    state = made.generator.get_state()
    m = made._targets(batch)
    made.generator.set_state(state)
    log_p = logits_of(critics, batch.obs, batch.actions).log_softmax(-1)
    (-(m * log_p).sum(-1).mean(1).sum()).backward()
    made._step_critics(batch)
    for found, expected in zip(made.model.critics.parameters(), critics.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    p = logits_of(critics, batch.obs, policy(batch.obs).tanh()).softmax(-1)
    q = p @ torch.tensor([-1.0, 0.0, 1.0])
    loss = -(q.amin(0) if clipped else q.mean(0)).mean()
    loss.backward()
    torch.testing.assert_close(made._step_policy(batch.obs), loss.detach())
    for found, expected in zip(made.model.policy.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_the_policy_is_stepped_with_every_second_step_of_the_critics():
    made = updater()
    moved = []
    for _ in range(4):
        before = made.policy.flat.parameters.detach().clone()
        made.step(transitions([1.0, 0.0], [0.9, 0.0]))
        made.steps += 1
        moved.append(not torch.equal(made.policy.flat.parameters, before))
    assert moved == [False, True, False, True]


def test_weights_decay_beside_adams_step():
    made = updater(weight_decay=0.5, learning_rate=0.1, max_grad_norm=0.0)
    before = made.policy.flat.parameters.detach().clone()
    made.policy.flat.gradients.zero_()
    made._step_decayed(made.policy)
    # No gradient: p (1 - 0.1 * 0.5)
    assert torch.allclose(made.policy.flat.parameters, 0.95 * before)


def test_values_of_a_small_task_become_right_and_the_policy_finds_the_better_action():
    # One step: reward 1 - 4 (a - 0.5)^2 of the first number of the action
    wider = NetworkSpec(hidden=(32, 32), activation="relu")
    made = updater(wider, learning_rate=3e-3, weight_decay=0.0, v_min=-8.5, v_max=1.5, num_atoms=21)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        obs, actions = torch.randn(64, 3, generator=generator), torch.rand(64, 2, generator=generator) * 2 - 1
        rewards = 1 - 4 * (actions[:, 0] - 0.5).square()
        made.step(Transitions(obs, obs, actions, rewards, torch.zeros(64)))
        made.steps += 1
    obs = torch.randn(32, 3, generator=generator)
    assert made.model.head.mode(made.model.outputs(obs))[:, 0].mean().item() == pytest.approx(0.5, abs=0.2)
    assert made.model.values(obs).mean().item() == pytest.approx(1.0, abs=0.3)


def noise(number=0, first=0, envs=3, steps=2000, **settings):
    spec = FastTD3Spec(noise_min=0.1, noise_max=0.9, rollout_length=500, **settings)
    return model(spec).head.noise(steps, envs, seed=1, first_env_index=first, number=number)


def test_each_environment_has_a_noise_level_of_its_own_for_a_thousand_steps():
    levels = noise().std((0, 2))
    assert levels.min() > 0.09
    assert levels.max() < 0.95
    assert len(set(levels.mul(10).round().tolist())) > 1
    # Rollouts 0 and 1 are steps 0 to 999, rollout 2 begins at 1000
    assert torch.allclose(noise(1).std((0, 2)), levels, rtol=0.1)
    assert not torch.allclose(noise(2).std((0, 2)), levels, rtol=0.1)
    assert torch.equal(noise(first=1, envs=2), noise()[:, 1:])


def test_actions_are_clipped_and_reach_the_environment_in_its_box():
    head = model(FastTD3Spec()).head
    outputs = torch.tensor([[0.0, 100.0]])
    assert head.mode(outputs).tolist() == [[0.0, 1.0]]
    sampled = head.sample(outputs, torch.tensor([[0.3, 5.0]]))
    assert sampled.tolist() == [[pytest.approx(0.3), 1.0]]
    assert head.environment_actions(sampled).tolist() == [[pytest.approx(0.3), 4.0]]


def test_the_density_is_the_mean_over_the_levels():
    head = model(FastTD3Spec(noise_min=0.5, noise_max=0.5)).head
    # One level: N(0; 0, 0.5)^2, and the second action's box is twice as wide
    density = (0.5 * math.sqrt(2 * math.pi)) ** -2 / 2
    assert head.log_prob(torch.zeros(1, 2), torch.zeros(1, 2)).item() == pytest.approx(math.log(density))


def test_spaces_and_settings_that_do_not_fit_are_refused_with_what_does():
    spec = replace(preset("HalfCheetah-v5", "fast_td3"), network=NETWORK)
    refuse_unfit_env(spec, INFO)
    choice = replace(INFO, action=ActionSpec(kind="discrete", dim=1, num_choices=2))
    endless = replace(INFO, action=replace(BOX, high=(1.0, math.inf)))
    with pytest.raises(ConfigError, match=r"needs a box of reals as actions.*'dqn'"):
        refuse_unfit_env(spec, choice)
    with pytest.raises(ConfigError, match="finite bounds"):
        refuse_unfit_env(spec, endless)
    assert not list(FAST_TD3.settings().broken_rules("fast_td3"))
    for settings, said in (
        ({"num_atoms": 1}, "use algorithm 'td3'"),
        ({"noise_min": 0.5}, "at most fast_td3.noise_max = 0.4"),
        ({"v_min": 250.0}, "less than fast_td3.v_max"),
        ({"policy_delay": 0}, "at least 1"),
        ({"weight_decay": -0.1}, "at least 0"),
    ):
        assert said in " ".join(map(str, FastTD3Spec(**settings).broken_rules("fast_td3")))


def test_defaults_that_do_not_depend_on_task_or_machine_are_the_papers():
    spec = FastTD3Spec()
    assert (spec.learning_rate, spec.critic_learning_rate, spec.weight_decay) == (3e-4, None, 0.1)
    assert (spec.gamma, spec.tau, spec.n_step, spec.policy_delay) == (0.97, 0.1, 1, 2)
    assert (spec.num_atoms, spec.v_min, spec.v_max, spec.clipped_double) == (101, -250.0, 250.0, True)
    assert (spec.noise_min, spec.noise_max) == (0.001, 0.4)
    assert (spec.target_noise, spec.target_noise_clip) == (0.001, 0.5)
    assert (spec.normalize_obs, spec.layer_norm, spec.max_grad_norm) == (True, False, 0.0)


def test_targets_follow_the_critics_with_every_step_whatever_the_policy_s_delay():
    made = updater(**THREE, policy_delay=2)
    before = made.target.flat.parameters.clone()
    made.step(transitions([1.0, 0.5], [0.9, 0.9]))
    assert not torch.equal(before, made.target.flat.parameters)


def test_target_noise_has_its_standard_deviation():
    made = updater(**THREE, target_noise=0.1, target_noise_clip=9.0)
    batch = transitions([0.0] * 500, [0.9] * 500)
    with torch.no_grad():
        actions, _ = made._next_actions(batch)
        modes = made.model.head.mode(made.model.policy(batch.next_obs))
    assert float((actions - modes).std()) == pytest.approx(0.1, rel=0.1)
