"""Collectors and learners apart, with their networks on a GPU and experience in host memory."""

import pytest
import torch

from tests.unit.algorithms.test_collector_learner import APPO, SPEC, after, run_gmis

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was verified"),
]


@pytest.mark.parametrize("spec", [SPEC, APPO], ids=["ea_t with ppo", "decoupled with appo at lag 0"])
def test_updates_on_the_gpu_agree_with_those_on_the_cpu(spec):
    on_gpu, on_cpu = (run_gmis(spec, 2, 1, after(3), device)[2] for device in ("cuda:0", "cpu"))
    for found, expected in zip(on_gpu[0], on_cpu[0], strict=True):
        for name in ("policy_loss", "value_loss", "grad_norm"):
            assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-2, abs=1e-3), name
    for name, tensor in on_cpu[1]["learner"]["model"].items():
        torch.testing.assert_close(on_gpu[1]["learner"]["model"][name], tensor, rtol=1e-3, atol=1e-3)
