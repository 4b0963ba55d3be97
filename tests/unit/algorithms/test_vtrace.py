"""V-trace against hand arithmetic, against its definition (Espeholt et al. 2018, eq. 1), and against GAE."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayagi.algorithms.returns import gae, importance_metrics, vtrace


def column(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def flags(*values):
    return torch.tensor(values, dtype=torch.bool).unsqueeze(1)


def by_hand(ratios, **changes):
    """Two steps: r = 1, 2;  V = 10, 20;  V' = 20, 30;  gamma = 0.5; the ratios pi / mu are given."""
    given = {
        "log_ratios": column(*ratios).log(), "rewards": column(1.0, 2.0), "values": column(10.0, 20.0),
        "next_values": column(20.0, 30.0), "terminated": flags(0, 0), "done": flags(0, 0),
        "gamma": 0.5, "trace_lambda": 1.0, "rho_bar": 1.0, "c_bar": 1.0,
    }  # fmt: skip
    advantages, targets = vtrace(**{**given, **changes})
    return advantages.flatten().tolist(), targets.flatten().tolist()


def test_ratios_below_the_bounds_weigh_errors_and_traces():
    # errors: 1 + 0.5*20 - 10 = 1;  2 + 0.5*30 - 20 = -3
    # v1 = 20 + 0.25*(-3) = 19.25;  v0 = 10 + 0.5*1 + 0.5*0.5*(19.25 - 20) = 10.3125
    # A1 = -3;  A0 = 1 + 0.5*19.25 - 10 = 0.625
    advantages, targets = by_hand((0.5, 0.25))
    assert targets == pytest.approx([10.3125, 19.25])
    assert advantages == pytest.approx([0.625, -3.0])


def test_ratios_above_the_bounds_are_truncated_each_by_its_own():
    # rho = 2 and 1.5 (below 2), c = 1 (bound):  v1 = 20 - 1.5*3 = 15.5;  v0 = 10 + 2*1 + 0.5*1*(-4.5) = 9.75
    # A0 = 1 + 0.5*15.5 - 10 = -1.25
    advantages, targets = by_hand((5.0, 1.5), rho_bar=2.0)
    assert targets == pytest.approx([9.75, 15.5])
    assert advantages == pytest.approx([-1.25, -3.0])


def test_termination_leaves_nothing_to_follow():
    # error 0: 1 - 10 = -9;  v0 = 10 - 0.5*9 = 5.5, whatever comes in the next episode;  A0 = 1 - 10
    advantages, targets = by_hand((0.5, 0.25), terminated=flags(1, 0), done=flags(1, 0))
    assert targets == pytest.approx([5.5, 19.25])
    assert advantages == pytest.approx([-9.0, -3.0])


def test_a_time_limit_bootstraps_from_the_true_last_observation_and_cuts_the_trace():
    # the true last state is worth 40: error 0 = 1 + 0.5*40 - 10 = 11;  v0 = 10 + 0.5*11 = 15.5;  A0 = 11
    advantages, targets = by_hand((0.5, 0.25), next_values=column(40.0, 30.0), done=flags(1, 0))
    assert targets == pytest.approx([15.5, 19.25])
    assert advantages == pytest.approx([11.0, -3.0])


def test_lambda_shortens_the_trace():
    # v0 = 10 + 0.5*1 + 0.5*(0.4*0.5)*(-0.75) = 10.425;  A0 = 1 + 0.5*0.4*(-0.75) = 0.85
    advantages, targets = by_hand((0.5, 0.25), trace_lambda=0.4)
    assert targets == pytest.approx([10.425, 19.25])
    assert advantages == pytest.approx([0.85, -3.0])


def defined(ratios, rewards, values, next_values, terminated, done, gamma, lam, rho_bar, c_bar):
    """Eq. 1 as it is written, for one environment: a double sum over plain numbers, episode by episode."""
    steps = len(rewards)

    def v(s):
        total = values[s]
        for t in range(s, steps):
            product = math.prod(lam * min(c_bar, ratios[i]) for i in range(s, t))
            follows = 0.0 if terminated[t] else next_values[t]
            total += (
                gamma ** (t - s)
                * product
                * min(rho_bar, ratios[t])
                * (rewards[t] + gamma * follows - values[t])
            )
            if done[t]:
                break
        return total

    targets = [v(s) for s in range(steps)]
    advantages = []
    for s in range(steps):
        if terminated[s]:
            bootstrap = 0.0
        elif done[s] or s == steps - 1:
            bootstrap = next_values[s]
        else:  # next_values[s] is V(s_{s+1}) there
            bootstrap = lam * targets[s + 1] + (1 - lam) * values[s + 1]
        advantages.append(rewards[s] + gamma * bootstrap - values[s])
    return advantages, targets


def rollout(seed, steps, num_envs):
    """A random rollout; where no episode ends, V' is V of the next state, as it is in a real one."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values, log_ratios = (
        torch.randn(steps, num_envs, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    terminated = torch.rand(steps, num_envs, generator=generator) < 0.15
    done = terminated | (torch.rand(steps, num_envs, generator=generator) < 0.15)
    next_values[:-1] = torch.where(done[:-1], next_values[:-1], values[1:])
    return {
        "log_ratios": log_ratios, "rewards": rewards, "values": values, "next_values": next_values,
        "terminated": terminated, "done": done,
    }  # fmt: skip


@given(
    seed=st.integers(0, 10_000), steps=st.integers(1, 12), gamma=st.floats(0, 1), lam=st.floats(0, 1),
    rho_bar=st.floats(0.1, 3), share=st.floats(0.1, 1),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_recursion_equals_the_definition(seed, steps, gamma, lam, rho_bar, share):
    given_, c_bar = rollout(seed, steps, 2), share * rho_bar
    advantages, targets = vtrace(**given_, gamma=gamma, trace_lambda=lam, rho_bar=rho_bar, c_bar=c_bar)
    for env in range(2):
        row = {name: value[:, env].tolist() for name, value in given_.items()}
        ratios = [math.exp(x) for x in row.pop("log_ratios")]
        expected = defined(ratios, **row, gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar)
        assert advantages[:, env].tolist() == pytest.approx(expected[0], abs=1e-9)
        assert targets[:, env].tolist() == pytest.approx(expected[1], abs=1e-9)


@given(seed=st.integers(0, 10_000), gamma=st.floats(0, 1), lam=st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_on_the_policys_own_experience_it_is_gae(seed, gamma, lam):
    given_ = rollout(seed, 9, 3)
    own = given_ | {"log_ratios": torch.zeros_like(given_["rewards"])}
    found = vtrace(**own, gamma=gamma, trace_lambda=lam, rho_bar=1e9, c_bar=1e9)
    del own["log_ratios"]
    expected = gae(**own, gamma=gamma, gae_lambda=lam)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_with_lambda_one_the_targets_are_n_step_returns():
    # 1 + 0.5*(2 + 0.5*30) = 9.5;  2 + 0.5*30 = 17
    _, targets = by_hand((1.0, 1.0))
    assert targets == pytest.approx([9.5, 17.0])


def test_ratios_that_overflow_are_truncated_and_not_infinite():
    advantages, targets = by_hand((1.0, 1.0), log_ratios=column(1e6, -1e6))
    assert targets == pytest.approx([11.0, 20.0])  # c0 = 1, but v1 - V1 = 0
    assert advantages == pytest.approx([1.0, -3.0])


def test_on_policy_samples_are_not_truncated():
    """Every ratio is exp(0) = 1, which is not above rho_bar = 1."""
    assert importance_metrics(torch.zeros(4), 1.0) == {"importance_ratio": 1.0, "importance_truncated": 0.0}
