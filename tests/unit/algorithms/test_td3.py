"""TD3: its losses against explicit ones, its delay, its state, and that it learns."""

from dataclasses import replace

import pytest
import torch

from collectives.solo import SoloCommunicator
from rayagi.algorithms.td3 import TD3Spec
from rayagi.algorithms.td3.learner import TD3Updater, make_model
from rayagi.algorithms.transitions import Transitions
from rayagi.config.rules import broken_rules
from rayagi.config.spec import GmiSpec, RunSpec
from tests.unit.algorithms.test_program import build, run_gmis
from tests.unit.algorithms.test_sac import (
    INFO,
    NETWORK,
    assert_gradients,
    batch_of,
    gradients_of,
    perceptron,
    plain_networks,
    values,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SETTINGS = TD3Spec(
    batch_size=32,
    learning_starts=16,
    capacity=1000,
    rollout_length=8,
    learning_rate=1e-3,
    updates_per_step=0.25,
)
SPEC = RunSpec(algorithm="td3", gmi=GmiSpec(num_envs=4), network=NETWORK, learning=SETTINGS, seed=3)


def updater(spec=SETTINGS):
    return TD3Updater(make_model(INFO, NETWORK, spec, seed=1), spec, SoloCommunicator(), INFO, weight=1.0)


def test_a_step_follows_algorithm_1():
    """Target policy smoothing, twin critics and the deterministic policy gradient, explicitly in double precision."""
    spec = replace(SETTINGS, target_noise=0.4, policy_delay=1)
    made, batch = updater(spec), batch_of()
    batch = Transitions(*batch[:2], batch.actions.clamp(-1, 1), *batch[3:])
    with torch.no_grad():  # targets that differ from the networks
        made.policy.flat.parameters.mul_(3.0)
        made.targets["critics"].flat.parameters.mul_(0.8)
        made.targets["policy"].flat.parameters.mul_(2.0)
    noise = torch.randn(32, 2, generator=torch.Generator().manual_seed(1))
    assert (0.4 * noise).abs().max() > 0.5  # some of it is clipped
    policy, *critics = plain_networks(made.model)
    obs, next_obs, actions, rewards, discounts = (field.double() for field in batch[:5])
    # Of the first policy, since only the current one was multiplied by 3.
    target_policy = [[2 / 3 * part for part in layer] for layer in policy]
    targets = [[(0.8 * weight, 0.8 * bias) for weight, bias in critic] for critic in critics]
    smoothed = perceptron(target_policy, next_obs).tanh() + (0.4 * noise.double()).clamp(-0.5, 0.5)
    q = torch.minimum(*(values(each, next_obs, smoothed.clamp(-1, 1)) for each in targets))
    y = (rewards + discounts * q).detach()
    loss = sum((values(each, obs, actions) - y).square().mean() for each in critics)
    wanted = gradients_of(loss, critics)
    made.noise = lambda shape: noise
    measured = dict(zip(made.measured, made.step(batch).tolist(), strict=True))
    assert measured["value_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    parameters, layers = list(made.model.critics.parameters()), len(critics[0])
    found = [
        part
        for k in range(2)
        for i in range(layers)
        for part in (parameters[i].grad[k], parameters[layers + i].grad[k, 0])
    ]
    assert_gradients(found, wanted)
    # -E[Q_1(s, pi(s))] with the critics after their step.
    _, first, _ = plain_networks(made.model)
    loss = -values(first, obs, perceptron(policy, obs).tanh()).mean()
    wanted = gradients_of(loss, [policy])
    assert measured["policy_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_gradients(
        [p.grad.T if p.grad.dim() == 2 else p.grad for p in made.model.policy.parameters()], wanted
    )


def test_policy_and_targets_step_with_every_third_step_of_the_critics():
    made = updater(replace(SETTINGS, policy_delay=3))
    moved = []
    for i in range(6):
        before = made.policy.flat.parameters.clone(), made.targets["critics"].flat.parameters.clone()
        made.step(batch_of(seed=i))
        made.steps += 1
        now = made.policy.flat.parameters, made.targets["critics"].flat.parameters
        moved.append([not torch.equal(*pair) for pair in zip(before, now, strict=True)])
    assert moved == [[False] * 2, [False] * 2, [True] * 2] * 2


def test_exploration_adds_noise_to_actions_within_the_box():
    head = make_model(INFO, NETWORK, SETTINGS, 0).head
    outputs, noise = torch.tensor([[0.0, 9.0]]), torch.tensor([[2.0, 3.0]])
    assert head.sample(outputs, noise).tolist() == [[pytest.approx(0.2), 1.0]]
    assert head.environment_actions(head.mode(outputs)).tolist() == [[0.0, pytest.approx(5.0, abs=1e-6)]]


def test_replicas_stay_equal_and_a_resumed_run_goes_on():
    def work(program):
        for _ in range(4):
            program.iterate()
        return program.state_dict()

    one, other = run_gmis(SPEC, 2, work)
    for name, tensor in one["shared"]["learner"]["model"].items():
        assert torch.equal(tensor, other["shared"]["learner"]["model"][name]), name
    resumed = build(SPEC)
    resumed.load_state_dict(one)
    assert str(resumed.state_dict()["shared"]) == str(one["shared"])
    assert resumed.iterate().metrics["gradient_steps"] == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [("exploration_noise", 0.0), ("target_noise", -1.0), ("target_noise_clip", -0.1), ("policy_delay", 0)],
)
def test_settings_out_of_range_are_refused(name, value):
    spec = replace(SPEC, learning=replace(SETTINGS, **{name: value}))
    assert f"td3.{name}" in {error.path for error in broken_rules(spec)}


def test_it_learns_to_push_the_point_to_the_middle():
    settings = replace(SETTINGS, learning_rate=5e-3, gamma=0.9, updates_per_step=0.5)
    program = build(replace(SPEC, learning=settings))
    before = program.evaluate(32, seed=5).mean_return()
    for _ in range(40):
        program.iterate()
    assert program.evaluate(32, seed=5).mean_return() > 0.75 * before


CLONING = replace(SETTINGS, cloning=0.4, cloning_end=0.1, cloning_steps=64, policy_delay=1)


def bounded_batch(size=32, seed=0):
    batch = batch_of(size, seed)
    return Transitions(*batch[:2], batch.actions.clamp(-1, 1), *batch[3:])


def test_a_cloning_term_is_that_of_td3_bc():
    """-E[Q_1(s, pi(s))] / E|Q_1| + w E[|pi(s) - a|^2 / dim], explicitly in double precision; E|Q_1| is a constant."""
    made, batch = updater(CLONING), bounded_batch()
    with torch.no_grad():
        made.policy.flat.parameters.mul_(3.0)
    policy, *_ = plain_networks(made.model)
    measured = dict(zip(made.measured, made.step(batch).tolist(), strict=True))
    _, first, _ = plain_networks(made.model)  # after their step
    obs, actions = batch.obs.double(), perceptron(policy, batch.obs.double()).tanh()
    q = values(first, obs, actions)
    cloning = (actions - batch.actions.double()).square().mean()
    loss = -q.mean() / q.detach().abs().mean() + 0.4 * cloning
    assert 0.4 * float(cloning.detach()) > 0.02  # it counts
    assert measured["policy_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    found = [p.grad.T if p.grad.dim() == 2 else p.grad for p in made.model.policy.parameters()]
    assert_gradients(found, gradients_of(loss, [policy]))


class TwoTrainers(SoloCommunicator):
    """Of a trainer whose peer's values are three times its own."""

    world_size = 2

    def all_reduce(self, tensor, op="sum"):
        assert op == "mean"
        tensor.mul_(2.0)


def test_the_scale_of_values_is_that_of_all_trainers():
    made = updater(CLONING)
    made.communicator = TwoTrainers()
    made.weight = 0.5  # a quarter of the batch
    # (0.5 * mean |1, -3| * 2) = 2
    assert float(made._one_over_size(torch.tensor([1.0, -3.0]))) == pytest.approx(0.5)
    assert float(made._one_over_size(torch.zeros(2))) == pytest.approx(1e8)


def test_the_weight_of_cloning_decays_exponentially_with_environment_steps():
    def weights(program):
        found = []
        for _ in range(4):
            program.iterate()
            found.append(program.learner.updater.cloning)
        return found

    # Rollouts of 8 steps of 4 environments; before them 0, 32, 64 and 96 steps: 0.4 (1/4)^(steps / 64), then constant
    program = build(replace(SPEC, learning=CLONING))
    wanted = pytest.approx([0.4, 0.2, 0.1, 0.1])
    assert weights(program) == wanted
    assert run_gmis(replace(SPEC, learning=replace(CLONING, cloning_steps=128)), 2, weights) == [wanted] * 2
    resumed = build(replace(SPEC, learning=CLONING))
    resumed.load_state_dict(program.state_dict())
    assert weights(resumed) == pytest.approx([0.1] * 4)


def test_weights_of_cloning_that_would_rise_are_refused():
    def paths(**cloning):
        settings = replace(SETTINGS, **cloning)
        return [error.path for error in broken_rules(replace(SPEC, learning=settings))]

    assert paths(cloning=0.1, cloning_end=0.2) == ["td3.cloning_end"]
    assert paths(cloning=0.2, cloning_end=0.2) == paths(cloning=0.0, cloning_end=0.2) == []
    assert paths(cloning=-1.0) == ["td3.cloning"]
    assert paths(cloning=0.4, cloning_end=0.0, cloning_steps=0) == ["td3.cloning_end", "td3.cloning_steps"]


def test_target_actions_stay_within_the_bounds():
    made = updater(replace(SETTINGS, target_noise=0.4, policy_delay=1))
    seen, critic = [], made.target_critics.module

    class Recorded(torch.nn.Module):
        def forward(self, obs, actions):
            seen.append(actions)
            return critic(obs, actions)

    made.target_critics.module = Recorded()
    with torch.no_grad():
        made.target_policy.flat.parameters.mul_(1000.0)  # actions of about -1 and 1
    made.noise = torch.ones
    batch = batch_of()
    made.step(Transitions(*batch[:2], batch.actions.clamp(-1, 1), *batch[3:]))
    assert float(seen[0].max()) == 1.0
    assert float(seen[0].min()) > -0.9  # -1 and noise of 0.4 are not clamped
