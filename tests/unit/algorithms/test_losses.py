"""PPO's losses by hand, and distributions against torch.distributions."""

import math

import pytest
import torch

from actors.protocols import ActionSpec
from rayagi.algorithms import losses
from rayagi.models.heads import CategoricalHead, GaussianHead, make_head


def logs(*ratios):
    return torch.tensor(ratios).log()


def test_a_large_ratio_gains_no_more_than_its_clip_for_good_actions():
    # min(1.5 * 2, 1.2 * 2) = 2.4
    assert losses.clipped_policy_loss(logs(1.5), torch.tensor([2.0]), 0.2).item() == pytest.approx(-2.4)


def test_a_large_ratio_is_not_clipped_for_bad_actions():
    # min(1.5 * -2, 1.2 * -2) = -3
    assert losses.clipped_policy_loss(logs(1.5), torch.tensor([-2.0]), 0.2).item() == pytest.approx(3.0)


def test_the_policy_loss_is_a_mean_over_samples():
    # (min(0.5*1, 0.8*1) + min(1*3, 1*3)) / 2 = 1.75
    assert losses.clipped_policy_loss(logs(0.5, 1.0), torch.tensor([1.0, 3.0]), 0.2).item() == pytest.approx(
        -1.75
    )


def test_unclipped_value_loss_is_the_mean_squared_error():
    loss = losses.value_loss(torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([0.0, 4.0]), None)
    assert loss.item() == pytest.approx((1 + 4) / 2)


def test_clipped_value_loss_takes_the_larger_error():
    # old 0, new 3, clip 1 -> kept 1; target 4: (3-4)^2 = 1 < (1-4)^2 = 9
    loss = losses.value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([4.0]), 1.0)
    assert loss.item() == pytest.approx(9.0)


def test_approx_kl_of_ratio_two_is_one_minus_log_two():
    assert losses.approx_kl(logs(2.0)).item() == pytest.approx(1 - math.log(2))


def test_clip_fraction_counts_ratios_outside_the_range():
    assert losses.clip_fraction(logs(0.7, 0.9, 1.1, 1.3), 0.2).item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.03, 2e-4), (0.02, 3e-4), (0.01, 3e-4), (0.005, 3e-4), (0.004, 4.5e-4)],
)
def test_the_step_size_follows_the_kl(kl, expected):
    assert losses.adapted_learning_rate(3e-4, kl, 0.01) == pytest.approx(expected)


def test_the_step_size_stays_within_its_bounds():
    assert losses.adapted_learning_rate(1.2e-5, 1.0, 0.01) == 1e-5
    assert losses.adapted_learning_rate(9e-3, 0.0, 0.01) == 1e-2


def test_gaussian_head_agrees_with_torch_distributions():
    torch.manual_seed(0)
    head = GaussianHead(3, -0.5)
    head.log_std.data += torch.tensor([0.1, 0.0, -0.3])
    mean, noise = torch.randn(5, 3), torch.randn(5, 3)
    actions = head.sample(mean, noise)
    reference = torch.distributions.Normal(mean, head.log_std.exp())
    assert torch.allclose(head.log_prob(mean, actions), reference.log_prob(actions).sum(-1), atol=1e-5)
    assert torch.allclose(head.entropy(mean), reference.entropy().sum(-1).mean(), atol=1e-6)
    assert torch.allclose((actions - mean) / head.log_std.exp(), noise, atol=1e-5)
    assert torch.equal(head.mode(mean), mean)


def test_categorical_head_agrees_with_torch_distributions():
    torch.manual_seed(0)
    head, logits = CategoricalHead(4), torch.randn(6, 4)
    actions = torch.tensor([0, 1, 2, 3, 0, 2])
    reference = torch.distributions.Categorical(logits=logits)
    assert torch.allclose(head.log_prob(logits, actions), reference.log_prob(actions), atol=1e-6)
    assert torch.allclose(head.entropy(logits), reference.entropy().mean(), atol=1e-6)


def test_gumbel_noise_samples_the_softmax():
    torch.manual_seed(0)
    logits = torch.tensor([0.0, math.log(3.0)]).expand(40_000, 2)
    gumbel = -(-torch.rand(40_000, 2).log()).log()
    share = CategoricalHead(logits.shape[-1]).sample(logits, gumbel).float().mean().item()
    # p(1) = 3/4; standard error sqrt(0.75 * 0.25 / 40000) = 0.002
    assert share == pytest.approx(0.75, abs=0.01)


def test_the_head_follows_the_action_space():
    assert isinstance(make_head(ActionSpec(kind="discrete", dim=1, num_choices=4), 0.0), CategoricalHead)
    assert isinstance(make_head(ActionSpec(kind="continuous", dim=2), 0.0), GaussianHead)
