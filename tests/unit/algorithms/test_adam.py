"""The flat optimiser makes torch.optim.Adam's steps, to the last bit, and saves what that would."""

from pathlib import Path

import pytest
import torch
from torch import nn

from rayagi.algorithms.gradient_updater import FlatAdam
from rayagi.models.networks import FlatParameters
from tests.programs import run_python

RATES = (2.0**-10, 2.0**-10, 2.0**-11, 0.0)  # as exact in float32 as in float64


def both():
    """The same parameters, stepped by us and by torch."""
    torch.manual_seed(0)
    flat = FlatParameters(nn.Linear(7, 3))
    reference = nn.Parameter(flat.parameters.detach().clone())
    return (
        FlatAdam(flat, learning_rate=RATES[0], eps=1e-5),
        torch.optim.Adam([reference], lr=RATES[0], eps=1e-5, fused=True),
    )


def step(ours, reference, rate, seed):
    generator = torch.Generator().manual_seed(seed)
    (parameters,) = reference.param_groups[0]["params"]
    parameters.grad = torch.randn(parameters.shape, generator=generator)
    ours.flat.gradients.copy_(parameters.grad)
    reference.param_groups[0]["lr"] = rate
    ours.set_learning_rate(rate)
    reference.step()
    ours.step()
    assert torch.equal(ours.flat.parameters, parameters)
    for name, tensor in ours.tensors().items():
        assert torch.equal(tensor, reference.state[parameters][name]), name


def test_steps_are_torchs():
    ours, reference = both()
    begin = ours.flat.parameters.detach().clone()
    for seed, rate in enumerate(RATES):
        step(ours, reference, rate, seed)
    assert not torch.equal(ours.flat.parameters, begin)


def test_the_first_step_by_hand():
    ours, _ = both()
    begin = ours.flat.parameters.detach().clone()
    ours.flat.gradients.fill_(-2.0)
    ours.step()
    # Both moments' corrections cancel: m / (1 - 0.9) = -2, sqrt(v / (1 - 0.999)) = 2.
    assert torch.allclose(ours.flat.parameters - begin, torch.tensor(RATES[0] * 2 / (2 + 1e-5)), rtol=1e-4)


@pytest.mark.parametrize("number", [0, 2])
def test_a_state_of_torch_is_restored_in_place(number):
    ours, reference = both()
    for seed in range(number):
        step(ours, reference, RATES[0], seed)
    saved = reference.state_dict()
    fresh, _ = both()
    fresh.flat.gradients.fill_(1.0)
    fresh.step()  # something to forget
    fresh.flat.parameters.data.copy_(ours.flat.parameters)
    addresses = {name: tensor.data_ptr() for name, tensor in fresh.tensors().items()}
    fresh.load_state_dict(saved)
    step(fresh, reference, RATES[0], number)
    assert {name: tensor.data_ptr() for name, tensor in fresh.tensors().items()} == addresses


def test_a_saved_state_is_restored():
    ours, reference = both()
    for seed in range(2):
        step(ours, reference, RATES[0], seed)
    fresh, _ = both()
    fresh.flat.parameters.data.copy_(ours.flat.parameters)
    fresh.load_state_dict(ours.state_dict())
    step(fresh, reference, RATES[0], 2)


def test_a_step_size_that_is_kept_on_the_device_makes_the_same_steps():
    ours, reference = both()
    ours.make_capturable()
    address = ours.learning_rate.data_ptr()
    for seed, rate in enumerate(RATES):
        step(ours, reference, rate, seed)
    assert ours.learning_rate.data_ptr() == address


def test_training_does_not_import_torchs_compiler():
    code = """
import sys
sys.path[:0] = ["tests/unit/algorithms"]
from test_program import build
program = build()
program.iterate()
program.load_state_dict(program.state_dict())
program.iterate()
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    root = Path(__file__).parents[3]
    done = run_python(code, cwd=root)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
