"""Noisy layers against the matrices of the paper."""

import pytest
import torch

from rayagi.models.q_network import NoisyLinear


def layer(inputs=3, outputs=2, seed=0):
    return NoisyLinear(inputs, outputs, torch.Generator().manual_seed(seed))


def test_one_row_of_noise_perturbs_the_weights_as_in_equations_10_and_11():
    noisy = layer(2, 1)
    with torch.no_grad():
        noisy.weight.copy_(torch.tensor([[1.0, 2.0]]))
        noisy.bias.fill_(0.5)
        noisy.weight_sigma.copy_(torch.tensor([[0.1, 0.2]]))
        noisy.bias_sigma.fill_(0.3)
    # f(4) = 2, f(-9) = -3, f(1) = 1: w = (1 + 0.1 * 1 * 2, 2 + 0.2 * 1 * -3) = (1.2, 1.4), b = 0.5 + 0.3
    found = noisy(torch.tensor([[1.0, 1.0], [2.0, 0.0]]), torch.tensor([[4.0, -9.0, 1.0]]))
    assert found.flatten().tolist() == pytest.approx([1.2 + 1.4 + 0.8, 2.4 + 0.8])


def test_each_row_has_its_own_noise_as_if_it_were_alone():
    noisy = layer(5, 4)
    generator = torch.Generator().manual_seed(1)
    x, noise = torch.randn(6, 5, generator=generator), torch.randn(6, 9, generator=generator)
    alone = torch.cat([noisy(row, its) for row, its in zip(x.split(1), noise.split(1), strict=True)])
    assert torch.allclose(noisy(x, noise), alone, atol=1e-6)


def test_without_noise_the_mean_weights_act():
    noisy = layer()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    assert torch.equal(noisy(x), torch.nn.functional.linear(x, noisy.weight, noisy.bias))
    assert torch.allclose(noisy(x, torch.zeros(1, 5)), noisy(x))


def test_initial_values_are_those_of_section_3_2_and_depend_on_the_generator_alone():
    noisy = layer(400, 50)
    assert noisy.weight.abs().max() <= 0.05  # 1 / sqrt(400)
    assert noisy.weight.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.02)
    assert noisy.weight_sigma.unique().tolist() == noisy.bias_sigma.unique().tolist()
    assert noisy.weight_sigma[0, 0].item() == pytest.approx(0.5 / 20)
    assert torch.equal(noisy.weight, layer(400, 50).weight)
    assert not torch.equal(noisy.weight, layer(400, 50, seed=1).weight)


def test_gradients_reach_the_noise_scales():
    noisy = layer()
    noisy(torch.ones(4, 3), torch.ones(1, 5)).sum().backward()
    assert torch.equal(noisy.weight_sigma.grad, torch.full((2, 3), 4.0))  # f = 1: d y / d sigma = x
