"""n-step returns against hand arithmetic and against a loop over each window."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayagi.algorithms.n_step import n_step_returns


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def flags(*values):
    return torch.tensor([values], dtype=torch.bool)


def test_a_whole_window_sums_its_rewards_and_bootstraps_after_its_last_step():
    # 1 + 0.5 * 2 + 0.25 * 4 = 3;  then 0.125 V(s_3)
    found = n_step_returns(
        rewards=row(1, 2, 4), terminated=flags(0, 0, 0), truncated=flags(0, 0, 0), gamma=0.5
    )
    assert [each.item() for each in found] == [3.0, 0.125, 2]


def test_a_terminated_episode_has_no_bootstrap_and_nothing_of_the_next_one():
    # 1 + 0.5 * 2 = 2; the 100 is of the next episode
    found = n_step_returns(
        rewards=row(1, 2, 100), terminated=flags(0, 1, 0), truncated=flags(0, 0, 0), gamma=0.5
    )
    assert [each.item() for each in found] == [2.0, 0.0, 1]


def test_a_time_limit_bootstraps_after_the_step_that_it_cut():
    # 1, then 0.5 V(final observation of step 0)
    found = n_step_returns(
        rewards=row(1, 2, 100), terminated=flags(0, 0, 1), truncated=flags(1, 0, 0), gamma=0.5
    )
    assert [each.item() for each in found] == [1.0, 0.5, 0]


def test_a_step_that_terminated_at_the_time_limit_is_terminated():
    found = n_step_returns(rewards=row(1), terminated=flags(1), truncated=flags(1), gamma=0.5)
    assert [each.item() for each in found] == [1.0, 0.0, 0]


def test_a_short_window_bootstraps_after_its_last_step_whatever_is_behind_it():
    # 1 + 0.5 * 2 = 2, then 0.25 V(s_2); behind it is memory of another trajectory
    found = n_step_returns(
        rewards=row(1, 2, float("nan")),
        terminated=flags(0, 0, 1),
        truncated=flags(0, 0, 0),
        gamma=0.5,
        valid=flags(1, 1, 0),
    )
    assert [each.item() for each in found] == [2.0, 0.25, 1]


def one_window(rewards, terminated, truncated, valid, gamma):
    total, power = 0.0, 1.0
    for step, (reward, dead, cut) in enumerate(zip(rewards, terminated, truncated, strict=True)):
        total, power = total + power * reward, power * gamma
        if dead or cut or step + 1 == len(rewards) or not valid[step + 1]:
            return total, 0.0 if dead else power, step
    raise AssertionError


@given(seed=st.integers(0, 10_000), n=st.integers(1, 6), gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]))
@settings(max_examples=60, deadline=None)
def test_windows_agree_with_a_loop(seed, n, gamma):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(8, n, generator=generator, dtype=torch.float64)
    terminated, truncated = (torch.rand(8, n, generator=generator) < 0.2 for _ in range(2))
    lengths = torch.randint(1, n + 1, (8, 1), generator=generator)
    valid = torch.arange(n) < lengths
    found = n_step_returns(
        rewards=rewards, terminated=terminated, truncated=truncated, gamma=gamma, valid=valid
    )
    wanted = [
        one_window(*parts, gamma)
        for parts in zip(
            rewards.tolist(), terminated.tolist(), truncated.tolist(), valid.tolist(), strict=True
        )
    ]
    for each, values in zip(found, zip(*wanted, strict=True), strict=True):
        assert each.tolist() == pytest.approx(values)
