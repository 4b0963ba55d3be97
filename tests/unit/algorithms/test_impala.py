"""IMPALA: one step of RMSProp per rollout, on the loss of Espeholt et al. 2018, §4.2."""

from dataclasses import replace

import pytest
import torch
from test_appo import (
    another_policys_experience,
    assert_training_does_not_depend_on_the_layout,
    collected,
    spec,
    weights,
)
from test_program import assert_a_resumed_run_continues, build

from rayagi.algorithms.one_pass import RMSProp
from rayagi.config.presets import preset
from rayagi.envs import make_env_factory

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PLAIN = {
    "rollout_length": 8, "max_grad_norm": 0.0, "normalize_obs": False, "normalize_rewards": False,
    "rho_bar": 1.5, "c_bar": 1.1, "gae_lambda": 0.9, "gamma": 0.95, "value_coef": 0.3, "entropy_coef": 0.01,
    "learning_rate": 0.01, "rms_eps": 0.1,
}  # fmt: skip


def test_rmsprop_has_epsilon_inside_the_root():
    parameters, square_avg = torch.tensor([1.0, -1.0]), torch.zeros(2)
    gradients = torch.tensor([2.0, 0.0])
    optimiser = RMSProp(parameters, gradients, square_avg, decay=0.9, eps=0.6)
    optimiser.set_learning_rate(0.5)
    optimiser.step()
    # g = 0.9 * 0 + 0.1 * 2^2 = 0.4; step = 0.5 * 2 / sqrt(0.4 + 0.6) = 1 (1 / (sqrt(0.4) + 0.6) were 0.81)
    assert torch.allclose(parameters, torch.tensor([0.0, -1.0]))
    gradients[:] = torch.tensor([-1.0, 4.0])
    optimiser.step()
    # g = 0.9 * 0.4 + 0.1 * 1 = 0.46 and 0.1 * 16 = 1.6; steps = -0.5 / sqrt(1.06) and 2 / sqrt(2.2)
    assert torch.allclose(square_avg, torch.tensor([0.46, 1.6]))
    assert torch.allclose(parameters, torch.tensor([0.5 / 1.06**0.5, -1.0 - 2.0 / 2.2**0.5]))


def test_without_epsilon_rmsprop_is_torchs():
    generator = torch.Generator().manual_seed(0)
    own, theirs = torch.ones(5), torch.nn.Parameter(torch.ones(5))
    gradients = torch.zeros(5)
    optimiser = RMSProp(own, gradients, torch.zeros(5), decay=0.99, eps=1e-16)
    optimiser.set_learning_rate(0.01)
    reference = torch.optim.RMSprop([theirs], lr=0.01, alpha=0.99, eps=1e-16)
    for _ in range(4):
        gradients.copy_(torch.randn(5, generator=generator))
        theirs.grad = gradients.clone()
        optimiser.step()
        reference.step()
    assert torch.allclose(own, theirs, atol=1e-6)


def test_an_update_is_one_step_on_the_papers_loss():
    program, _ = collected(spec("impala", **PLAIN))
    sent, ratios, policy_loss, d = another_policys_experience(program)
    before = weights(program)[: len(d)]
    metrics = program.learner.learn(sent)
    expected = before - 0.01 * d / (0.01 * d.square() + 0.1).sqrt()
    assert torch.allclose(weights(program)[: len(d)], expected, rtol=0, atol=1e-6)
    assert metrics["importance_ratio"] == pytest.approx(float(ratios.mean()), rel=1e-4)
    assert metrics["importance_truncated"] == pytest.approx(float((ratios > 1.5).float().mean()))
    assert metrics["policy_loss"] == pytest.approx(float(policy_loss), rel=1e-4)


def test_training_does_not_depend_on_the_layout():
    assert_training_does_not_depend_on_the_layout(spec("impala", rollout_length=8, learning_rate=1e-3))


@pytest.mark.parametrize("core", ["none", "gru"])
def test_a_resumed_run_continues_to_the_last_bit(core):
    settings = spec("impala", rollout_length=8, learning_rate=1e-3)
    settings = replace(settings, network=replace(settings.network, core=core, core_size=6))
    assert_a_resumed_run_continues(settings, weights)


@pytest.mark.parametrize("algorithm", ["impala", "a3c"])
def test_the_plain_gradient_of_the_preset_stays_finite(algorithm):
    # Several epochs of it without the clip were NaN in iteration 6.
    settings = preset("Ant-v5", algorithm)
    settings = replace(settings, gmi=replace(settings.gmi, num_envs=8, template="dp_only"))
    program = build(settings, make_env=make_env_factory("Ant-v5"))
    for _ in range(40):
        assert program.iterate().metrics["grad_norm"] < 1e3
    assert torch.isfinite(weights(program)).all()
