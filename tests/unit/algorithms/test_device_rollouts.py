"""Captured rollouts and updates, run eagerly on a CPU and compared with the ordinary ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.roles import Agent, LocalSimulator, collect
from actors.rollout import Rollout
from collectives.solo import SoloCommunicator
from rayagi.algorithms.device_rollouts import minibatch_orders, normal_noise
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.ppo.captured import CapturedPPOLearner
from rayagi.algorithms.program import make_learner
from rayagi.config.spec import NetworkSpec, RunSpec
from rayagi.models.policy import new_policy

ANT, ENVS, STEPS = "rayagi/Ant-v0", 3, 8
SPEC = RunSpec(
    network=NetworkSpec(hidden=(16, 8)),
    learning=PPOSpec(rollout_length=STEPS, num_minibatches=2, num_epochs=2, normalize_rewards=True),
    seed=3,
)


def test_noise_is_normal_and_belongs_to_the_environment():
    iteration = torch.tensor(4)
    whole = normal_noise(7, torch.arange(200), iteration, 50, 6)
    assert abs(float(whole.mean())) < 0.01
    assert float(whole.std()) == pytest.approx(1.0, abs=0.01)
    assert float((whole.abs() > 1.959964).float().mean()) == pytest.approx(0.05, abs=0.004)
    assert torch.equal(normal_noise(7, torch.arange(50, 60), iteration, 50, 6), whole[:, 50:60])
    assert not torch.equal(normal_noise(7, torch.arange(200), iteration + 1, 50, 6), whole)
    assert not torch.equal(whole[0], whole[1])


def test_orders_deal_every_environments_steps_evenly():
    orders = minibatch_orders(7, torch.arange(3), torch.tensor(0), 8, 2, 4)
    assert orders.shape == (2, 4, 6)
    for epoch in orders:
        assert sorted(epoch.flatten().tolist()) == list(range(24))
        for minibatch in epoch:
            assert sorted((minibatch % 3).tolist()) == [0, 0, 1, 1, 2, 2]
    assert not torch.equal(orders[0], orders[1])
    alone = minibatch_orders(7, torch.tensor([2]), torch.tensor(0), 8, 2, 4)
    assert torch.equal(alone // 1, orders[orders % 3 == 2].view(2, 4, 2) // 3)


@pytest.fixture
def warp_env():
    """Ant on MuJoCo Warp, with episodes that end within a rollout."""
    pytest.importorskip(
        "mujoco_warp", reason="the extra 'gpu' is not installed: device rollouts were not tested"
    )
    sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))
    from warp_beside_cpu import make_env

    def make():
        env = make_env(ANT, "mujoco_warp", ENVS, seed=SPEC.seed)
        env._limit = 5
        return env

    return make


def put_apart(simulator):
    """Episodes of different ages, so that they do not end together."""
    simulator.env._elapsed += torch.arange(ENVS)
    return simulator


def both_rollouts(make, iterations):
    """The same policy's rollouts, by a device's steps and by the ordinary loop with the same noise."""
    from rayagi.algorithms.device_rollouts import DeviceRollouts

    envs = make(), make()
    policy = new_policy(SPEC, envs[0].info, torch.device("cpu"))
    policy.acting = lambda rollout, noise: None  # its own operations, as on a device: equal to the last bit
    device = DeviceRollouts(envs[0], policy, num_steps=STEPS, seed=SPEC.seed)
    put_apart(device.simulator)
    simulator, agent = put_apart(LocalSimulator(envs[1])), Agent(policy)
    rollout = Rollout.allocate(STEPS, ENVS, envs[1].info, torch.device("cpu"))
    for iteration in range(iterations):
        device.collect(iteration)
        noise = normal_noise(SPEC.seed, envs[1].world_indices, torch.tensor(iteration), STEPS, 8)
        collect(simulator, agent, rollout, noise)
        yield device, simulator, rollout


def assert_same_rollout(device, simulator, expected):
    """What a device collects is what the ordinary loop does, to the last bit."""
    found = device.rollout
    for name in (
        "raw_obs",
        "obs",
        "outputs",
        "actions",
        "rewards",
        "terminated",
        "truncated",
        "last_obs",
    ):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert expected.finals
    for step, ids, obs in expected.finals:
        assert torch.equal(found.final_obs[step, ids], obs)
    assert device.simulator.take_finished() == simulator.take_finished()
    assert device.simulator.take_reward_terms() == simulator.take_reward_terms()


@pytest.mark.timeout(900)
def test_rollouts_and_updates_as_a_gpu_repeats_them_are_the_ordinary_ones(warp_env):
    """With the same noise and orders: rollouts, parameters, metrics and statistics of two iterations."""
    whose = {"communicator": SoloCommunicator(), "num_envs": ENVS, "first_env_index": 0, "total_envs": ENVS}
    trainings = {}
    for device, simulator, rollout in both_rollouts(warp_env, 2):
        assert_same_rollout(device, simulator, rollout)
        if not trainings:
            for captured in ("update", "nothing"):
                policy = new_policy(SPEC, simulator.info, torch.device("cpu"))
                trainings[captured] = make_learner(SPEC, policy, captured=captured, **whose)
            on_device, plain = trainings["update"], trainings["nothing"]
            assert isinstance(on_device, CapturedPPOLearner)
            plain._orders = on_device._orders
        found, expected = on_device.learn(device.rollout), plain.learn(rollout)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert torch.allclose(
        on_device.updater.flat.parameters, plain.updater.flat.parameters, rtol=1e-5, atol=1e-6
    )
    assert on_device.reward_scaler.moments.mean == pytest.approx(float(plain.reward_scaler.moments.mean))
    state = on_device.shared_state()
    on_device.load_state(state, on_device.local_state())
    plain.load_state(state, on_device.local_state())
    assert torch.equal(plain.reward_scaler.running, on_device.reward_scaler.running)


@pytest.mark.timeout(900)
def test_simulation_errors_of_the_run_before_a_capture_do_not_count(warp_env):
    from rayagi.algorithms.device_rollouts import DeviceRollouts

    env = warp_env()
    device = DeviceRollouts(env, new_policy(SPEC, env.info, env.device), num_steps=1, seed=SPEC.seed)
    saved, broken = env.state_dict(), env.state_dict()
    broken["worlds"]["qvel"][0, 3] = float("nan")
    env.load_state_dict(broken)
    device.run()
    assert env.sim_errors["unstable"] == 1
    device._replay._undo(saved)
    assert device.simulator.take_sim_errors()["faults_unstable"] == 0


@pytest.mark.timeout(900)
def test_what_is_captured_waits_for_nothing(warp_env):
    """Physics apart, which torch does not see, and the optimiser's step, which has a form of its own for graphs."""
    from no_waiting import NoWaiting

    ((device, _, _),) = both_rollouts(warp_env, 1)
    training = make_learner(
        SPEC, device.policy, captured="update",
        communicator=SoloCommunicator(), num_envs=ENVS, first_env_index=0, total_envs=ENVS,
    )  # fmt: skip
    training.learn(device.rollout)
    training.updater.optimiser.step = lambda: None
    with NoWaiting():
        device.run()
        training.run()


@pytest.mark.timeout(900)
def test_a_program_trains_on_warp_through_the_ordinary_path(warp_env):
    from actors.gmi import GmiContext
    from rayagi.algorithms.factory import TrainingFactory

    context = GmiContext.local(ANT)
    spec = replace(SPEC, gmi=replace(SPEC.gmi, num_envs=ENVS))
    program = TrainingFactory(spec, lambda **place: warp_env())(context)
    result = program.iterate()
    assert result.metrics["env_steps"] == ENVS * STEPS
    assert {name for name in result.metrics if name.startswith("faults")} == {
        "faults_unstable", "faults_contact_overflow", "faults_constraint_overflow",
    }  # fmt: skip
    again = TrainingFactory(spec, lambda **place: warp_env())(context)
    again.load_state_dict(program.state_dict())
    assert again.iterate().metrics["policy_loss"] == program.iterate().metrics["policy_loss"]


def test_a_reset_keeps_the_tensors_that_a_captured_graph_refers_to(warp_env):
    env, expected = warp_env(), warp_env()
    env.reset()
    held = (env._actions, env._obs, env._elapsed, env._episode, *env._memory.values())
    env.advance(torch.ones(ENVS, 8))
    obs = env.reset()
    expected.reset()
    assert torch.equal(obs, expected.reset())  # the second episodes' first observations
    now = (env._actions, env._obs, env._elapsed, env._episode, *env._memory.values())
    assert [tensor.data_ptr() for tensor in now] == [tensor.data_ptr() for tensor in held]
    assert (env._elapsed.tolist(), env._episode.tolist()) == ([0] * ENVS, [1] * ENVS)
    assert not env._actions.any()
