"""The noise scale on gradients whose noise is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.gmi import GmiContext
from collectives.solo import SoloCommunicator
from rayagi.algorithms.gradient_noise import (
    GROUPS,
    GradientNoiseUpdater,
    NoiseScale,
    NormPair,
    noise_scale,
    useful_steps_per_s,
)
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.program import DpOnlyProgram
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from tests.fakes.point import make_point


def pairs_of(*, signal, spread, envs, iterations, dimensions=200, seed=3):
    """Environments whose gradients are a constant vector plus independent normal noise."""
    generator = np.random.default_rng(seed)
    true = np.full(dimensions, signal / np.sqrt(dimensions))
    found = []
    for _ in range(iterations):
        each = true + generator.normal(0, spread / np.sqrt(dimensions), (envs, dimensions))
        groups = each.reshape(GROUPS, -1, dimensions).mean(1)
        found.append(NormPair(small=(groups**2).sum(1).mean(), big=(groups.mean(0) ** 2).sum()))
    return found


def test_two_pairs_by_hand():
    # N = 8 and 64. |G|^2 = (64 * 3 - 8 * 10) / 56 = 2; tr = (10 - 3) / (1/8 - 1/64) = 64; N_noise = 32
    found = noise_scale([NormPair(10.0, 3.0), NormPair(10.0, 3.0)], small_envs=8, big_envs=64)
    assert found.num_envs == pytest.approx(32)
    assert found.standard_error == pytest.approx(0)


def test_pairs_that_differ_give_an_error_by_hand():
    # N = 8 and 64. |G|^2 = 2 and 1, tr = 64 and 72; the sums' ratio is 136 / 3, that of |G|^2 to its error 3 / 1.
    # Without one pair or the other the ratio is 72 or 32: sqrt(1/2 (20^2 + 20^2)) = 20.
    found = noise_scale([NormPair(10.0, 3.0), NormPair(10.0, 2.125)], small_envs=8, big_envs=64)
    assert found.num_envs == pytest.approx(136 / 3)
    assert found.standard_error == pytest.approx(20)


def test_a_lower_bound_by_hand():
    # N = 8 and 64. |G|^2 = 4 and 0: their sum is 4 +- sqrt(2 (2^2 + 2^2)) = 4. tr = 48 and 80: 128 / (4 + 2 * 4).
    found = noise_scale([NormPair(10.0, 4.75), NormPair(10.0, 1.25)], small_envs=8, big_envs=64)
    assert found.num_envs == pytest.approx(128 / 12)
    assert found.standard_error is None


def test_a_known_scale_is_found_within_its_error():
    # tr(Sigma) = 36, |G|^2 = 1
    found = noise_scale(pairs_of(signal=1, spread=6, envs=64, iterations=30), small_envs=8, big_envs=64)
    assert 0 < found.standard_error < 6
    assert abs(found.num_envs - 36) < 3 * found.standard_error


def test_without_a_signal_it_is_a_lower_bound():
    found = noise_scale(pairs_of(signal=0, spread=6, envs=64, iterations=30), small_envs=8, big_envs=64)
    assert found.standard_error is None
    assert found.num_envs > 64
    assert "at least" in found.text()


def test_a_batch_of_the_noise_scale_is_half_as_useful():
    noise = NoiseScale(num_envs=100.0, standard_error=1.0, iterations=10)
    assert useful_steps_per_s(noise, 100, 5000.0) == 2500.0
    assert useful_steps_per_s(noise, 300, 8000.0) == 2000.0


def test_one_pair_is_too_few():
    with pytest.raises(ValueError, match="2 pairs"):
        noise_scale([NormPair(1, 1)], small_envs=8, big_envs=64)


@pytest.mark.parametrize("core", ["none", "gru"])
def test_measuring_does_not_change_what_is_learnt(core):
    spec = RunSpec(
        env=EnvSpec(id="Point"),
        gmi=GmiSpec(num_envs=GROUPS * 2),
        network=NetworkSpec(hidden=(8,), core=core, core_size=4),
        learning=PPOSpec(rollout_length=4, num_epochs=1, num_minibatches=4 if core == "gru" else 2),
    )
    plain, metered = (DpOnlyProgram(spec, make_point, GmiContext.local("Point")) for _ in range(2))
    learner = GradientNoiseUpdater(
        metered.learner.policy.model, spec.learning, SoloCommunicator(), GROUPS * 2
    )
    metered.learner.updater = learner
    for _ in range(3):
        plain.iterate()
        metered.iterate()
    assert len(learner.pairs) == 3
    assert all(pair.small > pair.big > 0 for pair in learner.pairs)
    assert torch.equal(plain.learner.updater.flat.parameters, learner.flat.parameters)
    # The mean of the groups' gradients is the gradient of the minibatch: groups are of one size.
    batch, _ = metered.learner.prepare(metered.rollout)
    order = torch.arange(4 * GROUPS * 2)
    _, big = learner._norms(batch, order)
    assert big == pytest.approx(float(learner._policy_gradient(batch, order).square().sum()), rel=1e-4)
