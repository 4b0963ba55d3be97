"""C51's projection against hand arithmetic, against the definition as a sum of hats, and its invariants."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayagi.algorithms.categorical import Support, cross_entropy, divergence

FIVE = Support(-2.0, 2.0, 5)  # atoms -2, -1, 0, 1, 2


def projected(probabilities, reward, discount, support=FIVE):
    return support.project(
        torch.tensor([probabilities], dtype=torch.float32), torch.tensor([reward]), torch.tensor([discount])
    )[0].tolist()


def test_an_atom_between_two_is_split_by_its_distances():
    # 0.25 + 0.5 * 1 = 0.75: a quarter to 0, three quarters to 1
    assert projected([0, 0, 0, 1, 0], 0.25, 0.5) == pytest.approx([0, 0, 0.25, 0.75, 0])


def test_an_atom_that_falls_onto_another_keeps_its_mass():
    # 1 + 1 * 0 = 1, where algorithm 1 as printed has l = u and loses it
    assert projected([0, 0, 1, 0, 0], 1.0, 1.0) == pytest.approx([0, 0, 0, 1, 0])


def test_what_leaves_the_support_is_clipped_to_its_ends():
    # -2 .. 2 + 1.5 = -0.5, 0.5, 1.5, 2.5, 3.5, a fifth each: halves at -1, 0, 1, 2, and two fifths at 2
    assert projected([0.2] * 5, 1.5, 1.0) == pytest.approx([0, 0.1, 0.2, 0.2, 0.5])
    assert projected([0.2] * 5, 1e30, 0.99) == pytest.approx([0, 0, 0, 0, 1.0])
    assert projected([0.2] * 5, -1e30, 0.99) == pytest.approx([1.0, 0, 0, 0, 0])


def test_a_terminal_return_is_a_point():
    # discount 0: all mass at 0.4, whatever the next distribution was
    assert projected([0.1, 0.2, 0.3, 0.2, 0.2], 0.4, 0.0) == pytest.approx([0, 0, 0.6, 0.4, 0])


def test_values_that_are_not_numbers_stay_within_the_memory_and_are_seen():
    assert not torch.tensor(projected([0.2] * 5, float("nan"), 1.0)).isfinite().all()


@given(seed=st.integers(0, 10_000), atoms=st.integers(2, 12), low=st.floats(-20, 5), width=st.floats(0.5, 30))
@settings(max_examples=60, deadline=None)
def test_the_projection_is_the_sum_of_hats_and_keeps_mass_and_mean_within_the_support(
    seed, atoms, low, width
):
    generator = torch.Generator().manual_seed(seed)
    support = Support(low, low + width, atoms)
    before = torch.rand(6, atoms, generator=generator).softmax(-1)
    returns, discounts = (
        torch.randn(6, generator=generator) * width,
        torch.rand(6, generator=generator).round(decimals=1),
    )
    after = support.project(before, returns, discounts)
    # Equation 7: (Phi T Z)_i = sum_j [1 - |[T z_j] - z_i| / dz]_0^1 p_j
    z = support.atoms().double()
    moved = (returns.double().unsqueeze(1) + discounts.double().unsqueeze(1) * z).clamp(z[0], z[-1])
    hats = (1 - (moved.unsqueeze(1) - z.view(1, -1, 1)).abs() / (z[1] - z[0])).clamp(0, 1)
    assert torch.allclose(after.double(), (hats * before.double().unsqueeze(1)).sum(-1), atol=2e-4)
    assert torch.allclose(after.sum(-1), torch.ones(6), atol=1e-5)
    mean = (before.double() * moved).sum(-1)
    assert torch.allclose(support.expectation(after).double(), mean, atol=2e-4 * max(1, abs(low) + width))


def test_expectation_cross_entropy_and_divergence_by_hand():
    # 0.5 * -1 + 0.5 * 2 = 0.5
    half = torch.tensor([[0.0, 0.5, 0.0, 0.0, 0.5]])
    assert FIVE.expectation(half).tolist() == [0.5]
    log_p = torch.tensor([[0.1, 0.25, 0.1, 0.3, 0.25]]).log()
    # -log 0.25 = 1.3863; less the entropy log 2 = 0.6931
    assert cross_entropy(half, log_p).tolist() == pytest.approx([1.3863], abs=1e-4)
    assert divergence(half, log_p).tolist() == pytest.approx([0.6931], abs=1e-4)
    assert divergence(log_p.exp(), log_p).tolist() == pytest.approx([0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "atoms"), [(-10.0, 200.0, 51), (-5.0, 100.0, 101), (-250.0, 12.0, 51)]
)
def test_no_target_is_less_than_nothing_where_all_mass_lies_beyond_the_support(low, high, atoms):
    """In float32 the place of the last atom is rounded beyond it in these ranges."""
    support = Support(low, high, atoms)
    whole = torch.full((2, atoms), 1 / atoms)
    found = support.project(whole, torch.tensor([600.0, 900.0]), torch.tensor([0.0, 0.9]))
    assert (found >= 0).all()
    torch.testing.assert_close(found[:, -1], torch.ones(2))
    assert divergence(found, whole.log()).isfinite().all()
