"""MuJoCo Warp's worlds on a GPU, and rollouts and updates captured there."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from actors.gmi import GmiContext
from actors.host_memory import device_bytes
from rayagi.algorithms.device_rollouts import DeviceRollouts
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.ppo.captured import CapturedPPOLearner
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import make_env_factory
from rayagi.envs.tasks.provider import TASKS
from rayagi.models.policy import new_policy

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "envs"))
from warp_beside_cpu import make_env, same_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was verified"),
    pytest.mark.skipif(find_spec("mujoco_warp") is None, reason="the extra 'gpu' is not installed"),
]

ANT, ENVS, STEPS = "rayagi/Ant-v0", 64, 8
SPEC = RunSpec(
    env=EnvSpec(id=ANT, engine="mujoco_warp"),
    gmi=GmiSpec(num_envs=ENVS),
    network=NetworkSpec(hidden=(32, 16)),
    learning=PPOSpec(rollout_length=STEPS, num_minibatches=2, num_epochs=2, normalize_rewards=True),
    seed=3,
)


@pytest.mark.parametrize("env_id", TASKS)
def test_a_task_takes_the_same_course_on_a_gpu_and_on_the_cpu(env_id):
    here, there = (make_env(env_id, engine, 16) for engine in ("mujoco_warp", "mujoco_cpu"))
    assert here.device.type == "cuda"
    generator = torch.Generator().manual_seed(5)
    here.reset(), there.reset()
    for warm_up in (0, 15):
        for _ in range(warm_up):
            there.step(2.0 * torch.rand((16, here.info.action.dim), generator=generator) - 1.0)
        same_state(there, here)
        for _ in range(20):
            actions = 2.0 * torch.rand((16, here.info.action.dim), generator=generator) - 1.0
            found, expected = here.step(actions), there.step(actions)
            error = (found.obs - expected.obs).abs() / expected.obs.abs().clamp(min=1.0)
            assert error.max() < 2e-2
            assert torch.allclose(found.rewards, expected.rewards, rtol=2e-2, atol=2e-2)


def rollouts():
    env = make_env(ANT, "mujoco_warp", ENVS, seed=SPEC.seed)
    env._limit = 5
    device = DeviceRollouts(env, new_policy(SPEC, env.info, env.device), num_steps=STEPS, seed=SPEC.seed)
    env._elapsed += torch.arange(ENVS, device=env.device) % 5
    return device


def test_a_captured_rollout_is_the_uncaptured_one():
    captured, plain = rollouts(), rollouts()
    for iteration in range(3):
        captured.collect(iteration)
        plain.iteration.fill_(iteration)
        plain.run()
        for name in ("actions", "terminated", "truncated", "rewards", "raw_obs"):
            found, expected = (getattr(each.rollout, name).float() for each in (captured, plain))
            assert torch.allclose(found, expected, rtol=1e-2, atol=1e-2), (iteration, name)
    assert torch.equal(captured.env._episode, plain.env._episode)


def test_replays_draw_new_noise():
    device = rollouts()
    device.collect(0)
    first = device.rollout.actions.clone()
    device.collect(1)
    assert not torch.allclose(first, device.rollout.actions)


def test_a_step_waits_for_nothing():
    device = rollouts()
    device.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        device.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def context():
    return GmiContext.local(ANT, device="cuda:0")


def program(spec=SPEC):
    return TrainingFactory(spec, make_env_factory(ANT, engine="mujoco_warp"))(context())


def test_a_program_takes_the_captured_path_and_learns():
    learner = program()
    assert isinstance(learner.learner, CapturedPPOLearner)
    before = learner.learner.updater.flat.parameters.detach().clone()
    results = [learner.iterate() for _ in range(3)]
    assert all(result.metrics["env_steps"] == ENVS * STEPS for result in results)
    assert not torch.equal(before, learner.learner.updater.flat.parameters)
    assert all(result.metrics["grad_norm"] > 0 for result in results)


def test_a_captured_update_is_the_uncaptured_one():
    captured, plain = program(), program()
    plain.learner._replay = plain.learner.run
    for _ in range(3):
        found, expected = captured.iterate().metrics, plain.iterate().metrics
        for name in ("policy_loss", "value_loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=5e-2, abs=1e-2), name


def test_a_saved_program_goes_on():
    straight, resumed = program(), program()
    straight.iterate()
    resumed.iterate()
    resumed.load_state_dict(straight.state_dict())
    found, expected = resumed.iterate().metrics, straight.iterate().metrics
    assert found["policy_loss"] == pytest.approx(expected["policy_loss"], rel=5e-2, abs=1e-2)


def test_launches_of_an_iteration_do_not_grow_with_the_rollout():
    from experiments.gpu_rollouts.cases import profiled

    counts = []
    for steps in (8, 32):
        learner = program(replace(SPEC, learning=replace(SPEC.learning, rollout_length=steps)))
        for _ in range(2):
            learner.iterate()
        counts.append(profiled(learner.iterate)["launches"])
    assert counts[0] == counts[1]


def test_memory_is_known_before_it_is_taken():
    from rayagi.envs.mujoco_warp.capacity import bytes_per_world, measured

    model, count = TASKS[ANT]().load(), 8192
    loaded = make_env(ANT, "mujoco_warp", 1)
    loaded.reset()
    loaded.step(torch.zeros(1, 8))  # kernels are loaded
    gc.collect()  # of the tests before
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, held = torch.cuda.mem_get_info()[0], device_bytes(torch.device("cuda:0"))
    env = make_env(ANT, "mujoco_warp", count)
    env.reset()
    env.step(torch.zeros(count, 8))
    taken = free - torch.cuda.mem_get_info()[0]
    expected = count * bytes_per_world(model, measured(TASKS[ANT](), model))
    assert 0.5 * expected < taken < 1.2 * expected
    counted = device_bytes(torch.device("cuda:0")) - held  # without what a step allocates and frees
    assert 0.3 * expected < counted < 1.2 * expected
