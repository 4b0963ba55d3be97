"""TRPO's step against explicit matrices, and the whole loop in one process and over GMIs."""

from dataclasses import replace

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal, kl_divergence

from rayagi.algorithms.trpo import TRPOSpec
from rayagi.algorithms.trpo.learner import conjugate_gradient, dot
from rayagi.config.errors import ConfigError
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.config.spec import GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import make_env_factory
from tests.fakes.point import make_point
from tests.unit.algorithms.test_program import assert_a_resumed_run_continues, build, run_gmis

SPEC = RunSpec(
    algorithm="trpo",
    gmi=GmiSpec(num_envs=4),
    network=NetworkSpec(hidden=(6, 5), activation="tanh"),
    learning=TRPOSpec(rollout_length=8, num_minibatches=2, num_epochs=2, learning_rate=1e-3),
    seed=3,
)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def policy_vector(model):
    named = model.named_parameters()
    return torch.cat(
        [each.detach().reshape(-1) for name, each in named if not name.startswith("value.")]
    ).clone()


def collected(spec, make_env=make_point):
    """A program, and the batch of its first rollout."""
    program = build(spec, make_env=make_env)
    program.collection.collect(0)
    batch, _ = program.learner.prepare(program.rollout)
    return program, batch


def test_conjugate_gradient_solves_a_system_in_as_many_iterations_as_it_has_unknowns():
    generator = torch.Generator().manual_seed(0)
    half = torch.randn((7, 7), generator=generator, dtype=torch.float64)
    matrix, target = half @ half.T + torch.eye(7, dtype=torch.float64), torch.arange(7, dtype=torch.float64)
    found = conjugate_gradient(lambda vector: matrix @ vector, target, 7)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, target), rtol=1e-8, atol=1e-10)


def test_sums_are_alike_to_the_last_bit_whatever_the_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(200_001, generator=generator) for _ in range(2))
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(dot(one, other).item())
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(float(one.double() @ other.double()), abs=1e-2)


def test_conjugate_gradient_stops_where_there_is_no_curvature():
    matrix = torch.diag(torch.tensor([2.0, 0.0]))
    found = conjugate_gradient(lambda vector: matrix @ vector, torch.tensor([0.0, 1.0]), 10)
    assert torch.equal(found, torch.zeros(2))


def test_conjugate_gradient_of_nothing_is_nothing():
    zero = torch.zeros(3)
    assert torch.equal(conjugate_gradient(lambda vector: vector, zero, 10), zero)


def test_the_step_is_the_natural_gradient_s_that_reaches_the_bound():
    settings = replace(SPEC.learning, max_kl=1e-4, cg_iterations=500, cg_damping=0.1)
    program, batch = collected(replace(SPEC, learning=settings))
    model = program.learner.policy.model
    start, names = (
        policy_vector(model),
        [n for n, _ in model.named_parameters() if not n.startswith("value.")],
    )
    shapes = [dict(model.named_parameters())[name].shape for name in names]

    def distribution(flat):
        parts = dict(zip(names, flat.split([shape.numel() for shape in shapes]), strict=True))
        parts = {name: part.view(shape) for (name, part), shape in zip(parts.items(), shapes, strict=True)}
        hidden = batch.obs.double()
        for layer in (0, 2, 4):
            hidden = hidden @ parts[f"policy.{layer}.weight"].T + parts[f"policy.{layer}.bias"]
            hidden = hidden.tanh() if layer < 4 else hidden
        return Independent(Normal(hidden, parts["head.log_std"].exp().expand_as(hidden)), 1)

    theta = start.double().requires_grad_()
    old = distribution(theta.detach())
    ratio = (distribution(theta).log_prob(batch.actions.double()) - batch.log_probs).exp()
    (gradient,) = torch.autograd.grad((ratio * batch.advantages).mean(), theta)
    fisher = torch.autograd.functional.hessian(
        lambda flat: kl_divergence(old, distribution(flat)).mean(), theta.detach()
    )
    damped = fisher + 0.1 * torch.eye(len(theta), dtype=torch.float64)
    direction = torch.linalg.solve(damped, gradient)
    expected = (2 * 1e-4 / (direction @ damped @ direction)).sqrt() * direction

    training = program.learner
    metrics = training.updater.update(batch, training._orders(program.rollout, 0), 1)
    moved = (policy_vector(model) - start).double()
    assert metrics["backtracks"] == 0
    torch.testing.assert_close(moved, expected, rtol=2e-3, atol=2e-6)
    measured = float(kl_divergence(old, distribution(start.double() + moved)).mean())
    assert metrics["approx_kl"] == pytest.approx(measured, rel=1e-3)
    assert 0 < measured <= 1e-4


def test_where_no_step_keeps_the_bound_the_policy_stays_and_the_value_network_learns():
    # With float32 parameters no divergence this small can be reached but by standing still.
    program, _ = collected(replace(SPEC, learning=replace(SPEC.learning, max_kl=1e-38, line_search_steps=3)))
    model = program.learner.policy.model
    policy, value = policy_vector(model), model.value[0].weight.detach().clone()
    metrics = program.learner.learn(program.rollout)
    assert metrics["backtracks"] == 3
    assert torch.equal(policy_vector(model), policy)
    assert not torch.equal(model.value[0].weight, value)


@pytest.mark.parametrize("slices", [None, (3.0, 1.0)])
def test_training_does_not_depend_on_the_layout(slices):
    def after_three(program):
        for _ in range(3):
            metrics = program.iterate().metrics
        return metrics, policy_vector(program.learner.policy.model)

    whole = build(replace(SPEC, gmi=replace(SPEC.gmi, num_envs=8)))
    expected, reference = after_three(whole)
    for metrics, found in run_gmis(replace(SPEC, gmi=replace(SPEC.gmi, slices=slices)), 2, after_three):
        assert metrics["backtracks"] == expected["backtracks"]
        assert metrics["approx_kl"] == pytest.approx(expected["approx_kl"], rel=2e-3)
        torch.testing.assert_close(found, reference, rtol=1e-3, atol=2e-5)


def test_choices_are_learned_within_the_bound_too():
    make_env = make_env_factory("CartPole-v1")
    program, batch = collected(replace(SPEC, learning=replace(SPEC.learning, max_kl=1e-3)), make_env)
    model = program.learner.policy.model
    with torch.no_grad():
        old = Categorical(logits=model.policy(batch.obs))
    metrics = program.learner.learn(program.rollout)
    with torch.no_grad():
        divergence = float(kl_divergence(old, Categorical(logits=model.policy(batch.obs))).mean())
    assert metrics["approx_kl"] == pytest.approx(divergence, rel=1e-3)
    assert 0 < divergence <= 1e-3
    program.close()


def test_a_resumed_run_continues_to_the_last_bit():
    assert_a_resumed_run_continues(SPEC, lambda program: policy_vector(program.learner.policy.model))


def test_training_improves_the_point():
    learning = replace(SPEC.learning, max_kl=0.02, num_epochs=4)
    program = build(replace(SPEC, gmi=GmiSpec(num_envs=16), learning=learning))
    before = program.evaluate(20, seed=99).mean_return()
    for _ in range(30):
        program.iterate()
    # As PPO does there (test_program.py): the mean cost falls by well over a tenth.
    assert program.evaluate(20, seed=99).mean_return() > before + 0.1 * abs(before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_kl": 0.0}, "trpo.max_kl = 0.0: must be finite and greater than 0"),
        ({"cg_iterations": 0}, "trpo.cg_iterations = 0: must be at least 1"),
        ({"backtrack_ratio": 1.0}, "trpo.backtrack_ratio = 1.0: must be between 0 and 1"),
        ({"target_kl": 0.05}, "trpo.target_kl = 0.05: .* use trpo.max_kl"),
        ({"entropy_coef": 0.01}, "trpo.entropy_coef = 0.01: has no place in TRPO"),
        ({"lr_schedule": "kl_adaptive"}, "trpo.lr_schedule = 'kl_adaptive': .* use 'constant' or 'linear'"),
    ],
)
def test_what_makes_no_trust_region_is_refused(changes, message):
    spec = preset("HalfCheetah-v5", "trpo")
    with pytest.raises(ConfigError, match=message):
        checked(replace(spec, learning=replace(spec.learning, **changes)))


def test_an_update_reports_the_divergence_from_the_old_policy_and_the_surrogate_of_its_ratios():
    """With steps so long that KL(old || new) and KL(new || old) differ."""
    learning = replace(SPEC.learning, max_kl=0.2, cg_iterations=50, learning_rate=1e-12)
    program, batch = collected(replace(SPEC, learning=learning))
    training, model = program.learner, program.learner.policy.model
    with torch.no_grad():
        std = model.head.log_std.clone().exp()
        old = Independent(Normal(model.outputs(batch.obs), std), 1)
    metrics = training.updater.update(batch, training._orders(program.rollout, 0), 1)
    with torch.no_grad():
        outputs = model.outputs(batch.obs)
        new = Independent(Normal(outputs, model.head.log_std.exp()), 1)
        forward, backward = float(kl_divergence(old, new).mean()), float(kl_divergence(new, old).mean())
        ratios = (model.head.log_prob(outputs, batch.actions) - batch.log_probs).exp()
    assert abs(forward / backward - 1) > 0.01
    assert metrics["approx_kl"] == pytest.approx(forward, rel=1e-3)
    assert metrics["policy_loss"] == pytest.approx(-float((ratios * batch.advantages).mean()), rel=1e-4)
