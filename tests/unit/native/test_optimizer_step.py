"""Compiled optimizer step, compared with torch's clipping and Adam."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayagi.native.learning import CompiledOptimizerStep, library

BETAS, EPS = (0.9, 0.999), 1e-5


class Vector:
    """Parameters with gradients and moments, (size,)."""

    def __init__(self, size, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.parameters = torch.randn(size, generator=generator)
        self.gradients = torch.randn(size, generator=generator)
        self.exp_avg, self.exp_avg_sq = torch.zeros(size), torch.zeros(size)

    def optimizer_step(self, most=0.0):
        program = library()
        assert program is not None, "no compiler"
        return CompiledOptimizerStep(
            program,
            parameters=self.parameters,
            gradients=self.gradients,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            steps=torch.zeros(()),
            betas=BETAS,
            eps=EPS,
            max_grad_norm=most,
        )


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([1, 15, 16, 17, 4095, 4096, 4097, 20_000]),
    st.sampled_from([0.0, 0.5, 1e6]),
    st.floats(1e-5, 0.1),
    st.integers(0, 2**31),
)
def test_steps_are_those_of_torch_in_float64(size, most, rate, seed):
    vector = Vector(size, seed)
    exact = torch.nn.Parameter(vector.parameters.double())
    adam = torch.optim.Adam([exact], lr=rate, betas=BETAS, eps=EPS)
    optimizer_step = vector.optimizer_step(most)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        vector.gradients.copy_(torch.randn(size, generator=generator))
        given = vector.gradients.clone()
        exact.grad = given.double()
        norm = torch.nn.utils.clip_grad_norm_([exact], most if most else math.inf)
        adam.step()
        assert optimizer_step.step(rate).item() == pytest.approx(norm.item(), rel=1e-6)
        assert torch.equal(vector.gradients, given)
    moved = rate * 4
    torch.testing.assert_close(vector.parameters.double(), exact.detach(), rtol=1e-6, atol=1e-5 * moved)
    state = adam.state[exact]
    torch.testing.assert_close(vector.exp_avg.double(), state["exp_avg"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(vector.exp_avg_sq.double(), state["exp_avg_sq"], rtol=1e-5, atol=1e-9)


def test_the_first_step_by_hand():
    vector = Vector(2)
    vector.parameters.fill_(1.0)
    vector.gradients.copy_(torch.tensor([3.0, -4.0]))  # a norm of 5, clipped to 1: 0.6 and -0.8
    assert vector.optimizer_step(most=1.0).step(0.25).item() == 5.0
    # Both moments' corrections cancel: a step of the size 0.25 against the sign, but for eps.
    assert vector.parameters.tolist() == pytest.approx([0.75, 1.25], abs=1e-5)
    assert vector.exp_avg.tolist() == pytest.approx([0.06, -0.08], rel=1e-4)
    assert vector.exp_avg_sq.tolist() == pytest.approx([0.36e-3, 0.64e-3], rel=1e-4)


def test_a_gradient_of_nan_is_not_hidden():
    vector = Vector(5000)
    vector.gradients[4100] = torch.nan
    assert vector.optimizer_step(most=1.0).step(0.1).isnan()
    assert vector.parameters.isnan().all()
