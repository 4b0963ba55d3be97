"""Quaternions over tensors against MuJoCo's own, one at a time."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch

from rayagi.envs.tasks import rotations

RNG = np.random.default_rng(3)
QUATS = torch.from_numpy(RNG.standard_normal((20, 4)))
QUATS /= QUATS.norm(dim=-1, keepdim=True)
OTHERS = QUATS.flip(0)
VECTORS = torch.from_numpy(RNG.standard_normal((20, 3)))


def mujocos(function, size, *arguments):
    out = np.zeros((20, size))
    for row, *given in zip(out, *(argument.numpy() for argument in arguments), strict=True):
        function(row, *given)
    return out


def test_products_inverses_and_rotated_vectors_equal_mujocos():
    np.testing.assert_allclose(
        rotations.multiply(QUATS, OTHERS), mujocos(mujoco.mju_mulQuat, 4, QUATS, OTHERS), atol=1e-12
    )
    np.testing.assert_allclose(rotations.conjugate(QUATS), mujocos(mujoco.mju_negQuat, 4, QUATS), atol=1e-12)
    turned = rotations.rotate(QUATS, VECTORS)
    np.testing.assert_allclose(turned, mujocos(mujoco.mju_rotVecQuat, 3, VECTORS, QUATS), atol=1e-12)
    np.testing.assert_allclose(rotations.rotate_back(QUATS, turned), VECTORS, atol=1e-12)


def test_a_matrix_has_the_bodys_axes_as_columns():
    want = mujocos(mujoco.mju_quat2Mat, 9, QUATS).reshape(20, 3, 3)
    np.testing.assert_allclose(rotations.matrix(QUATS), want, atol=1e-12)
    assert rotations.matrix(QUATS.view(4, 5, 4)).shape == (4, 5, 3, 3)


@pytest.mark.parametrize("degrees", [-170.0, -30.0, 0.0, 45.0, 120.0])
def test_a_turn_around_one_axis_is_that_angle(degrees):
    radians = torch.tensor([np.radians(degrees)])
    around = {
        axis: rotations.from_axis_angle(torch.eye(3, dtype=torch.float64)[k], radians)
        for k, axis in enumerate("xyz")
    }
    unturned = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    for turn in (*around.values(), -around["y"]):
        assert float(rotations.angle_between(turn, unturned)) == pytest.approx(abs(np.radians(degrees)))


def test_the_angle_between_two_rotations_is_that_of_their_relative_rotation():
    inverses, between = rotations.conjugate(OTHERS), np.zeros((20, 4))
    for row, one, other in zip(between, QUATS.numpy(), inverses.numpy(), strict=True):
        mujoco.mju_mulQuat(row, one, other)
    want = 2.0 * np.arccos(np.abs(between[:, 0]).clip(max=1.0))
    np.testing.assert_allclose(rotations.angle_between(QUATS, OTHERS), want, atol=1e-12)
    np.testing.assert_allclose(rotations.angle_between(QUATS, -OTHERS), want, atol=1e-12)
    assert rotations.angle_between(QUATS, QUATS).abs().max() == 0.0
