"""Tensors of other types than a compiled program's: refused, or converted. Environments may change torch's default type."""

import pytest
import torch
from test_acting import CONTINUOUS, DISCRETE, compiled, filled, info_of, policy_of
from test_optimizer_step import Vector
from test_ppo import batch_of, learner_of
from test_ppo import compiled as gradient_of

from actors.roles import Agent
from rayagi.native.binding import pointer


@pytest.fixture
def doubles():
    """Tensors are float64 unless a type is named."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


REFUSED = (
    r"a kernel takes torch.float32, not torch.float64: does an environment .* call torch.set_default_dtype"
)


def test_an_address_is_of_the_type_that_is_wanted():
    tensor = torch.zeros(3, dtype=torch.int64)
    assert pointer(tensor) == pointer(tensor, torch.int64) == tensor.data_ptr()
    with pytest.raises(ValueError, match=r"takes torch.float32, not torch.int64"):
        pointer(tensor, torch.float32)


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE])
def test_acting_refuses_a_policy_or_a_rollout_of_doubles(action, doubles):
    info, noise = info_of(4, action), torch.zeros(1, 8, action.num_choices or action.dim, dtype=torch.float32)
    policy = policy_of(info)
    with pytest.raises(ValueError, match=REFUSED):
        filled(compiled, Agent(policy), info, torch.zeros(1, 8, 4), noise)
    policy.model.float()
    policy.normaliser = None
    with pytest.raises(ValueError, match=REFUSED):  # only the rollout's tensors are left
        filled(compiled, Agent(policy), info, torch.zeros(1, 8, 4), noise)


def test_scratch_memory_and_statistics_do_not_follow_the_default():
    learner = learner_of()
    batch, order = batch_of(learner, 40), torch.arange(40)
    vector = Vector(20, 1)
    step = vector.optimizer_step()
    gradient, parts = gradient_of(learner, batch, order)
    values = learner._compiled.values(batch.obs)
    torch.set_default_dtype(torch.float64)
    try:
        found, found_parts = gradient_of(learner, batch, order)
        assert torch.equal(learner._compiled.values(batch.obs), values)
        norm = step.step(0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, gradient)
    assert torch.equal(found_parts, parts)
    assert float(norm) == pytest.approx(float(vector.gradients.double().norm()), rel=1e-6)


@pytest.mark.parametrize("name", ["parameters", "gradients", "exp_avg", "exp_avg_sq"])
def test_an_optimizer_step_refuses_doubles(name):
    vector = Vector(20, 1)
    setattr(vector, name, getattr(vector, name).double())
    with pytest.raises(ValueError, match=REFUSED):
        vector.optimizer_step()
