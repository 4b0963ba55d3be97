"""Collectors and learners apart, on a Ray of this machine: the updates of dp_only in step, kills at their own pace. A3C."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import ray
import torch

from actors.errors import GmiLostError
from rayagi.algorithms.a3c import A3CSpec
from rayagi.algorithms.appo import AppoSpec
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.decoupled import session_of
from rayagi.coordinator.session import Session
from tests.fakes.point import make_point

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster")]

LEARNING = {"rollout_length": 8, "num_minibatches": 2, "num_epochs": 2, "learning_rate": 1e-3}
SPEC = RunSpec(
    env=EnvSpec(id="Point"),
    gmi=GmiSpec(num_envs=4, template="ea_t", backend="cpu"),
    network=NetworkSpec(hidden=(16, 8)),
    learning=PPOSpec(**LEARNING),
    seed=3,
)
DECOUPLED = replace(
    SPEC,
    algorithm="appo",
    gmi=replace(SPEC.gmi, template="decoupled"),
    learning=AppoSpec(**LEARNING, on_stale="drop", max_lag=3, rollouts_per_update=1),
)


@pytest.mark.slow
def test_ea_t_makes_the_updates_of_dp_only_and_goes_on_from_its_state():
    whole = replace(SPEC, gmi=replace(SPEC.gmi, template="dp_only", num_gmis=1, num_envs=8))
    with Session(whole, factory=TrainingFactory(whole, make_point)) as session:
        expected = session.train(5)
        reference = session.state_dict()["shared"]
    with Session(SPEC, factory=TrainingFactory(SPEC, make_point)) as session:
        assert [len(gmi_slice.cores) for gmi_slice in session.plan.slices] == [1, 1, 2]
        results = session.train(3)
        state = session.state_dict()
        session.train(1)
        session.load_state_dict(state)  # back to where it was
        results += session.train(2)
        shared = session.state_dict()["shared"]
        assert len(session.evaluate(3, seed=1).episode_returns) == 3
    assert shared["iteration"] == 5
    for result, other in zip(results, expected, strict=True):
        for name in ("env_steps", "episodes"):
            assert result.metrics[name] == other.metrics[name]
        assert result.metrics["policy_lag_max"] == 0
        assert result.metrics["value_loss"] == pytest.approx(other.metrics["value_loss"], rel=1e-3)
        assert sorted(result.episode_returns) == pytest.approx(sorted(other.episode_returns), abs=1e-4)
    for name, tensor in reference["learner"]["model"].items():
        torch.testing.assert_close(shared["learner"]["model"][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("template", ["ea_t", "dp_mp"])
def test_the_error_about_a_stopped_gmi_names_it(template):
    spec = replace(SPEC, gmi=replace(SPEC.gmi, template=template, collective_timeout_s=3.0))
    with Session(spec, factory=TrainingFactory(spec, make_point)) as session:
        session.train(1)
        os.kill(session.workers[0].pid, signal.SIGSTOP)
        with pytest.raises(
            GmiLostError, match=r"GMI 0/\d .* was lost during .*: its process has answered nothing"
        ):
            session.train(1)


def pid_of_collective(session):
    return ray.get(session._group.collective.__ray_call__.remote(lambda actor: os.getpid()))


def pid_of(session, index):
    return ray.get(session._group.handles[index].worker_info.remote()).pid


def updates_until(session, told, mark, limit=2000):
    """Updates that came before the session told this."""
    for number in range(1, limit):
        session.train(1)
        if any(mark in text for text in told):
            return number
    raise AssertionError(f"{mark!r} was not told: {told}")


def test_whoever_is_killed_training_goes_on_and_counts_add_up():
    told: list[str] = []
    session = session_of(DECOUPLED, log=told.append, factory=TrainingFactory(DECOUPLED, make_point))
    with session:
        results = session.train(20)
        assert {result.metrics["train_samples"] for result in results} == {4 * 8}
        assert max(result.metrics["policy_lag_max"] for result in results) <= 3
        assert session.sample_counts().missing == 0
        os.kill(pid_of_collective(session), signal.SIGKILL)
        session.train(5)
        assert told == []  # nobody noticed

        os.kill(pid_of(session, 0), signal.SIGKILL)
        assert updates_until(session, told, "GMI 0/3") < 100
        assert updates_until(session, told, "goes on") > 1  # the others went on meanwhile
        assert session.sample_counts().missing == 0

        told.clear()
        before = session.state_dict()["shared"]
        os.kill(pid_of(session, 2), signal.SIGKILL)
        session.train(10)
        assert any("All learners are restarted" in text for text in told)
        after = session.state_dict()["shared"]
        assert after["iteration"] >= before["iteration"] + 10
        steps = [int(state["learner"]["optimiser"]["state"][0]["step"]) for state in (before, after)]
        assert (
            steps[1] >= steps[0] + 10 * 4
        )  # from the snapshot that the state was, with 2 x 2 minibatches an update
        found = session.experience()
        assert found["restarts"] == 2
        assert found["rows"]["missing"] == 0
        assert found["rows"]["sent"] > found["rows"]["taken"] > 4 * 30
        assert set(found["lags"]) <= {"0", "1", "2", "3"}
        assert len(session.evaluate(3, seed=1).episode_returns) == 3


@pytest.mark.slow
def test_of_several_learners_one_is_killed_and_all_go_on_alike():
    spec = replace(DECOUPLED, gmi=replace(DECOUPLED.gmi, num_learners=2))
    told: list[str] = []
    with session_of(spec, log=told.append, factory=TrainingFactory(spec, make_point)) as session:
        learners = session.plan.hosting("trainer")
        assert len(learners) == 2
        session.train(10)
        before = session.state_dict()["shared"]["iteration"]
        os.kill(pid_of(session, learners[1]), signal.SIGKILL)  # not the one that snapshots are taken of
        session.train(10)
        assert any("All learners are restarted" in text for text in told)
        states = ray.get([session._group.handles[index].state_dict.remote() for index in learners])
        one, other = (state["shared"] for state in states)
        assert one["iteration"] == other["iteration"] >= before + 10
        for name, tensor in one["learner"]["model"].items():
            assert tensor.equal(other["learner"]["model"][name]), name  # they reduce together again
        found = session.experience()
        assert found["restarts"] == 2
        assert found["rows"]["missing"] == 0


@pytest.mark.slow
def test_what_a_program_raises_ends_the_session():
    spec = replace(DECOUPLED, learning=replace(DECOUPLED.learning, learning_rate=1e30))
    with (
        session_of(spec, factory=TrainingFactory(spec, make_point)) as session,
        pytest.raises(Exception, match="NaN or infinite"),
    ):
        session.train(50)


def test_a3c_s_processes_step_one_copy_of_parameters_and_statistics():
    spec = replace(
        SPEC,
        algorithm="a3c",
        gmi=replace(SPEC.gmi, template="dp_only", num_gmis=2),
        learning=A3CSpec(rollout_length=8, learning_rate=1e-3),
    )
    with Session(spec, factory=TrainingFactory(spec, make_point)) as session:
        session.train(10)
        asked = session._open().ask(lambda index, gmi: gmi.state_dict.remote(shared=True))
        first, second = (state["shared"] for state in session._answers(asked, "its state", 60.0))
    for name, tensor in first["learner"]["model"].items():
        assert torch.equal(second["learner"]["model"][name], tensor)
    assert torch.equal(
        first["learner"]["optimiser"]["square_avg"], second["learner"]["optimiser"]["square_avg"]
    )
    # 2 GMIs x 10 iterations x 8 steps x 4 environments: every observation is counted once.
    assert first["obs_normaliser"]["count"] == second["obs_normaliser"]["count"] == 640
