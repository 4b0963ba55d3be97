"""Rollouts of one kernel against the loop of simulator and agent in torch, with the same random numbers."""

from dataclasses import replace

import pytest
import torch

from actors.gmi import GmiContext
from experiments.fusion import parity
from experiments.fusion.parity import exploration_noise
from placement.types import Slice
from rayagi import profiler
from rayagi.algorithms import program
from rayagi.config.presets import preset
from rayagi.config.spec import NetworkSpec
from rayagi.envs import make_env_factory
from rayagi.envs.fused.provider import make_simulator
from rayagi.models import heads
from rayagi.profiler.layout import Category
from rayagi.profiler.trace import read_profile

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def build(env_id, engine, *, num_envs=70, hidden=(20, 13), activation="tanh", threads=1, normalize_obs=True):
    spec = preset(env_id)
    spec = replace(
        spec,
        gmi=replace(spec.gmi, num_envs=num_envs),
        network=NetworkSpec(hidden=hidden, activation=activation, initial_log_std=-0.3),
        learning=replace(
            spec.learning, rollout_length=32, num_epochs=1, num_minibatches=2, normalize_obs=normalize_obs
        ),
        seed=5,
    )
    return program_of(spec, engine, threads)


def program_of(spec, engine="auto", threads=1):
    """What a run's only GMI runs, on threads of this process."""
    env_id, piece = (
        spec.env.id,
        Slice(node="here", backend="cpu", cores=tuple(range(threads)), num_threads=threads),
    )
    context = GmiContext.local(env_id, gmi_slice=piece)
    return program.DpOnlyProgram(spec, make_env_factory(env_id, engine=engine), context)


@pytest.fixture
def kernel_noise(monkeypatch):
    """Makes the unfused loop sample with the kernel's random numbers."""
    monkeypatch.setattr(heads, "exploration_noise", exploration_noise)


@pytest.mark.parametrize(
    ("env_id", "activation", "hidden"),
    [
        ("fused/CartPole-v1", "tanh", (64, 64)),
        ("fused/Pendulum-v1", "elu", (20, 13)),
        ("fused/Acrobot-v1", "relu", (8,)),
        ("fused/Quadrotor-v0", "silu", (33, 7, 5)),
    ],
)
def test_a_fused_rollout_is_the_unfused_one(kernel_noise, env_id, activation, hidden):
    fused, plain = (
        build(env_id, engine, activation=activation, hidden=hidden) for engine in ("fused", "fused_torch")
    )
    for run in (fused, plain):
        run.simulator._lengths = run.simulator.info.max_episode_steps - 1 - torch.arange(70)
        run.simulator.env._backend.env_state.elapsed.copy_(
            run.simulator._lengths
        )  # so that time limits come, too
        run.collection.collect(0)
    a, b = fused.rollout, plain.rollout
    head = plain.agent.policy.model.head
    differs = (a.actions - b.actions).abs().flatten(2 if a.actions.ndim == 3 else 1) > 1e-3
    assert not differs.any()
    assert torch.equal(a.terminated, b.terminated)
    assert torch.equal(a.truncated, b.truncated)
    assert a.truncated.any()
    for name in ("raw_obs", "obs", "rewards", "last_obs"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-4)
    with torch.no_grad():  # the same observations, so that the simulators' rounding does not count
        outputs = plain.agent.policy.outputs(a.obs)
        torch.testing.assert_close(a.outputs, outputs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            head.log_prob(a.outputs, a.actions), head.log_prob(outputs, a.actions), rtol=1e-6, atol=1e-6
        )
    assert [step for step, _, _ in a.finals] == [step for step, _, _ in b.finals]
    for (_, ids_a, obs_a), (_, ids_b, obs_b) in zip(a.finals, b.finals, strict=True):
        assert torch.equal(ids_a, ids_b)
        torch.testing.assert_close(obs_a, obs_b, rtol=1e-4, atol=1e-4)
    assert fused.simulator.finished_lengths == plain.simulator.finished_lengths
    assert fused.simulator.finished_returns == pytest.approx(
        plain.simulator.finished_returns, rel=1e-4, abs=1e-3
    )
    assert torch.equal(fused.simulator._lengths, plain.simulator._lengths)
    torch.testing.assert_close(fused.simulator._returns, plain.simulator._returns, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("env_id", "activation"),
    [
        ("fused/CartPole-v1", "tanh"),
        ("fused/Pendulum-v1", "elu"),
        ("fused/Acrobot-v1", "relu"),
        ("fused/Quadrotor-v0", "silu"),
    ],
)
def test_a_kernel_s_program_is_the_loop_s(env_id, activation):
    """20 steps in float64, and each of 20 in float32; the goal is 1e-6 for both."""
    found = parity.check_rollouts(make_simulator(env_id, {}), activation=activation)
    assert found.exact < 1e-11
    assert found.single < 1e-6
    assert found.split == 0


def test_the_parity_check_finds_other_noise(monkeypatch):
    def weaker(**options):
        return 0.99 * exploration_noise(**options)

    monkeypatch.setattr(parity, "exploration_noise", weaker)
    with pytest.raises(parity.ParityError, match=r"^Quadrotor: actions at step and environment 0, 0 is "):
        parity.check_rollouts(make_simulator("fused/Quadrotor-v0", {}))


def test_another_dtype_is_rejected():
    run = build("fused/CartPole-v1", "fused", num_envs=3)
    run.rollout.raw_obs = run.rollout.raw_obs.double()
    with pytest.raises(
        ValueError, match=r"the kernel's reals are torch.float32, those of rollout and policy"
    ):
        run.collection.collect(0)


@pytest.mark.parametrize("env_id", ["fused/CartPole-v1", "fused/Quadrotor-v0"])
def test_training_from_fused_rollouts_is_training_step_by_step(kernel_noise, env_id):
    fused, plain = (build(env_id, engine) for engine in ("fused", "fused_torch"))
    for _ in range(3):
        a, b = fused.iterate(), plain.iterate()
    assert a.episode_lengths == b.episode_lengths
    assert a.metrics["policy_loss"] == pytest.approx(b.metrics["policy_loss"], abs=1e-4)
    for one, other in zip(
        fused.learner.policy.model.parameters(), plain.learner.policy.model.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_threads_do_not_change_a_bit():
    one, two = (build("fused/CartPole-v1", "fused", num_envs=1100, threads=threads) for threads in (1, 2))
    for run in (one, two):
        run.collection.collect(0)
    for name in ("raw_obs", "outputs", "actions", "rewards", "terminated"):
        assert torch.equal(getattr(one.rollout, name), getattr(two.rollout, name)), name


def test_an_environment_s_numbers_do_not_depend_on_its_neighbours():
    few, many = (build("fused/Pendulum-v1", "fused", num_envs=n) for n in (3, 200))
    for run in (few, many):
        run.collection.collect(0)
    assert torch.equal(few.rollout.outputs, many.rollout.outputs[:, :3])
    assert torch.equal(few.rollout.raw_obs, many.rollout.raw_obs[:, :3])


def test_a_resumed_run_is_bit_identical():
    straight = build("fused/Quadrotor-v0", "fused", num_envs=10)
    straight.iterate()
    saved = straight.state_dict()
    wanted = straight.iterate()
    resumed = build("fused/Quadrotor-v0", "fused", num_envs=10)
    resumed.load_state_dict(saved)
    found = resumed.iterate()
    assert found.episode_returns == wanted.episode_returns
    assert found.metrics["policy_loss"] == wanted.metrics["policy_loss"]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_profile_tells_acting_from_simulation(tmp_path, threads):
    built = build("fused/CartPole-v1", "fused", num_envs=4096, hidden=(32, 32), threads=threads)
    with profiler.profile(tmp_path / "profile"):
        built.iterate()
    built.iterate()  # after the profile: nothing is timed any more
    built.close()
    (process,) = read_profile(tmp_path / "profile").processes
    found = 0
    for thread in process.threads:
        events = thread.events
        within = events[events["category"] == Category.SIMULATOR]
        act = events[events["category"] == Category.KERNEL_ACT]
        assert len(act) == len(within)  # one block for each thread's part of the rollout
        for part, whole in zip(act, within, strict=True):
            assert whole["start"] <= part["start"] < part["end"] <= whole["end"]
        found += len(act)
    assert found == threads
