"""The printed CUDA and Warp kernels on a GPU: the same steps as torch on the host; one launch for all of them."""

from importlib.util import find_spec

import pytest
import torch

from experiments.fusion.variants.catalogue import variant
from experiments.fusion.variants.variant import BenchmarkConfig, BenchmarkState, random_actions
from rayagi.envs.fused.simulators import CartPole, Quadrotor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was verified"),
]


@pytest.mark.parametrize("name", ["cuda", "warp-gpu"])
@pytest.mark.parametrize("simulator", [CartPole(), Quadrotor()], ids=lambda s: s.name)
@pytest.mark.parametrize(("compute", "copies"), [(1, 1), (3, 4)])
@pytest.mark.parametrize(("real", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_a_kernel_on_a_gpu_moves_as_torch_does(name, simulator, compute, copies, real, tolerance):
    if name == "warp-gpu" and find_spec("warp") is None:
        pytest.skip("no warp: nothing here was verified")
    knobs = {"compute": compute, "copies": copies, "real": real}
    work = BenchmarkConfig(simulator=simulator, num_envs=1000, steps_per_call=20, seed=5, **knobs)
    found, wanted = (_stepped(one, work) for one in (name, "torch"))
    assert torch.equal(found.env_state.episode, wanted.env_state.episode)
    assert torch.equal(found.totals.ended, wanted.totals.ended)
    for one, other in (
        (found.env_state.state, wanted.env_state.state),
        (found.copies, wanted.copies),
        (found.totals.rewards, wanted.totals.rewards),
    ):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def _stepped(name: str, work: BenchmarkConfig) -> BenchmarkState:
    stepper = variant(name).make(work)
    stepper.step(stepper.prepare(random_actions(work)))
    return stepper.get()
