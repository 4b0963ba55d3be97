"""Advantages against hand arithmetic and against the definition as a double sum."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayagi.algorithms.returns import discounted_returns, explained_variance, gae


def column(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def flags(*values):
    return torch.tensor(values, dtype=torch.bool).unsqueeze(1)


def test_termination_stops_the_bootstrap_and_the_trace():
    # step 1: 2 + 0.9 * 10 - 1 = 10        step 0 terminates: 1 - 0.5 = 0.5, nothing flows back from step 1
    advantages, targets = gae(
        rewards=column(1.0, 2.0), values=column(0.5, 1.0), next_values=column(99.0, 10.0),
        terminated=flags(1, 0), done=flags(1, 0), gamma=0.9, gae_lambda=1.0,
    )  # fmt: skip
    assert advantages.flatten().tolist() == pytest.approx([0.5, 10.0])
    assert targets.flatten().tolist() == pytest.approx([1.0, 11.0])


def test_a_time_limit_bootstraps_from_the_true_last_observation_and_stops_the_trace():
    # step 0 is cut: 1 + 0.9 * 4 - 0.5 = 4.1, and step 1's advantage of 10 must not leak into it
    advantages, _ = gae(
        rewards=column(1.0, 2.0), values=column(0.5, 1.0), next_values=column(4.0, 10.0),
        terminated=flags(0, 0), done=flags(1, 0), gamma=0.9, gae_lambda=1.0,
    )  # fmt: skip
    assert advantages.flatten().tolist() == pytest.approx([4.1, 10.0])


def test_lambda_weighs_later_errors():
    # deltas: 1 + 0.5*2 - 1 = 1;  3 + 0.5*4 - 2 = 3;  A1 = 3;  A0 = 1 + 0.5*0.8*3 = 2.2
    advantages, _ = gae(
        rewards=column(1.0, 3.0), values=column(1.0, 2.0), next_values=column(2.0, 4.0),
        terminated=flags(0, 0), done=flags(0, 0), gamma=0.5, gae_lambda=0.8,
    )  # fmt: skip
    assert advantages.flatten().tolist() == pytest.approx([2.2, 3.0])


@given(seed=st.integers(0, 10_000), steps=st.integers(1, 12), gamma=st.floats(0, 1), lam=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_gae_equals_its_definition_as_a_sum_of_discounted_errors(seed, steps, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values = (
        torch.randn(steps, 2, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    terminated = torch.rand(steps, 2, generator=generator) < 0.2
    done = terminated | (torch.rand(steps, 2, generator=generator) < 0.2)
    advantages, targets = gae(
        rewards=rewards,
        values=values,
        next_values=next_values,
        terminated=terminated,
        done=done,
        gamma=gamma,
        gae_lambda=lam,
    )
    for n in range(2):
        for t in range(steps):
            expected, weight = 0.0, 1.0
            for k in range(t, steps):
                bootstrap = 0.0 if terminated[k, n] else gamma * float(next_values[k, n])
                expected += weight * (float(rewards[k, n]) + bootstrap - float(values[k, n]))
                if done[k, n]:
                    break
                weight *= gamma * lam
            assert float(advantages[t, n]) == pytest.approx(expected, abs=1e-9)
    assert torch.equal(targets, advantages + values)


def test_discounted_returns_restart_after_an_episode_ends_and_carry_over_rollouts():
    # start 2: R0 = 0.5*2 + 1 = 2, ended -> 0;  R1 = 0*0.5 + 4 = 4;  R2 = 0.5*4 + 1 = 3, carried on
    returns, carried = discounted_returns(
        column(1.0, 4.0, 1.0), flags(1, 0, 0), torch.tensor([2.0], dtype=torch.float64), 0.5
    )
    assert returns.flatten().tolist() == [2.0, 4.0, 3.0]
    assert carried.tolist() == [3.0]


def test_explained_variance_is_one_for_perfect_zero_for_constant_targets():
    targets = torch.tensor([1.0, 2.0, 4.0])
    assert explained_variance(targets, targets) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(3), torch.ones(3)) == 0.0
    # values = 0: Var(t - 0)/Var(t) = 1
    assert explained_variance(torch.zeros(3), targets) == pytest.approx(0.0)


def test_explained_variance_of_a_single_sample_is_zero():
    assert explained_variance(torch.tensor([1.0]), torch.tensor([3.0])) == 0
