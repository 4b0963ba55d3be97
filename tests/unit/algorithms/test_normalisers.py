"""Running statistics, and their states."""

import pytest
import torch

from rayagi.algorithms.normalisers import ObservationNormaliser


def test_a_restored_state_from_before_the_first_update_normalises_nothing():
    normaliser = ObservationNormaliser(2, 10.0, torch.device("cpu"))
    empty = normaliser.state_dict()
    normaliser.update(normaliser.moments_of(torch.tensor([[100.0, 4.0], [102.0, 6.0]])))
    assert normaliser.shift.tolist() == [101.0, 5.0]
    normaliser.load_state_dict(empty)
    assert (normaliser.shift.tolist(), normaliser.scale.tolist()) == ([0.0, 0.0], [1.0, 1.0])


def test_a_constant_column_is_scaled_by_the_root_of_epsilon():
    """1 / sqrt(0 + 1e-8) = 1e4."""
    normaliser = ObservationNormaliser(1, 1e9, torch.device("cpu"))
    normaliser.update(normaliser.moments_of(torch.full((4, 1), 2.0)))
    assert normaliser.scale.tolist() == pytest.approx([1e4])
