"""Networks, the flat bucket, and normalisers."""

import pytest
import torch
from torch import nn

from actors.protocols import ActionSpec, EnvInfo
from rayagi.algorithms.normalisers import Moments, ObservationNormaliser, RewardScaler
from rayagi.config.spec import NetworkSpec
from rayagi.models.networks import ActorCritic, FlatParameters

INFO = EnvInfo(
    env_id="x", engine="x", obs_dim=5, action=ActionSpec(kind="continuous", dim=3), max_episode_steps=None
)


def test_networks_have_the_layers_they_were_asked_for():
    model = ActorCritic(INFO, NetworkSpec(hidden=(7, 6), activation="tanh"))
    shapes = [tuple(layer.weight.shape) for layer in model.policy if isinstance(layer, nn.Linear)]
    assert shapes == [(7, 5), (6, 7), (3, 6)]
    assert [type(layer) for layer in model.policy][1] is nn.Tanh
    assert model.values(torch.zeros(2, 4, 5)).shape == (2, 4)


def test_the_same_seed_gives_the_same_weights_and_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    one, two, other = (ActorCritic(INFO, NetworkSpec(hidden=(4,)), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.policy[0].weight, other.policy[0].weight)


def test_hidden_weights_are_orthogonal_with_gain_root_two():
    weight = ActorCritic(INFO, NetworkSpec(hidden=(4, 4))).policy[2].weight
    assert torch.allclose(weight @ weight.T, 2 * torch.eye(4), atol=1e-5)


def test_gradients_are_written_to_the_flat_bucket_and_steps_reach_the_layers():
    model = ActorCritic(INFO, NetworkSpec(hidden=(4,)))
    reference = ActorCritic(INFO, NetworkSpec(hidden=(4,)))
    flat = FlatParameters(model)
    obs = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    for each in (model, reference):
        (each.policy(obs).square().sum() + each.values(obs).sum() + each.head.log_std.sum()).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in reference.parameters()])
    assert torch.allclose(flat.gradients[: expected.numel()], expected, atol=1e-6)
    assert not flat.gradients[expected.numel() :].any()
    before = model.policy[0].weight.detach().clone()
    torch.optim.SGD([flat.parameters], lr=0.1).step()
    assert torch.allclose(model.policy[0].weight, before - 0.1 * model.policy[0].weight.grad)


def test_loading_a_state_keeps_the_layers_views_of_the_flat_vector():
    model, other = (
        ActorCritic(INFO, NetworkSpec(hidden=(4,)), 1),
        ActorCritic(INFO, NetworkSpec(hidden=(4,)), 2),
    )
    flat = FlatParameters(model)
    model.load_state_dict(other.state_dict())
    expected = torch.cat([p.detach().reshape(-1) for p in other.parameters()])
    assert torch.equal(flat.parameters[: expected.numel()], expected)


def clip(flat, most):
    """Clip by the norm of all. Returns it."""
    norm = flat.norm()
    flat.clip(norm, most)
    return norm


def test_clipping_scales_to_the_limit():
    flat = FlatParameters(nn.Linear(2, 1, bias=False))
    gradients = flat.gradients[:2]
    gradients.copy_(torch.tensor([3.0, 4.0]))
    assert clip(flat, 0.0).item() == pytest.approx(5.0)
    assert gradients.tolist() == [3.0, 4.0]
    assert clip(flat, 1.0).item() == pytest.approx(5.0)
    assert gradients.tolist() == pytest.approx([0.6, 0.8], abs=1e-5)
    assert clip(flat, 10.0).item() == pytest.approx(1.0, abs=1e-5)
    assert gradients.tolist() == pytest.approx([0.6, 0.8], abs=1e-5)


def test_parameters_are_views_of_a_padded_vector():
    model = nn.Linear(7, 3)
    values = torch.cat([model.weight.detach().reshape(-1), model.bias.detach()])
    flat = FlatParameters(model)
    assert torch.equal(flat.parameters[:24], values)
    assert flat.parameters.shape == (512,)  # whole rows
    assert not flat.parameters[24:].any()
    flat.parameters.data[21] = 5.0
    assert model.bias[0] == 5.0


def test_a_gradient_of_nan_is_not_hidden():
    flat = FlatParameters(nn.Linear(2, 1, bias=False))
    flat.gradients[1] = torch.nan
    assert clip(flat, 1.0).isnan()
    assert flat.gradients.isnan().all()


def test_the_gradient_norm_does_not_depend_on_the_number_of_threads():
    flat = FlatParameters(nn.Linear(1000, 700))
    flat.gradients.copy_(torch.randn(flat.gradients.shape, generator=torch.Generator().manual_seed(0)))
    threads, norms = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            norms.append(clip(flat, 0.0).item())
    finally:
        torch.set_num_threads(threads)
    assert norms[0] == norms[1] == norms[2]
    assert norms[0] == pytest.approx(torch.linalg.vector_norm(flat.gradients.double()).item(), rel=1e-6)


def test_the_observation_normaliser_is_the_identity_before_its_first_update():
    normaliser = ObservationNormaliser(2, clip=10.0, device=torch.device("cpu"))
    assert normaliser(torch.tensor([[1.0, -20.0]])).tolist() == [[1.0, -10.0]]
    # column 0: mean 2, std 1; column 1: mean 0, std 2
    normaliser.update(Moments.from_batch(torch.tensor([[1.0, -2.0], [3.0, 2.0]])))
    assert normaliser(torch.tensor([[4.0, 1.0]])).flatten().tolist() == pytest.approx([2.0, 0.5], abs=1e-5)
    again = ObservationNormaliser(2, clip=10.0, device=torch.device("cpu"))
    again.load_state_dict(normaliser.state_dict())
    assert torch.equal(again(torch.tensor([[4.0, 1.0]])), normaliser(torch.tensor([[4.0, 1.0]])))


def test_rewards_are_divided_by_the_spread_of_the_running_return():
    scaler = RewardScaler(num_envs=1, gamma=0.5)
    rewards, done = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[False], [True], [False]])
    # running returns: 1, then 0.5 * 1 + 2 = 2.5 (ends), then 3
    moments = scaler.observe(rewards, done)
    values = [1.0, 2.5, 3.0]
    mean = sum(values) / 3
    variance = sum((value - mean) ** 2 for value in values) / 3
    assert moments.mean.item() == pytest.approx(mean)
    assert moments.variance().item() == pytest.approx(variance)
    scaler.update(moments)
    assert scaler(rewards).flatten().tolist() == pytest.approx(
        [r / variance**0.5 for r in (1.0, 2.0, 3.0)], rel=1e-5
    )
    assert scaler.running.tolist() == [3.0]
