"""Compiled optimizer step, compared with torch's clipping and Adam: alone, sharded, and with long waits."""

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shm_kernel import close, group
from test_shm_waiting import LIMIT_S, in_threads

from collectives.errors import CommunicatorError
from collectives.shares import shares
from rayagi.native.learning import library
from rayagi.native.optimizer_step import SHARE_STRIDE, CompiledOptimizerStep, OptimizerState

BETAS, EPS = (0.9, 0.999), 1e-5


class Vector:
    """Parameters with gradients and moments, (size,)."""

    def __init__(self, size, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.parameters = torch.randn(size, generator=generator)
        self.gradients = torch.randn(size, generator=generator)
        self.exp_avg, self.exp_avg_sq = torch.zeros(size), torch.zeros(size)
        self.share_sums = torch.zeros((1, SHARE_STRIDE), dtype=torch.float64)

    def optimizer_step(
        self,
        most=0.0,
        share=slice(None),
        rank=0,
        gradients=None,
        operations=None,
        python_operations=None,
    ):
        program = library()
        assert program is not None, "no compiler"
        stepped = OptimizerState(
            parameters=self.parameters[share],
            gradients=(self.gradients if gradients is None else gradients)[share],
            exp_avg=self.exp_avg[share],
            exp_avg_sq=self.exp_avg_sq[share],
            steps=torch.zeros(()),
            betas=BETAS,
            eps=EPS,
            max_grad_norm=most,
            share_sums=self.share_sums,
            rank=rank,
            reduces=operations is not None or python_operations is not None,
        )
        return CompiledOptimizerStep(program, stepped, operations, python_operations or {})


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
        found, waited_s = optimizer_step.step(rate)
        assert found.item() == pytest.approx(norm.item(), rel=1e-6)
        assert torch.equal(vector.gradients, given)
        assert waited_s < LIMIT_S
    moved = rate * 4
    torch.testing.assert_close(vector.parameters.double(), exact.detach(), rtol=1e-6, atol=1e-5 * moved)
    state = adam.state[exact]
    torch.testing.assert_close(vector.exp_avg.double(), state["exp_avg"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(vector.exp_avg_sq.double(), state["exp_avg_sq"], rtol=1e-5, atol=1e-9)


def test_the_first_step_by_hand():
    vector = Vector(2)
    vector.parameters.fill_(1.0)
    vector.gradients.copy_(torch.tensor([3.0, -4.0]))  # a norm of 5, clipped to 1: 0.6 and -0.8
    norm, _ = vector.optimizer_step(most=1.0).step(0.25)
    assert norm.item() == 5.0
    # Both moments' corrections cancel: a step of the size 0.25 against the sign, but for eps.
    assert vector.parameters.tolist() == pytest.approx([0.75, 1.25], abs=1e-5)
    assert vector.exp_avg.tolist() == pytest.approx([0.06, -0.08], rel=1e-4)
    assert vector.exp_avg_sq.tolist() == pytest.approx([0.36e-3, 0.64e-3], rel=1e-4)


def test_a_gradient_of_nan_is_not_hidden():
    vector = Vector(5000)
    vector.gradients[4100] = torch.nan
    norm, _ = vector.optimizer_step(most=1.0).step(0.1)
    assert norm.isnan()
    assert vector.parameters.isnan().all()


def stepped_by_all(world_size, size, most, operations_of):
    """State of a sharded optimizer after three steps of a group: its vector, and each member's norms."""
    whole = Vector(size, seed=9)
    whole.share_sums = torch.zeros((world_size, SHARE_STRIDE), dtype=torch.float64)
    transports, norms = group(world_size), [[] for _ in range(world_size)]

    def train(rank):
        transport = transports[rank]
        gradients = transport.buffer(size, torch.float32)
        share = slice(*shares(size, world_size)[rank])
        operations, python_operations = operations_of(transport, gradients)
        optimizer_step = whole.optimizer_step(most, share, rank, gradients, operations, python_operations)
        for number in range(3):
            gradients.copy_(gradient_of(rank, number, size))
            norms[rank].append(optimizer_step.step(0.01)[0].item())

    assert in_threads([lambda rank=rank: train(rank) for rank in range(world_size)]) == [None] * world_size
    close(transports)
    return whole, norms


def gradient_of(rank, number, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + number))


def compiled_operations(transport, gradients):
    return transport.compiled(gradients), None


def python_operations(transport, gradients):
    return None, {"reduce": lambda: transport.reduce_scatter(gradients, "mean"), "barrier": transport.barrier}


@pytest.mark.parametrize("operations_of", [compiled_operations, python_operations])
@pytest.mark.parametrize(("world_size", "size"), [(2, 17), (2, 9000), (3, 50_000)])
def test_a_sharded_optimizer_makes_the_steps_of_one_trainer(world_size, size, operations_of):
    alone, expected = Vector(size, seed=9), []
    optimizer_step = alone.optimizer_step(most=0.5)
    for number in range(3):
        each = [gradient_of(rank, number, size) for rank in range(world_size)]
        alone.gradients.copy_(torch.stack(each).mean(0))
        expected.append(optimizer_step.step(0.01)[0].item())
    whole, norms = stepped_by_all(world_size, size, 0.5, operations_of)
    assert all(own == pytest.approx(expected, rel=1e-5) for own in norms)
    assert all(own == norms[0] for own in norms)
    torch.testing.assert_close(whole.parameters, alone.parameters, rtol=1e-5, atol=1e-6)


def test_a_long_wait_is_completed_by_python():
    left = threading.Event()

    def operations_of(transport, gradients):
        operations = transport.compiled(gradients)
        if transport.rank == 0:
            assert left.wait(LIMIT_S)  # comes when rank 1 has given the wait up
        else:
            run = transport._kernel.run
            transport._kernel.run = lambda *given: (left.set(), run(*given))[1]
        return operations, None

    whole, norms = stepped_by_all(2, 9000, 0.5, operations_of)
    other, others = stepped_by_all(2, 9000, 0.5, compiled_operations)
    assert norms == others
    assert torch.equal(whole.parameters, other.parameters)


def errors_of(first, second):
    """Errors of a group of two whose members call different operations."""
    transports = group(2, timeout_s=LIMIT_S)
    vector = Vector(1000)
    vector.share_sums = torch.zeros((2, SHARE_STRIDE), dtype=torch.float64)

    def member(rank, do):
        gradients = transports[rank].buffer(1000, torch.float32)
        do(transports[rank], gradients, vector)

    errors = in_threads([lambda: member(0, first), lambda: member(1, second)])
    close(transports)
    return errors


def step_compiled(transport, gradients, vector):
    share = slice(*shares(1000, 2)[transport.rank])
    operations = transport.compiled(gradients)
    vector.optimizer_step(share=share, rank=transport.rank, gradients=gradients, operations=operations).step(
        0.1
    )


def test_a_mismatched_call_is_an_error():
    errors = errors_of(step_compiled, lambda transport, gradients, vector: transport.all_reduce(gradients))
    assert all(isinstance(error, CommunicatorError) for error in errors)
    assert any("every member must call the same operations" in str(error) for error in errors)


def test_a_member_that_leaves_is_named():
    error, _ = errors_of(step_compiled, lambda transport, gradients, vector: transport.close())
    assert "rank 1" in str(error)
    assert "left the group" in str(error)


def test_only_registered_memory_is_reduced_by_programs():
    transports = group(2)
    with pytest.raises(ValueError, match="does not begin a buffer"):
        transports[0].compiled(torch.zeros(100))
    close(transports)
