"""Compiled PPO gradients equal autograd's, with the same bits for any number of threads."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import NonFiniteError
from actors.protocols import ActionSpec, EnvInfo
from collectives.solo import SoloCommunicator
from rayagi.algorithms import gradient_updater
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.ppo.learner import PPOUpdater
from rayagi.algorithms.rollout_learner import OnPolicyBatch
from rayagi.config.spec import NetworkSpec
from rayagi.models.networks import ActorCritic


def learner_of(obs_dim=7, hidden=(20, 9), activation="elu", seed=0, action_dim=3, choices=None, **options):
    """A learner with two different random networks. ``choices``: number of discrete actions, instead of ``action_dim``."""
    generator = torch.Generator().manual_seed(seed)
    action = ActionSpec(kind="continuous", dim=action_dim)
    if choices is not None:
        action = ActionSpec(kind="discrete", dim=1, num_choices=choices)
    info = EnvInfo(
        env_id="Some",
        engine="none",
        obs_dim=obs_dim,
        action=action,
        max_episode_steps=None,
    )
    model = ActorCritic(info, NetworkSpec(hidden=hidden, activation=activation))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return PPOUpdater(model, PPOSpec(**options), SoloCommunicator())


def batch_of(learner, size, seed=0):
    """Actions near the means, with changed probabilities; some values are beyond the clip range."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    model = learner.model
    obs = normal(size, model.policy[0].in_features)
    with torch.no_grad():
        means, values = model.policy(obs), model.values(obs)
        noise = exploration(means.shape, generator, gumbel=model.head.gumbel_noise)
        actions = model.head.sample(means, noise)
        log_probs = model.head.log_prob(means, actions) + 0.3 * normal(size)
    return OnPolicyBatch(
        obs=obs,
        actions=actions,
        log_probs=log_probs,
        values=values + 0.3 * normal(size),
        advantages=normal(size),
        targets=values + normal(size),
    )


def exploration(shape, generator, *, gumbel):
    if not gumbel:
        return torch.randn(shape, generator=generator)
    return -(-torch.rand(shape, generator=generator).clamp_min(1e-20).log()).log()


def by_torch(learner, batch, order):
    """The flat gradient and the five parts in float64."""
    exact = PPOUpdater.__new__(PPOUpdater)
    exact.spec, exact.model = learner.spec, copy.deepcopy(learner.model).double()
    doubles = OnPolicyBatch(
        *(field.double() if field.is_floating_point() else field for field in batch.fields())
    )
    total, parts = exact.loss(doubles, order)
    parameters = list(exact.model.parameters())
    gradients = torch.autograd.grad(total, parameters)
    return torch.cat([gradient.reshape(-1) for gradient in gradients]), parts


def compiled(learner, batch, order):
    """The flat gradient and the five parts."""
    assert learner._compiled is not None, "no compiler"
    size = sum(parameter.numel() for parameter in learner.model.parameters())
    learner.flat.gradients[:size] = torch.nan  # must be overwritten
    with learner._compiled.minibatches(batch.fields(), learner.weight) as minibatches:
        parts = minibatches.gradient(order)
    return learner.flat.gradients[:size].clone(), parts


@settings(deadline=None, max_examples=70)
@given(
    st.integers(1, 40),
    st.lists(st.integers(1, 40), min_size=0, max_size=3),
    st.sampled_from(["elu", "relu", "tanh", "silu"]),
    st.sampled_from([1, 31, 32, 33, 511, 512, 700, 1100]),
    st.one_of(
        st.builds(lambda dim: {"action_dim": dim}, st.integers(1, 9)),
        st.builds(lambda count: {"choices": count}, st.integers(1, 20)),
    ),
    st.sampled_from([None, 0.2]),
    st.integers(0, 2**31),
)
def test_gradient_and_parts_are_those_of_the_losses(
    obs_dim, hidden, activation, samples, actions, value_clip, seed
):
    options = {"value_clip": value_clip, "entropy_coef": 0.01, "value_coef": 0.7}
    learner = learner_of(obs_dim, tuple(hidden), activation, seed, **actions, **options)
    batch = batch_of(learner, 1200, seed)
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(seed))[:samples]
    gradient, parts = compiled(learner, batch, order)
    expected, wanted = by_torch(learner, batch, order)
    assert (gradient - expected).abs().max() <= 2e-5 * (1 + expected.abs().max())
    # a ratio may be on either side of the clip by a rounding
    torch.testing.assert_close(parts[:4].double(), wanted[:4], rtol=1e-5, atol=2e-5)
    assert abs(float(parts[4] - wanted[4])) <= 1.01 / samples


def test_a_hand_worked_sample():
    # One linear map of one number: mean 2 * 1 + 0 = 2, value 3 * 1 + 1 = 4; standard deviation e^0 = 1; the action is 2.5.
    learner = learner_of(1, (), action_dim=1, value_coef=0.5, entropy_coef=0.1)
    with torch.no_grad():
        for parameter, number in zip(learner.model.parameters(), (2.0, 0.0, 3.0, 1.0, 0.0), strict=True):
            parameter.fill_(number)
    log_prob = -0.5 * 0.5**2 - 0.5 * math.log(2 * math.pi)
    fields = ([1.0], [2.5], [log_prob - math.log(1.1)], [4.0], [2.0], [3.0])
    batch = OnPolicyBatch(*(torch.tensor(field) for field in fields))
    batch.obs, batch.actions = batch.obs.unsqueeze(1), batch.actions.unsqueeze(1)
    gradient, parts = compiled(learner, batch, torch.tensor([0]))
    names = [name for name, _ in learner.model.named_parameters()]
    found = dict(zip(names, gradient.tolist(), strict=True))
    # The ratio is 1.1, within the clip: d loss / d log prob = -1.1 * 2; times (a - mean) = 0.5, and (0.5^2 - 1) for log std.
    assert found["policy.0.weight"] == found["policy.0.bias"] == pytest.approx(-1.1, abs=1e-5)
    assert found["head.log_std"] == pytest.approx(2.2 * 0.75 - 0.1, abs=1e-5)
    # value loss (4 - 3)^2, gradient 2 (4 - 3) times value_coef 0.5
    assert found["value.0.weight"] == found["value.0.bias"] == pytest.approx(1.0, abs=1e-5)
    entropy = 0.5 * math.log(2 * math.pi * math.e)
    assert parts.tolist() == pytest.approx([-2.2, 1.0, entropy, 0.1 - math.log(1.1), 0.0], abs=1e-5)


def discrete_learner(num_choices, bias=None, **options):
    """One linear layer whose input is 0: its logits are its biases. The value is 4."""
    learner = learner_of(1, (), choices=num_choices, **options)
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            parameter.fill_(4.0 if name == "value.0.bias" else 0.0)
        if bias is not None:
            learner.model.policy[0].bias.copy_(torch.tensor(bias))
    return learner


def discrete_batch(actions, log_probs, advantages):
    size = len(actions)
    return OnPolicyBatch(
        obs=torch.zeros(size, 1),
        actions=torch.tensor(actions),
        log_probs=torch.tensor(log_probs),
        values=torch.full((size,), 4.0),
        advantages=torch.tensor(advantages),
        targets=torch.full((size,), 3.0),
    )


def gradient_by_logits(learner, gradient):
    sizes = [parameter.numel() for parameter in learner.model.parameters()]
    names = [name for name, _ in learner.model.named_parameters()]
    return dict(zip(names, gradient.split(sizes), strict=True))["policy.0.bias"]


def test_a_hand_worked_choice():
    # p = (1/4, 1/4, 1/2), the last one chosen; the ratio is 1.1, within the clip.
    learner = discrete_learner(3, [0.0, 0.0, math.log(2)], value_coef=0.5, entropy_coef=0.1)
    batch = discrete_batch([2], [math.log(0.5 / 1.1)], [2.0])
    gradient, parts = compiled(learner, batch, torch.tensor([0]))
    # d loss / d log p = -2.2, times (-1/4, -1/4, 1/2); H = 1.5 log 2, -d H / d z = p (log p + H) = log 2 (-1/8, -1/8, 1/4)
    entropy_grad = 0.1 * math.log(2)
    assert gradient_by_logits(learner, gradient).tolist() == pytest.approx(
        [0.55 - entropy_grad / 8, 0.55 - entropy_grad / 8, -1.1 + entropy_grad / 4], abs=1e-5
    )
    expected = [-2.2, 1.0, 1.5 * math.log(2), 0.1 - math.log(1.1), 0.0]
    assert parts.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("logits", "probabilities"),
    [
        ([1e30, 1e30, 1e30], [1 / 3, 1 / 3, 1 / 3]),
        ([-1e30, -1e30, -1e30], [1 / 3, 1 / 3, 1 / 3]),
        ([1e30, -1e30, 1e30], [1 / 2, 0.0, 1 / 2]),
        ([-1e30, 0.0, -1e30], [0.0, 1.0, 0.0]),
        ([100.0, 0.0, -100.0], [1.0, 0.0, 0.0]),  # e^-100 is a denormal
        ([7.0, 7.0, 7.0], [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_extreme_logits(logits, probabilities):
    learner, size = discrete_learner(3, logits, entropy_coef=0.1), 40
    likely = [k for k, p in enumerate(probabilities) if p > 0]
    actions = [likely[j % len(likely)] for j in range(size)]
    advantages = torch.linspace(-1, 2, size).tolist()
    batch = discrete_batch(actions, [math.log(probabilities[a]) for a in actions], advantages)
    gradient, parts = compiled(learner, batch, torch.arange(size))
    assert gradient.isfinite().all()
    expected, wanted = by_torch(learner, batch, torch.arange(size))
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts.double(), wanted, rtol=1e-5, atol=1e-6)
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    assert float(parts[2]) == pytest.approx(entropy, abs=1e-5)


def test_an_impossible_action_has_no_gradient():
    # Its ratio is 0, outside the clip range, and the negative advantage would lower it further.
    learner = discrete_learner(3, [1e30, -1e30, 1e30])
    gradient, parts = compiled(learner, discrete_batch([1], [-1.0], [-1.0]), torch.tensor([0]))
    assert gradient.isfinite().all()
    assert not gradient_by_logits(learner, gradient).any()
    assert float(parts[4]) == 1.0


@pytest.mark.parametrize("logit", [math.nan, math.inf])
def test_logits_that_are_not_finite_raise(logit):
    learner = discrete_learner(3, [0.0, logit, 0.0])
    batch = discrete_batch([0] * 4, [-1.0] * 4, [1.0] * 4)
    with pytest.raises(NonFiniteError):
        learner.update(batch, torch.arange(4).view(1, 1, 4), 1)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([0, 1, 3, 0], "sample 2 has action 3: the policy's are 0 to 2"),
        ([0, -1, 2, 0], "sample 1 has action -1: the policy's are 0 to 2"),
        ([2**40, 0, 0, 0], f"sample 0 has action {2**40}: the policy's are 0 to 2"),
        ([0.0, 1.0, 0.0, 0.0], r"discrete actions must be integers \(B,\), not torch.float32 \(4,\)"),
        ([[0], [0], [0], [0]], r"discrete actions must be integers \(B,\), not torch.int64 \(4, 1\)"),
    ],
)
def test_invalid_discrete_actions_raise(actions, message):
    learner = discrete_learner(3)
    before = learner.flat.parameters.detach().clone()
    with pytest.raises(ValueError, match=message):
        learner.update(discrete_batch(actions, [-1.0] * 4, [1.0] * 4), torch.arange(4).view(1, 1, 4), 1)
    assert torch.equal(learner.flat.parameters, before)


@pytest.mark.parametrize("choices", [None, 5])
@pytest.mark.parametrize("samples", [33, 700])
def test_results_do_not_depend_on_threads(samples, choices):
    learner = learner_of(11, (37, 18), choices=choices)
    batch, order = batch_of(learner, 800), torch.arange(samples)
    before = torch.get_num_threads()
    found, stepped = [], []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.append(compiled(learner, batch, order))
            stepping = learner_of(11, (37, 18), choices=choices)
            orders = torch.randperm(800, generator=torch.Generator().manual_seed(0)).view(1, 8, 100)
            stepping.update(batch, orders, 1)
            stepped.append((stepping.flat.parameters.detach().clone(), learner.values(batch.obs)))
    finally:
        torch.set_num_threads(before)
    for gradient, parts in found[1:]:
        assert torch.equal(gradient, found[0][0])
        assert torch.equal(parts, found[0][1])
    for parameters, values in stepped[1:]:
        assert torch.equal(parameters, stepped[0][0])
        assert torch.equal(values, stepped[0][1])


@pytest.mark.parametrize("count", [1, 31, 512, 1100])
def test_values_are_the_networks(count):
    learner = learner_of(11, (37, 18), "tanh")
    obs = batch_of(learner, count).obs
    expected = copy.deepcopy(learner.model).double().values(obs.double())
    torch.testing.assert_close(learner.values(obs).double(), expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["elu", "relu", "tanh", "silu"])
def test_activations_to_all_digits_of_numbers_of_any_size(activation):
    """The value is the activation of the observation: near 0 an exponential less 1 has few digits left."""
    learner = learner_of(1, (1,), activation)
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            parameter.fill_(1.0 if name in ("value.0.weight", "value.2.weight") else 0.0)
    sizes = torch.logspace(-37, 37, 2000, dtype=torch.float64).float()
    obs = torch.cat([sizes, -sizes, torch.zeros(1)]).unsqueeze(1)
    expected = learner.model.value[1](obs.double())[:, 0]
    if activation == "silu":  # below -87 exp(-x) overflows, and the result is 0
        expected = torch.where(obs[:, 0] < -87, torch.zeros(()), expected)
    torch.testing.assert_close(learner.values(obs).double(), expected, rtol=1e-6, atol=1e-37)


def test_nan_observations_do_not_affect_the_next_update():
    learner = learner_of()
    batch, few = batch_of(learner, 600), torch.arange(40)
    alone = compiled(learner, batch, few)
    assert learner.values(torch.full_like(batch.obs, math.nan)).isnan().all()
    again = compiled(learner, batch, few)
    assert torch.equal(alone[0], again[0])


@pytest.mark.parametrize("choices", [None, 5])
def test_an_update_does_not_depend_on_the_one_before(choices):
    learner = learner_of(choices=choices)
    batch, few = batch_of(learner, 600), torch.arange(40)
    alone = compiled(learner, batch, few)
    compiled(learner, batch, torch.arange(600))
    again = compiled(learner, batch, few)
    assert torch.equal(alone[0], again[0])
    assert torch.equal(alone[1], again[1])


@pytest.mark.parametrize("activation", ["elu", "relu", "tanh", "silu"])
@pytest.mark.parametrize(
    "place", ["policy.0.weight", "policy.2.bias", "value.0.bias", "value.4.weight", "head.log_std"]
)
def test_nan_parameters_raise(place, activation):
    learner = learner_of(activation=activation)
    batch = batch_of(learner, 64)
    with torch.no_grad():
        dict(learner.model.named_parameters())[place].view(-1)[0] = math.nan
    with pytest.raises(NonFiniteError):
        learner.update(batch, torch.arange(64).view(1, 2, 32), 1)


@pytest.mark.parametrize("choices", [None, 5])
def test_updates_are_those_of_torch(monkeypatch, choices):
    found = {}
    for name in ("compiled", "torch"):
        if name == "torch":
            monkeypatch.setattr(gradient_updater, "library", lambda: None)
        learner = learner_of(seed=3, choices=choices)
        batch = batch_of(learner, 256, 3)
        orders = torch.randperm(256, generator=torch.Generator().manual_seed(1)).view(1, 4, 64)
        assert (learner._compiled is None) == (name == "torch")
        metrics = learner.update(batch, orders, 1)
        found[name] = (learner.flat.parameters.detach().clone(), metrics)
    (parameters, metrics), (expected, wanted) = found.values()
    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    # Adam's first steps are of the step size whatever the gradient's: a few of the smallest gradients differ in sign.
    assert (parameters - expected).abs().mean() < 1e-6


@pytest.mark.parametrize("kind", [{"action_dim": 3}, {"choices": 5}])
def test_a_trainer_s_weight_scales_the_whole_gradient(kind):
    learner = learner_of(entropy_coef=0.05, value_coef=0.7, **kind)
    batch, order = batch_of(learner, 100), torch.arange(100)
    one, _ = compiled(learner, batch, order)
    learner.weight = 1.5
    weighted, _ = compiled(learner, batch, order)
    torch.testing.assert_close(weighted, 1.5 * one, rtol=1e-4, atol=1e-6)
