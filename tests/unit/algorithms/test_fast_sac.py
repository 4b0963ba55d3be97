"""FastSAC's step against hand arithmetic and autograd, its networks, and what it refuses."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from actors.protocols import ActionSpec, EnvInfo
from collectives.solo import SoloCommunicator
from rayagi.algorithms.fast_sac import FAST_SAC, FastSACSpec
from rayagi.algorithms.fast_sac.learner import FastSACUpdater, make_model
from rayagi.algorithms.transitions import Transitions
from rayagi.config.errors import ConfigError
from rayagi.config.presets import preset
from rayagi.config.rules import refuse_unfit_env
from rayagi.config.spec import NetworkSpec
from rayagi.models.actor_q import NormalisedCritics
from rayagi.models.exploring_heads import SmoothlyBoundedGaussianHead

BOX = ActionSpec(kind="continuous", dim=2, low=(-1.0, 0.0), high=(1.0, 4.0))
INFO = EnvInfo(env_id="x", engine="x", obs_dim=3, action=BOX, max_episode_steps=None)
NETWORK = NetworkSpec(hidden=(16, 8), activation="silu")
THREE = {"num_atoms": 3, "v_min": -1.0, "v_max": 1.0}  # atoms -1, 0, 1
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def updater(network=NETWORK, **settings):
    spec = FastSACSpec(**settings)
    made = FastSACUpdater(make_model(INFO, network, spec, 0), spec, SoloCommunicator(), INFO, weight=1.0)
    made.begin(seed=0, learning_rate_factor=1.0)
    return made


def constant(critics, *logits):
    """Give each critic these logits, whatever it sees."""
    with torch.no_grad():
        critics.weights[-1].zero_()
        critics.biases[-1].copy_(torch.tensor(logits).unsqueeze(1))


def transitions(rewards, discounts):
    generator = torch.Generator().manual_seed(0)
    obs, actions = torch.randn(2, len(rewards), 3, generator=generator), torch.zeros(len(rewards), 2)
    return Transitions(obs[0], obs[1], actions, torch.tensor(rewards), torch.tensor(discounts))


def certain(made):
    """The first target critic is sure of 1, the second of 0."""
    constant(made.target.module, [-40.0, -40.0, 40.0], [-40.0, 40.0, -40.0])
    return made


def test_targets_subtract_the_discounted_entropy_term_unless_the_episode_ended():
    made = certain(updater(**THREE, initial_alpha=0.25))
    made._sample = lambda obs: (torch.zeros(2, 2), torch.tensor([0.4, 7.0]))
    # First row: 0.25 - 0.5 * 0.25 * 0.4 = 0.2, and + 0.5 * 1 = 0.7, or + 0. Second: terminated, so its reward alone
    found = made._targets(transitions([0.25, -0.5], [0.5, 0.0])).tolist()
    assert found[0] == [pytest.approx([0.0, 0.3, 0.7]), pytest.approx([0.5, 0.5, 0.0])]
    assert found[1] == [pytest.approx([0.0, 0.8, 0.2]), pytest.approx([0.5, 0.5, 0.0])]


def test_with_the_clip_both_critics_learn_from_the_lower_mean():
    made = certain(updater(**THREE, clipped_double=True))
    made._sample = lambda obs: (torch.zeros(1, 2), torch.zeros(1))
    assert made._targets(transitions([0.25], [0.5]))[:, 0].tolist() == [pytest.approx([0.0, 0.75, 0.25])]


def networks(critics):
    """Each critic of NormalisedCritics as torch's modules, which share its values."""
    found = []
    for k in range(2):
        layers = []
        for i, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
            linear = nn.Linear(*weight.shape[1:])
            linear.weight.data, linear.bias.data = weight[k].detach().T.clone(), bias[k, 0].detach().clone()
            layers.append(linear)
            if i < len(critics.gains):
                norm = nn.LayerNorm(weight.shape[2])
                norm.weight.data = critics.gains[i][k, 0].detach().clone()
                norm.bias.data = critics.shifts[i][k, 0].detach().clone()
                layers += [norm, nn.SiLU()]
        found.append(nn.Sequential(*layers))
    return found


def vary(critics):
    """Other gains and shifts than 1 and 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (*critics.gains, *critics.shifts):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def test_critics_are_perceptrons_with_torchs_layer_norm():
    made = updater(**THREE)
    critics = made.model.critics
    assert isinstance(critics, NormalisedCritics)
    vary(critics)
    batch = transitions([0.0] * 5, [0.0] * 5)
    inputs = torch.cat((batch.obs, batch.actions), -1)
    expected = torch.stack([network(inputs) for network in networks(critics)])
    torch.testing.assert_close(critics(batch.obs, batch.actions), expected)
    norms = [layer.normalized_shape for layer in made.model.policy if isinstance(layer, nn.LayerNorm)]
    assert norms == [(16,), (8,)]
    # A critic's layers are half as wide again
    assert [weight.shape[2] for weight in critics.weights] == [24, 12, 3]


@pytest.mark.parametrize("clipped", [True, False])
def test_gradients_are_those_of_autograd(clipped):
    made = updater(**THREE, clipped_double=clipped, initial_alpha=0.5, learning_rate=1e-12)
    batch = transitions([0.25, -0.5, 1.0], [0.5, 0.0, 0.9])
    vary(made.model.critics)
    each = networks(made.model.critics)
    state = made.generator.get_state()
    m = made._targets(batch)
    made.generator.set_state(state)
    inputs = torch.cat((batch.obs, batch.actions.tanh()), -1)
    log_p = torch.stack([network(inputs) for network in each]).log_softmax(-1)
    loss = -(m * log_p).sum(-1).mean(1).sum()
    loss.backward()
    value_loss, _, _ = made._step_critics(batch)
    torch.testing.assert_close(value_loss, loss.detach())
    critics = made.model.critics
    for k, network in enumerate(each):
        for i, weight in enumerate(critics.weights):
            torch.testing.assert_close(weight.grad[k], network[3 * i].weight.grad.T)
        for i, gain in enumerate(critics.gains):
            torch.testing.assert_close(gain.grad[k, 0], network[3 * i + 1].weight.grad)
            torch.testing.assert_close(critics.shifts[i].grad[k, 0], network[3 * i + 1].bias.grad)

    state = made.generator.get_state()
    policy = copy.deepcopy(made.model.policy)
    noise = made.noise(3)
    made.generator.set_state(state)
    mean, log_std = policy(batch.obs).chunk(2, -1)
    log_std = -2.5 + 2.5 * log_std.tanh()
    u = torch.distributions.Normal(mean, log_std.exp())
    raw = mean + log_std.exp() * noise
    log_probs = (u.log_prob(raw) - (1 - raw.tanh().square()).log()).sum(-1)
    inputs = torch.cat((batch.obs, raw.tanh()), -1)
    q = torch.stack([network(inputs) for network in each]).softmax(-1) @ torch.tensor([-1.0, 0.0, 1.0])
    loss = (0.5 * log_probs - (q.amin(0) if clipped else q.mean(0))).mean()
    loss.backward()
    torch.testing.assert_close(made._step_policy(batch.obs), loss.detach())
    for found, expected in zip(made.model.policy.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_the_policy_is_stepped_with_every_fourth_step_and_the_temperature_with_each():
    made = updater()
    moved, alphas = [], [float(made.temperature.log_alpha.detach())]
    for _ in range(4):
        before = made.policy.flat.parameters.detach().clone()
        made.step(transitions([1.0, 0.0], [0.9, 0.0]))
        made.steps += 1
        moved.append(not torch.equal(made.policy.flat.parameters, before))
        alphas.append(float(made.temperature.log_alpha.detach()))
    assert moved == [False, False, False, True]
    assert len(set(alphas)) == 5


def test_the_temperature_falls_while_the_entropy_is_above_its_target_and_rises_below():
    made = updater(learning_rate=0.01)
    start = float(made.temperature.log_alpha.detach())
    made._step_temperature(torch.tensor(-3.0))  # entropy 3, target 0
    lower = float(made.temperature.log_alpha.detach())
    assert lower == pytest.approx(start - 0.01)  # Adam's first step is the learning rate
    other = updater(learning_rate=0.01)
    other._step_temperature(torch.tensor(3.0))
    assert float(other.temperature.log_alpha.detach()) == pytest.approx(start + 0.01)


def test_adam_forgets_squares_with_0_95():
    made = updater()
    made.critics.flat.gradients.fill_(2.0)
    made.critics.step()
    # (1 - 0.95) 2^2
    assert made.critics.adam.exp_avg_sq.flatten()[0].item() == pytest.approx(0.2)
    assert made.alpha.adam.betas == (0.9, 0.95)


def test_standard_deviations_stay_between_their_bounds():
    head = SmoothlyBoundedGaussianHead(BOX.low, BOX.high, (-5.0, 0.0))
    _, log_std = head.gaussian(torch.tensor([[0.0, 0.0, 0.0, math.inf], [0.0, 0.0, -math.inf, 0.5]]))
    assert log_std.tolist() == [[-2.5, 0.0], [-5.0, pytest.approx(-2.5 + 2.5 * math.tanh(0.5))]]


def test_a_restored_updater_has_the_temperature():
    made, other = updater(initial_alpha=0.5), updater()
    made.step(transitions([1.0, 0.0], [0.9, 0.0]))
    other.load_state_dict(made.state_dict())
    assert torch.equal(other.temperature.log_alpha, made.temperature.log_alpha)
    assert torch.equal(other.alpha.adam.exp_avg, made.alpha.adam.exp_avg)


def test_values_of_a_small_task_become_right_and_the_policy_finds_the_better_action():
    # One step: reward 1 - 4 (tanh(u) - 0.5)^2 of the first number of the action
    wider = NetworkSpec(hidden=(32, 32), activation="silu")
    made = updater(
        wider, learning_rate=3e-3, policy_delay=2, v_min=-8.5, v_max=1.5, num_atoms=21, target_entropy=-4.0
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        obs, actions = torch.randn(64, 3, generator=generator), torch.rand(64, 2, generator=generator) * 2 - 1
        rewards = 1 - 4 * (actions[:, 0] - 0.5).square()
        made.step(Transitions(obs, obs, (0.999 * actions).atanh(), rewards, torch.zeros(64)))
        made.steps += 1
    obs = torch.randn(32, 3, generator=generator)
    mode = made.model.head.mode(made.model.outputs(obs)).tanh()
    assert mode[:, 0].mean().item() == pytest.approx(0.5, abs=0.2)
    assert made.model.values(obs).mean().item() == pytest.approx(1.0, abs=0.3)


def test_spaces_and_settings_that_do_not_fit_are_refused_with_what_does():
    spec = replace(preset("HalfCheetah-v5", "fast_sac"), network=NETWORK)
    refuse_unfit_env(spec, INFO)
    choice = replace(INFO, action=ActionSpec(kind="discrete", dim=1, num_choices=2))
    with pytest.raises(ConfigError, match=r"needs a box of reals as actions.*'dqn'"):
        refuse_unfit_env(spec, choice)
    assert not list(FAST_SAC.settings().broken_rules("fast_sac"))
    for settings, said in (
        ({"num_atoms": 1}, "use algorithm 'sac'"),
        ({"v_min": 20.0}, "less than fast_sac.v_max"),
        ({"policy_delay": 0}, "at least 1"),
        ({"initial_alpha": 0.0}, "greater than 0"),
        ({"alpha_learning_rate": -1.0}, "at least 0"),
        ({"target_entropy": math.nan}, "fast_sac.target_entropy"),
    ):
        assert said in " ".join(map(str, FastSACSpec(**settings).broken_rules("fast_sac")))


def test_defaults_that_do_not_depend_on_task_or_machine_are_the_papers():
    spec = FastSACSpec()
    assert (spec.learning_rate, spec.critic_learning_rate, spec.alpha_learning_rate) == (3e-4, None, None)
    assert (spec.gamma, spec.tau, spec.n_step, spec.policy_delay) == (0.97, 0.125, 1, 4)
    assert (spec.num_atoms, spec.v_min, spec.v_max, spec.clipped_double) == (101, -20.0, 20.0, False)
    assert (spec.initial_alpha, spec.target_entropy, spec.weight_decay) == (0.001, 0.0, 0.001)
    assert (spec.normalize_obs, spec.layer_norm, spec.max_grad_norm) == (True, True, 0.0)


def test_the_temperature_rises_while_the_entropy_is_below_its_target():
    """dJ / d log alpha = -alpha (E[log pi] + target entropy): log pi 3 and the target 1 give -0.5 * 4."""
    made = updater(**THREE, initial_alpha=0.5, target_entropy=1.0)
    made._sample = lambda obs: (torch.zeros(len(obs), 2), torch.full((len(obs),), 3.0))
    made.step(transitions([0.0], [0.9]))
    assert float(made.alpha.flat.gradients[0]) == pytest.approx(-2.0)
    assert made.temperature.log_alpha.exp() > 0.5


def test_critics_decay_by_their_own_learning_rate():
    made = updater(**THREE, learning_rate=1e-3, critic_learning_rate=0.5, weight_decay=0.1)
    made.critics.flat.gradients.zero_()
    before = made.critics.flat.parameters.detach().clone()
    made._step_decayed(made.critics)
    torch.testing.assert_close(made.critics.flat.parameters.detach(), before * (1 - 0.5 * 0.1))
