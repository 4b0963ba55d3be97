"""SAC: its losses against explicit ones, its layouts against each other, its replay, its state, and that it learns."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from actors.errors import NonFiniteError
from actors.protocols import ActionSpec, EnvInfo
from collectives.solo import SoloCommunicator
from rayagi.algorithms.sac import SACSpec
from rayagi.algorithms.sac.learner import SACUpdater, make_model
from rayagi.algorithms.transitions import Transitions
from rayagi.config.errors import ConfigError
from rayagi.config.rules import broken_rules, checked, refuse_unfit_env
from rayagi.config.spec import GmiSpec, NetworkSpec, RunSpec
from tests.fakes.point import PointEnv, make_poisoned_point
from tests.unit.algorithms.test_program import build, run_gmis, run_members

INFO = EnvInfo(
    env_id="Box",
    engine="",
    obs_dim=5,
    action=ActionSpec(kind="continuous", dim=2, low=(-1.0, -3.0), high=(1.0, 5.0)),
    max_episode_steps=None,
)
NETWORK = NetworkSpec(hidden=(16, 12), activation="relu")
SETTINGS = SACSpec(
    batch_size=32,
    learning_starts=16,
    capacity=1000,
    rollout_length=8,
    learning_rate=1e-3,
    updates_per_step=0.25,
)
SPEC = RunSpec(algorithm="sac", gmi=GmiSpec(num_envs=4), network=NETWORK, learning=SETTINGS, seed=3)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def updater(spec=SETTINGS):
    return SACUpdater(make_model(INFO, NETWORK, spec, seed=1), spec, SoloCommunicator(), INFO, weight=1.0)


def batch_of(size=32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return Transitions(
        normal(size, 5), normal(size, 5), normal(size, 2), normal(size), (normal(size) > 0) * 0.99
    )


def perceptron(parameters, inputs):
    """The network with these weights (fan_in, fan_out) and biases, in plain operations."""
    for i, (weight, bias) in enumerate(parameters):
        inputs = inputs @ weight + bias
        if i < len(parameters) - 1:
            inputs = inputs.clamp(min=0)
    return inputs


def given(noises):
    """In place of SACUpdater.noise: these, in turn."""
    left = iter(noises)
    return lambda count: next(left)


def plain_networks(model):
    """Weights (fan_in, fan_out) and biases of the policy and of each critic, in double precision."""
    layers = [layer for layer in model.policy if hasattr(layer, "weight")]
    networks = [[(layer.weight.T, layer.bias) for layer in layers]]
    networks += [
        [
            (weight[k], bias[k, 0])
            for weight, bias in zip(model.critics.weights, model.critics.biases, strict=True)
        ]
        for k in range(2)
    ]
    return [
        [tuple(part.detach().double().clone().requires_grad_() for part in layer) for layer in network]
        for network in networks
    ]


def sampled(policy, obs, noise):
    """Actions in [-1, 1] and their log densities, by torch's distributions."""
    mean, log_std = perceptron(policy, obs).chunk(2, -1)
    normal = Normal(mean, log_std.clamp(-20, 2).exp())
    u = mean + normal.scale * noise
    squashed = TransformedDistribution(normal, [TanhTransform(cache_size=1)])
    action = squashed.transforms[0](u)
    return action, squashed.log_prob(action).sum(-1)


def values(critic, obs, actions):
    return perceptron(critic, torch.cat((obs, actions), -1)).squeeze(-1)


def gradients_of(loss, networks):
    """In the order of the parameters, with PyTorch's layout of a policy's weights."""
    return torch.autograd.grad(loss, [part for network in networks for layer in network for part in layer])


def assert_gradients(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


def test_a_step_follows_the_papers_losses():
    """J(Q), J(pi) and J(alpha) with explicit networks and distributions, in double precision."""
    spec = replace(SETTINGS, initial_alpha=0.3, alpha_learning_rate=0.01)
    made, batch = updater(spec), batch_of()
    with torch.no_grad():  # the first policy's outputs are near 0, and targets start equal to the critics
        made.policy.flat.parameters.mul_(3.0)
        made.targets["critics"].flat.parameters.mul_(0.8)
    noises = [torch.randn(32, 2, generator=torch.Generator().manual_seed(each)) for each in (1, 2)]
    policy, *critics = plain_networks(made.model)
    obs, next_obs, actions, rewards, discounts = (field.double() for field in batch[:5])

    # Critics: y = r + discount (min_i Q'_i(s', a') - alpha log pi(a'|s')).
    targets = [[(0.8 * weight, 0.8 * bias) for weight, bias in critic] for critic in critics]
    next_actions, next_log_probs = sampled(policy, next_obs, noises[0].double())
    q = torch.minimum(*(values(each, next_obs, next_actions) for each in targets))
    y = (rewards + discounts * (q - 0.3 * next_log_probs)).detach()
    loss = sum(0.5 * (values(each, obs, actions.tanh()) - y).square().mean() for each in critics)
    wanted = gradients_of(loss, critics)
    made.noise = given(noises)
    measured = dict(zip(made.measured, made.step(batch).tolist(), strict=True))
    assert measured["value_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    of_critics = list(made.model.critics.parameters())  # weights of both critics, then biases
    layers = len(critics[0])
    found = [
        part
        for k in range(2)
        for i in range(layers)
        for part in (of_critics[i].grad[k], of_critics[layers + i].grad[k, 0])
    ]
    assert_gradients(found, wanted)

    # Policy: E[alpha log pi(a|s) - min_i Q_i(s, a)] with the critics after their step.
    _, *stepped = plain_networks(made.model)
    acts, log_probs = sampled(policy, obs, noises[1].double())
    q = torch.minimum(*(values(each, obs, acts) for each in stepped))
    loss = (0.3 * log_probs - q).mean()
    wanted = gradients_of(loss, [policy])
    assert measured["policy_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    found = [p.grad.T if p.grad.dim() == 2 else p.grad for p in made.model.policy.parameters()]
    assert_gradients(found, wanted)

    # Temperature: d/d log alpha of -alpha E[log pi + target entropy], whose target is minus the number of actions.
    wanted = -0.3 * (float(log_probs.detach().mean()) - 2)
    assert float(made.temperature.log_alpha.grad) == pytest.approx(wanted, rel=1e-4)
    assert float(made.temperature.log_alpha.detach()) == pytest.approx(
        math.log(0.3) - 0.01 * math.copysign(1, wanted), abs=1e-4
    )


def test_targets_follow_by_polyak_averaging():
    made = updater(replace(SETTINGS, tau=0.25))
    before = made.targets["critics"].flat.parameters.clone()
    made.step(batch_of())
    after = made.critics.flat.parameters.detach()
    assert not torch.equal(before, after)
    torch.testing.assert_close(made.targets["critics"].flat.parameters, 0.75 * before + 0.25 * after)


def test_a_temperature_of_rate_0_stays():
    made = updater(replace(SETTINGS, alpha_learning_rate=0.0, initial_alpha=0.2))
    for seed in range(3):
        made.step(batch_of(seed=seed))
    assert float(made.temperature.log_alpha.detach()) == pytest.approx(math.log(0.2))


class Member:
    """A step of one of two trainers on its half of a batch."""

    def __init__(self, communicator):
        self.updater = SACUpdater(
            make_model(INFO, NETWORK, SETTINGS, seed=1 + communicator.rank),  # rank 0's parameters count
            SETTINGS,
            communicator,
            INFO,
            weight=(20 if communicator.rank == 0 else 12) / 16,
        )

    def step(self, batch, noises):
        self.updater.noise = given(noises)
        self.updater.step(batch)
        return [group.flat.parameters.detach().clone() for group in self.updater.groups.values()]


def test_two_trainers_make_the_step_of_the_merged_batch():
    noises = [torch.randn(32, 2, generator=torch.Generator().manual_seed(each)) for each in (1, 2)]
    whole = Member(SoloCommunicator())
    whole.updater.weight = 1.0
    wanted = whole.step(batch_of(), noises)
    parts = slice(0, 20), slice(20, 32)

    def half(communicator):
        part = parts[communicator.rank]
        batch = Transitions(*(field[part] for field in batch_of()[:5]))
        return Member(communicator).step(batch, [noise[part] for noise in noises])

    first, second = run_members(2, half)
    for one, other, both in zip(first, second, wanted, strict=True):
        assert torch.equal(one, other)
        # Adam's first step is the sign of the gradient: only elements whose gradient is rounding noise may differ.
        assert ((one - both).abs() < 1e-6).float().mean() > 0.999


def test_layouts_keep_equal_replicas_and_the_replays_of_their_own_environments():
    def work(program):
        for _ in range(4):
            metrics = program.iterate().metrics
        state = program.state_dict()["shared"]["learner"]
        return state, metrics["replay_transitions"], metrics["gradient_steps"]

    (one, size, steps), (other, *same) = run_gmis(SPEC, 2, work)
    assert (
        (size, steps) == tuple(same) == (4 * 8 * 4, 8 * 8 / 4)
    )  # of 4 environments each; one step for each of all 8
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name


def test_nothing_is_learned_before_learning_starts():
    program = build(replace(SPEC, learning=replace(SETTINGS, learning_starts=64, updates_per_step=10.5 / 32)))
    before = program.state_dict()["shared"]["learner"]["model"]
    result = program.iterate()
    first = result.metrics
    assert first["gradient_steps"] == 0
    assert "policy_loss" not in first
    assert sum(result.histograms["replay_times_sampled"]) == first["replay_rows"]
    after = program.state_dict()["shared"]["learner"]["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["head.uniform"]
    # Uniform actions in the box: tanh(u) has mean 0 and variance 1/3.
    taken = program.rollout.actions.tanh()
    assert float(taken.square().mean()) == pytest.approx(1 / 3, abs=0.1)
    # From the second rollout on 10.5 steps are owed each time.
    assert [program.iterate().metrics["gradient_steps"] for _ in range(5)] == [10, 11, 10, 11, 10]
    assert not program.state_dict()["shared"]["learner"]["model"]["head.uniform"]


def test_a_resumed_run_refills_its_replay_and_goes_on_with_everything_else():
    program = build(SPEC)
    for _ in range(3):
        program.iterate()
    saved = program.state_dict()
    resumed = build(SPEC)
    resumed.load_state_dict(saved)
    again = resumed.state_dict()["shared"]
    assert str(again) == str(saved["shared"])
    # 16 steps are in after half a rollout of 32: it learns at once, from what it has collected itself.
    metrics = resumed.iterate().metrics
    assert (metrics["replay_transitions"], metrics["gradient_steps"]) == (32, 8)
    starts_late = build(replace(SPEC, learning=replace(SETTINGS, learning_starts=64)))
    starts_late.load_state_dict(saved)
    assert [starts_late.iterate().metrics["gradient_steps"] for _ in range(2)] == [0, 8]
    assert not starts_late.state_dict()["shared"]["learner"]["model"][
        "head.uniform"
    ]  # the policy acts meanwhile


def test_trainers_begin_to_learn_together_where_one_has_an_empty_replay():
    def work(program):
        program.iterate()
        if program.context.identity.index == 1:
            program.learner.load_state(program.learner.shared_state(), None)  # as of a successor
        return [program.iterate().metrics["gradient_steps"] for _ in range(2)]

    spec = replace(SPEC, learning=replace(SETTINGS, learning_starts=128))
    assert run_gmis(spec, 2, work) == [[0, 16], [0, 16]]


def test_a_reward_that_is_not_finite_ends_the_run():
    program = build(SPEC, make_env=make_poisoned_point)
    program.iterate()
    program.iterate()
    with pytest.raises(NonFiniteError, match="a reward became"):
        program.iterate()


class OneOfTwo(SoloCommunicator):
    world_size = 2

    def all_gather(self, tensor):
        return torch.stack((tensor, tensor))


def test_a_batch_has_transitions_of_every_trainer():
    with pytest.raises(
        ConfigError, match=r"batch_size = 1: leaves a trainer without transitions.* use at least 2"
    ):
        build(replace(SPEC, learning=replace(SETTINGS, batch_size=1)), OneOfTwo())


def test_a_replay_beyond_the_host_s_memory_is_refused():
    spec = replace(SPEC, learning=replace(SETTINGS, capacity=2**36))
    with pytest.raises(ConfigError, match=r"capacity = .*: is too much for this host's memory"):
        build(spec)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (ActionSpec(kind="discrete", dim=1, num_choices=3), "needs a box of reals as actions.*'dqn'"),
        (ActionSpec(kind="multi_discrete", dim=2, choices=(2, 3)), "needs .* reals.*; use algorithm 'ppo'$"),
        (
            ActionSpec(kind="continuous", dim=1, low=(-math.inf,), high=(1.0,)),
            "finite bounds, and action 0 .*-inf",
        ),
        (ActionSpec(kind="continuous", dim=1, low=(1.0,), high=(1.0,)), "finite bounds, and action 0"),
    ],
)
def test_what_it_cannot_act_in_is_refused(action, reason):
    with pytest.raises(ConfigError, match=f"algorithm = 'sac': .*{reason}"):
        refuse_unfit_env(SPEC, replace(INFO, action=action))


@pytest.mark.parametrize(
    ("name", "value"),
    [("core", "gru"), ("shared", True), ("critic_only", ("0:1",)), ("head", "squashed_gaussian")],
)
def test_networks_that_it_does_not_have_are_refused(name, value):
    spec = replace(SPEC, network=replace(NETWORK, **{name: value}))
    with pytest.raises(ConfigError, match=rf"network\.{name}.*does not go with algorithm = 'sac'"):
        checked(spec)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", 0), ("learning_starts", -1), ("learning_starts", 1001), ("batch_size", 0), ("n_step", 0),
        ("updates_per_step", 0.0), ("updates_per_step", math.inf), ("tau", 0.0), ("tau", 1.5), ("gae_lambda", 0.5),
        ("normalize_rewards", True), ("num_epochs", 2), ("lr_schedule", "kl_adaptive"), ("initial_alpha", 0.0),
        ("alpha_learning_rate", -1.0), ("critic_learning_rate", math.nan),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(name, value):
    spec = replace(SPEC, learning=replace(SETTINGS, **{name: value}))
    found = {error.path for error in broken_rules(spec)}
    assert f"sac.{name}" in found


def test_actions_fill_the_environment_s_box():
    head = make_model(INFO, NETWORK, SETTINGS, 0).head
    outputs = torch.zeros(4, 4)
    u = torch.tensor([[-20.0, -20.0], [20.0, 20.0], [0.0, 0.0], [0.5, -0.5]])
    found = head.environment_actions(u)
    bound = math.tanh(0.5)
    torch.testing.assert_close(found, torch.tensor([[-1.0, -3], [1, 5], [0, 1], [bound, 1 - 4 * bound]]))
    # The density of the environment's actions: scales 1 and 4.
    normal = TransformedDistribution(Normal(torch.zeros(2), torch.ones(2)), [TanhTransform()])
    wanted = normal.log_prob(u[3].tanh()).sum() - math.log(4)
    assert float(head.log_prob(outputs, u)[3]) == pytest.approx(float(wanted), rel=1e-5)
    head.explore_uniformly(True)
    assert head.log_prob(outputs, u).tolist() == pytest.approx([-math.log(2 * 8)] * 4)
    noise = torch.randn(20000, 4, generator=torch.Generator().manual_seed(0))
    uniform = head.normalised(head.sample(torch.zeros(20000, 4), noise))
    counts = torch.histc(uniform[:, 0], 10, -1.0, 1.0)
    assert counts.sub(2000).abs().max() < 5 * math.sqrt(2000)


def test_it_learns_to_push_the_point_to_the_middle():
    """The best action is minus the position: without it the return is that of random pushes."""
    settings = replace(SETTINGS, learning_rate=5e-3, initial_alpha=0.05, gamma=0.9, updates_per_step=0.5)
    program = build(replace(SPEC, learning=settings))
    before = program.evaluate(32, seed=5).mean_return()
    for _ in range(40):
        program.iterate()
    assert program.evaluate(32, seed=5).mean_return() > 0.75 * before


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_run_resumed_with_its_replay_is_the_uninterrupted_one(tmp_path, n_step):
    """Bit for bit: what is learned, what is in the replay, and the episodes; over evictions, too."""
    spec = replace(SPEC, learning=replace(SETTINGS, capacity=200, n_step=n_step))
    run = build(spec)
    for _ in range(4):
        run.iterate()
    saved = run.state_dict()
    assert run.save_replay(tmp_path / "replay")
    uninterrupted = [run.iterate() for _ in range(5)]
    resumed = build(spec)
    resumed.load_state_dict(
        {"shared": saved["shared"], "local": saved["local"], "replay": str(tmp_path / "replay")}
    )
    again = [resumed.iterate() for _ in range(5)]
    for one, other in zip(uninterrupted, again, strict=True):
        for name in (
            *run.learner.updater.measured,
            "replay_rows",
            "replay_transitions",
            "gradient_steps",
            "env_steps",
        ):
            assert one.metrics[name] == other.metrics[name]
        assert one.episode_returns == other.episode_returns
    assert_same(run.state_dict(), resumed.state_dict())
    assert run.learner.replay.counters()["evicted"] > 0
    for name in ("generation", "sequence", "sampled"):
        assert (run.learner.replay.status()[name] == resumed.learner.replay.status()[name]).all()


class Forgetful(PointEnv):
    """A point whose episodes do not go on when a state is restored, as Gymnasium's do not."""

    resumes_episodes = False

    def load_state_dict(self, state):
        super().load_state_dict(state)
        return self.reset()


def make_forgetful(*, num_envs, first_env_index, seed, num_threads):
    return Forgetful(num_envs, first_env_index, seed)


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_replay_is_restored_where_environments_start_new_episodes(tmp_path, n_step):
    spec = replace(SPEC, learning=replace(SETTINGS, n_step=n_step, learning_starts=200))
    run, resumed = build(spec, make_env=make_forgetful), build(spec, make_env=make_forgetful)
    for _ in range(4):
        run.iterate()
    saved, rows = run.state_dict(), 4 * 32 - 4 * (n_step - 1)
    assert run.save_replay(tmp_path / "replay")
    resumed.load_state_dict({**saved, "replay": str(tmp_path / "replay")})
    # The last n - 1 steps of each environment waited for rewards that new episodes do not give.
    metrics = [resumed.iterate().metrics for _ in range(3)]
    assert [each["replay_transitions"] for each in metrics] == [
        rows + 32 * i - 4 * (n_step - 1) for i in (1, 2, 3)
    ]
    # 128 steps were in: with the third rollout, more than 200 are.
    assert [each["gradient_steps"] for each in metrics] == [0, 0, 8]


def assert_same(one, other):
    """States are equal bit for bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, torch.Tensor | np.ndarray):
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other
