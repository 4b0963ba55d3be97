"""Squashed Gaussian and Bernoulli heads: against torch's distributions, in every algorithm, and refused with what fits."""

import math
from dataclasses import replace

import pytest
import torch
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)

from actors.protocols import ActionSpec, EnvInfo
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.trpo import TRPOSpec
from rayagi.config.errors import ConfigError
from rayagi.config.rules import refuse_unfit_network
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import env_info, make_env_factory
from rayagi.models.heads import (
    BernoulliHead,
    CategoricalHead,
    EpsilonGreedyHead,
    MultiCategoricalHead,
    SquashedGaussianHead,
    make_head,
)
from rayagi.models.networks import make_model
from tests.unit.algorithms import test_collector_learner as decoupled
from tests.unit.algorithms.test_program import build

LOW, HIGH = (-1.0, -2.0, 0.5), (1.0, 4.0, 0.75)
ECHO = "tests.fakes.echo:Echo-v0"
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def in_float64(head, outputs):
    """The distribution of the environment's actions, by torch."""
    low, high = torch.tensor(LOW, dtype=torch.float64), torch.tensor(HIGH, dtype=torch.float64)
    base = Normal(outputs.double(), head.log_std.detach().double().exp())
    maps = [TanhTransform(), AffineTransform((low + high) / 2, (high - low) / 2)]
    return Independent(TransformedDistribution(base, maps), 1)


@pytest.mark.parametrize("squashed", [0.0, 0.3, -0.9, 1 - 1e-6, -1 + 1e-6])
def test_the_density_is_that_of_a_transformed_gaussian_in_double_precision(squashed):
    head = SquashedGaussianHead(LOW, HIGH, -0.3)
    outputs = torch.tensor([[0.0, 0.5, -2.0], [3.0, 6.0, -7.0]])
    exact = torch.full((2, 3), squashed, dtype=torch.float64)
    actions = exact.atanh()
    in_box = torch.tensor(LOW) + (exact + 1) / 2 * (torch.tensor(HIGH) - torch.tensor(LOW))
    expected = in_float64(head, outputs).log_prob(in_box)
    torch.testing.assert_close(
        head.log_prob(outputs, actions.float()).double(), expected, rtol=2e-5, atol=2e-5
    )
    torch.testing.assert_close(
        head.environment_actions(actions.float()).double(), in_box, rtol=1e-6, atol=1e-6
    )


def test_densities_and_gradients_stay_finite_where_the_action_is_the_bound():
    head = SquashedGaussianHead(LOW, HIGH, 0.0)
    actions = torch.tensor([[30.0, -30.0, 100.0]])
    assert head.environment_actions(actions).tolist() == [[1.0, -2.0, 0.75]]
    outputs = torch.tensor([[29.0, -31.0, 100.0]], requires_grad=True)
    found = head.log_prob(outputs, actions)
    # log(1 - tanh^2 u) = 2 log 2 - 2 |u| for large u; scales are 1, 3 and 1/8.
    slopes = math.log(3 / 8) + 3 * 2 * math.log(2) - 2 * 160
    assert found.item() == pytest.approx(-0.5 - 0.5 - 1.5 * math.log(2 * math.pi) - slopes, rel=1e-6)
    found.backward()
    assert outputs.grad.tolist() == [[1.0, 1.0, 0.0]]


@pytest.mark.parametrize("log_std", [-2.0, -0.5, 0.5])
def test_the_entropy_is_the_mean_of_the_negative_log_density(log_std):
    head = SquashedGaussianHead(LOW, HIGH, log_std)
    outputs = torch.tensor([[0.0, 1.0, -2.0]])
    noise = torch.randn(400_000, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        sampled = -head.log_prob(outputs, head.sample(outputs, noise))
        error = (
            4 * float(sampled.std()) / math.sqrt(len(sampled)) + 0.004
        )  # of sampling, and of the quadrature
        assert float(head.entropy(outputs)) == pytest.approx(float(sampled.mean()), abs=error)


def test_squashing_does_not_change_the_divergence():
    head = SquashedGaussianHead(LOW, HIGH, -0.5)
    one, other = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.5, 1.0, -1.0]])
    found = kl_divergence(head.distribution(one), head.distribution(other))
    # Equal standard deviations: the squared distance of the means over twice the variance.
    assert found.item() == pytest.approx((0.25 + 9) / (2 * math.exp(-1.0)), rel=1e-5)
    actions = torch.tensor([[0.1, 0.2, 0.3]])
    torch.testing.assert_close(head.distribution(one).log_prob(actions), head.log_prob(one, actions))
    torch.testing.assert_close(head.distribution(one).entropy(), head.entropy(one))


def test_bits_have_the_probabilities_of_torch_s_bernoulli():
    head = BernoulliHead(3)
    logits = torch.tensor([[0.0, 2.0, -3.0], [50.0, -50.0, 1.0]])
    actions = torch.tensor([[0, 1, 1], [1, 0, 0]])
    theirs = Independent(Bernoulli(logits=logits.double()), 1)
    torch.testing.assert_close(head.log_prob(logits, actions).double(), theirs.log_prob(actions.double()))
    torch.testing.assert_close(head.entropy(logits).double(), theirs.entropy().mean(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(head.distribution(logits).log_prob(actions), head.log_prob(logits, actions))
    shifted = Independent(Bernoulli(logits=logits.double() + 1), 1)
    found = kl_divergence(head.distribution(logits), head.distribution(logits + 1))
    torch.testing.assert_close(found.double(), kl_divergence(theirs, shifted), rtol=1e-5, atol=1e-6)
    assert head.mode(logits).tolist() == [[0, 1, 0], [1, 0, 1]]


def entropy_and_gradient(head, *logits):
    outputs = torch.tensor([logits], requires_grad=True)
    entropy = head.entropy(outputs)
    entropy.backward()
    return entropy.item(), outputs.grad.flatten().tolist()


def test_a_masked_choice_adds_nothing_to_the_entropy_and_has_no_gradient():
    # p = 1/4, 3/4, 0: H = 1/4 log 4 + 3/4 log 4/3, and dH/dz_k = -p_k (log p_k + H).
    h = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    slopes = [-0.25 * (math.log(0.25) + h), -0.75 * (math.log(0.75) + h), 0.0]
    entropy, gradient = entropy_and_gradient(CategoricalHead(3), 0.0, math.log(3), -math.inf)
    assert (entropy, gradient) == (pytest.approx(h), pytest.approx(slopes))
    # The second choice has one option left: it is certain.
    several = (-math.inf, 0.0, -math.inf, math.log(3), 0.0)
    entropy, gradient = entropy_and_gradient(MultiCategoricalHead((2, 3)), *several)
    assert (entropy, gradient) == (pytest.approx(h), pytest.approx([0, 0, 0, slopes[1], slopes[0]]))
    # p = 3/4 of the first bit: dH/dx = -x p (1 - p); the others are certain.
    entropy, gradient = entropy_and_gradient(BernoulliHead(3), math.log(3), -math.inf, math.inf)
    assert (entropy, gradient) == (pytest.approx(h), pytest.approx([-math.log(3) * 3 / 16, 0, 0]))


def test_bits_are_sampled_by_their_probability_from_gumbel_noise():
    head, logits = BernoulliHead(3), torch.tensor([0.0, 1.5, -4.0])
    uniform = torch.rand((100_000, 3), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = -(-uniform.log()).log()
    found = head.sample(logits.expand(100_000, 3), noise.float())
    assert torch.equal(found, (uniform < logits.double().sigmoid()).long())
    assert head.sample(logits, torch.tensor([40.0, -5.0, 3.0])).tolist() == [0, 1, 0]


def info_of(action):
    return EnvInfo(env_id="Some-v0", engine="x", obs_dim=2, action=action, max_episode_steps=None)


BOX = ActionSpec(kind="continuous", dim=2, low=(-1.0, -1.0), high=(1.0, 1.0))
OPEN = replace(BOX, high=(1.0, math.inf))
CHOICE = ActionSpec(kind="discrete", dim=1, num_choices=4)
CHOICES = ActionSpec(kind="multi_discrete", dim=2, choices=(2, 3))
BITS = ActionSpec(kind="multi_discrete", dim=2, choices=(2, 2))


@pytest.mark.parametrize(
    ("head", "action", "reason"),
    [
        ("squashed_gaussian", OPEN, "action 1 of Some-v0 is between -1 and inf; use 'auto' or 'gaussian', or wrap"),
        ("squashed_gaussian", CHOICE, "is for a box of reals, and Some-v0's actions are choices of 4 options; use 'auto'"),
        ("gaussian", BITS, "choices of 2, 2 options; use 'auto' or 'bernoulli'"),
        ("bernoulli", BOX, "a box of 2 reals; use 'auto' or 'gaussian' or 'squashed_gaussian'"),
        ("bernoulli", CHOICES, "is for a MultiBinary .* choices of 2, 3 options; use 'auto'$"),
    ],
)  # fmt: skip
def test_a_head_for_other_actions_is_refused_with_what_fits(head, action, reason):
    with pytest.raises(ConfigError, match=reason):
        refuse_unfit_network(NetworkSpec(head=head), info_of(action))


@pytest.mark.parametrize(
    ("head", "action", "outputs"),
    [("gaussian", BOX, 2), ("squashed_gaussian", BOX, 2), ("bernoulli", BITS, 2), ("auto", BITS, 4)],
)
@pytest.mark.parametrize("shared", [False, True])
def test_networks_have_as_many_outputs_as_their_head_needs(head, action, outputs, shared):
    network = NetworkSpec(hidden=(4,), head=head, shared=shared)
    refuse_unfit_network(network, info_of(action))
    model = make_model(info_of(action), network)
    assert model.outputs(torch.zeros(3, 2)).shape == (3, outputs)
    assert model.fits_kernels == (head == "gaussian" and not shared)


def spec_of(head, algorithm="ppo", **changes):
    learning = {"ppo": PPOSpec, "trpo": TRPOSpec}[algorithm](
        **{"rollout_length": 16, "num_minibatches": 2, "num_epochs": 4, "learning_rate": 3e-3, **changes}
    )
    action = "box" if head == "squashed_gaussian" else "multi_binary"
    return RunSpec(
        algorithm=algorithm,
        env=EnvSpec(id=ECHO, kwargs={"action": action}),
        gmi=GmiSpec(num_envs=16),
        network=NetworkSpec(hidden=(16,), activation="tanh", head=head, initial_log_std=-0.5),
        learning=learning,
        seed=1,
    )


def program_of(spec):
    return build(spec, make_env=make_env_factory(ECHO, kwargs=dict(spec.env.kwargs)))


HEADS = pytest.mark.parametrize("head", ["squashed_gaussian", "bernoulli"])


@HEADS
def test_before_the_first_step_the_learner_finds_the_probabilities_that_acted(head):
    program = program_of(spec_of(head, learning_rate=1e-12))
    for _ in range(2):
        metrics = program.iterate().metrics
        assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
        assert math.isfinite(metrics["entropy"])


@HEADS
@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("trpo", marks=pytest.mark.slow)])
def test_a_policy_learns_to_do_what_it_is_shown(head, algorithm):
    program = program_of(spec_of(head, algorithm))
    before = program.evaluate(8, seed=3).mean_return()
    kls = [program.iterate().metrics["approx_kl"] for _ in range(40)]
    assert algorithm == "ppo" or max(kls) <= 0.0105
    # Of 16 steps: bits are guessed for a reward of 8, and reals in [-1, 1] by 0 for 16 * (1 - 1/3).
    after = program.evaluate(8, seed=3).mean_return()
    assert before < 12
    assert after > 14
    program.close()


@HEADS
@pytest.mark.parametrize("algorithm", ["appo", "impala"])
def test_asynchronous_algorithms_have_the_heads_too(head, algorithm):
    spec = replace(spec_of(head), algorithm=algorithm, learning=decoupled.spec_for(algorithm).learning)
    spec = replace(spec, gmi=decoupled.APPO.gmi)
    make_env = make_env_factory(ECHO, kwargs=dict(spec.env.kwargs))

    def metrics(program):
        return [program.iterate().metrics for _ in range(3)]

    _, learned = decoupled.run_gmis(spec, 1, 1, metrics, make_env=make_env)
    for each in learned:
        assert each["importance_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert math.isfinite(each["policy_loss"])


def test_squashed_actions_have_the_same_bits_in_any_batch():
    """A squashed policy acts by torch alone (``fits_kernels``), here on all rows, there on a GMI's or a client's."""
    head = make_head(BOX, 0.0, "squashed_gaussian")
    actions = torch.randn(257, 2, generator=torch.Generator().manual_seed(1))
    whole = head.environment_actions(actions)
    for rows in (1, 3, 16, 100):
        assert torch.equal(torch.cat([head.environment_actions(part) for part in actions.split(rows)]), whole)


def test_the_environment_receives_actions_in_its_box():
    program = program_of(spec_of("squashed_gaussian"))
    taken, step = [], program.simulator.env.step

    def recorded(actions):
        taken.append(actions.clone())
        return step(actions)

    program.simulator.env.step = recorded
    program.iterate()
    actions = program.rollout.actions
    torch.testing.assert_close(torch.stack(taken), actions.tanh())
    assert actions.abs().max() > 1
    assert env_info(ECHO, kwargs={"action": "box"}).action.high == (1.0, 1.0)


def test_an_epsilon_greedy_head_takes_the_best_or_any_choice():
    head = EpsilonGreedyHead(4)
    values = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, -1e30]])
    noise = torch.zeros(2, 4)
    assert head.sample(values, noise).tolist() == head.mode(values).tolist() == [1, 0]
    noise[:, 3] = math.inf
    assert head.sample(values, noise).tolist() == [3, 3]
    head.epsilon.fill_(0.2)
    # 0.2 / 4 each, and 0.8 more for the best
    p = [0.05, 0.85]
    assert head.log_prob(values, torch.tensor([3, 0])).exp().tolist() == pytest.approx(p)
    assert head.distribution(values).probs[0].tolist() == pytest.approx([0.05, 0.85, 0.05, 0.05])
    assert head.entropy(values).item() == pytest.approx(
        -3 * 0.05 * math.log(0.05) - 0.85 * math.log(0.85), abs=1e-6
    )
    head.epsilon.fill_(0.0)
    assert head.log_prob(values, torch.tensor([1, 1])).tolist() == [0.0, -math.inf]
    assert head.entropy(values).item() == 0.0


def test_epsilon_is_part_of_the_models_state():
    assert EpsilonGreedyHead(2).state_dict()["epsilon"] == 1.0  # nothing is known yet
