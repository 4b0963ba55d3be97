"""The synchronous program with its networks on a GPU and its physics on the host."""

from dataclasses import replace

import pytest
import torch

from actors.gmi import GmiContext
from collectives.experience.parameters import ParameterStore
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.ppo.captured import CapturedStepsPPOLearner
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.spec import GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import make_env_factory
from tests.fakes.point import make_point

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was verified"),
]

SPEC = RunSpec(
    gmi=GmiSpec(num_envs=8),
    network=NetworkSpec(hidden=(32, 16)),
    learning=PPOSpec(rollout_length=8, num_minibatches=2, num_epochs=1),
    seed=3,
)


def program(device, spec=SPEC, make_env=make_point):
    return TrainingFactory(spec, make_env)(GmiContext.local("Point", device=device))


@pytest.mark.parametrize("algorithm", ["ppo", "appo", "impala", "a3c"])
def test_an_iteration_on_the_gpu_agrees_with_one_on_the_cpu(algorithm):
    settings = DEFINITIONS[algorithm].settings(rollout_length=8, num_minibatches=2, num_epochs=1)
    spec = replace(SPEC, algorithm=algorithm, learning=settings)
    on_gpu, on_cpu = program("cuda:0", spec), program("cpu", spec)
    assert (type(on_gpu.learner) is CapturedStepsPPOLearner) == (algorithm == "ppo")
    found, expected = on_gpu.iterate(), on_cpu.iterate()
    assert on_gpu.rollout.obs.device.type == "cuda"
    assert torch.allclose(on_gpu.rollout.rewards, on_cpu.rollout.rewards, atol=1e-5)
    for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-3, abs=1e-4), name
    gpu_weights, cpu_weights = (
        on_gpu.learner.updater.flat.parameters,
        on_cpu.learner.updater.flat.parameters,
    )
    assert torch.allclose(gpu_weights.cpu(), cpu_weights, atol=1e-4)


@pytest.mark.parametrize(
    "make_env", [make_point, make_env_factory("CartPole-v1")], ids=["continuous", "discrete"]
)
def test_captured_steps_are_those_of_the_cpu_in_later_iterations_too(make_env):
    on_gpu, on_cpu = (program(device, make_env=make_env) for device in ("cuda:0", "cpu"))
    assert type(on_gpu.learner) is CapturedStepsPPOLearner
    for _ in range(4):
        found, expected = on_gpu.iterate().metrics, on_cpu.iterate().metrics
        for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-2, abs=1e-3), name


def test_a_state_saved_on_the_gpu_continues_there():
    straight, resumed = program("cuda:0"), program("cuda:0", replace(SPEC))
    straight.iterate()
    resumed.load_state_dict(straight.state_dict())
    assert resumed.iterate().metrics["policy_loss"] == pytest.approx(
        straight.iterate().metrics["policy_loss"], rel=1e-4
    )


def test_a_board_takes_parameters_from_the_gpu_and_gives_them_back_there():
    flat = torch.arange(10_000, device="cuda:0", dtype=torch.float32)
    with ParameterStore.host({"parameters": flat}) as parameter_store:
        parameter_store.publish({"parameters": flat}, 0)
        flat.zero_()
        for device in ("cuda:0", "cpu"):
            own = torch.zeros(10_000, device=device)
            assert parameter_store.read_into({"parameters": own}) == 0
            assert torch.equal(own.cpu(), torch.arange(10_000, dtype=torch.float32))
