"""Templates whose simulators are apart, on a Ray of this machine: what dp_only does, and a lost simulator named."""

import os
import signal
from dataclasses import replace

import pytest
import ray
import torch

from actors.errors import GmiLostError
from actors.gmi import GmiContext
from rayagi.algorithms.factory import training_factory
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.session import Session, SessionClosedError
from rayagi.envs import env_info
from rayagi.models.policy import new_policy
from rayagi.planning import plan_of, serving_plan_of
from rayagi.serving.program import ServingJob, merged_results
from rayagi.serving.templates import serving_factory

pytestmark = pytest.mark.cluster

NUM_CPUS = 4
SPEC = RunSpec(
    env=EnvSpec(id="InvertedPendulum-v5"),
    gmi=GmiSpec(backend="cpu", template="e_at", num_gmis=3, num_envs=2, threads_per_gmi=1),
    network=NetworkSpec(hidden=(16, 8)),
    learning=PPOSpec(rollout_length=8, num_minibatches=2, num_epochs=2),
    seed=3,
)


@pytest.fixture(scope="module", autouse=True)
def ray_of_this_machine():
    """One for all sessions of this file, with CPUs for slices of several cores: more than may exist here."""
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
    )
    yield
    ray.shutdown()


def dp_only_program():
    """One GMI of all environments, here."""
    spec = replace(SPEC, gmi=replace(SPEC.gmi, template="dp_only", num_gmis=1, num_envs=4))
    return training_factory(spec)(GmiContext.local(SPEC.env.id))


@pytest.mark.slow
def test_dp_mp_makes_the_updates_of_dp_only_to_rounding():
    dp_only = dp_only_program()
    expected = [dp_only.iterate().metrics for _ in range(2)]
    with Session(replace(SPEC, gmi=replace(SPEC.gmi, template="dp_mp", num_gmis=4))) as session:
        assert session.plan.worker_types == (("simulator",), ("simulator",), ("agent",), ("trainer",))
        for mine, theirs in zip(session.train(2), expected, strict=True):
            assert mine.metrics["env_steps"] == theirs["env_steps"] == 8 * 4
            assert mine.metrics["policy_loss"] == pytest.approx(theirs["policy_loss"], abs=1e-4)
            assert mine.metrics["value_loss"] == pytest.approx(theirs["value_loss"], rel=1e-3)
        assert len(session.evaluate(3, seed=1).episode_returns) == 3
        state = session.state_dict()
        assert state["shared"]["iteration"] == 2
        assert [sorted(local) for local in state["local"][:2]] == [["simulator"]] * 2


def unequal_plan(spec, machine):
    """On as many cores as Ray counts, which GMIs are not pinned to."""
    (node,) = machine.nodes
    wide = replace(node, cores=tuple(range(NUM_CPUS)), pinnable=False, ray_cpus=float(NUM_CPUS))
    return plan_of(spec, replace(machine, nodes=(wide,)))


@pytest.mark.slow
@pytest.mark.parametrize("template", ["e_at", "ea_t"])
def test_simulators_and_trainers_of_unequal_size_make_the_updates_of_dp_only(template):
    """GMI-DRL §3.1.1 with slices of 2, 1 and 1 cores: in processes of their own, each with its share of the environments."""
    dp_only = dp_only_program()
    expected = [dp_only.iterate().metrics for _ in range(2)]
    gmi = replace(SPEC.gmi, template=template, num_gmis=None, threads_per_gmi=None, slices=(2.0, 1.0, 1.0))
    spec = replace(SPEC, gmi=gmi)
    with Session(spec, make_plan=lambda machine: unequal_plan(spec, machine)) as session:
        # Four environments for simulators of 2 and 1 cores: 2.67 and 1.33.
        assert session.plan.envs == (3, 1, 0)
        assert session.plan.bundles() == [{"CPU": 2.0}, {"CPU": 1.0}, {"CPU": 1.0}]
        assert [worker.num_threads for worker in session.workers] == [2, 1, 1]
        assert len({worker.pid for worker in session.workers}) == 3
        for mine, theirs in zip(session.train(2), expected, strict=True):
            assert mine.metrics["env_steps"] == theirs["env_steps"] == 8 * 4
            assert mine.metrics["policy_loss"] == pytest.approx(theirs["policy_loss"], abs=1e-4)
            assert mine.metrics["value_loss"] == pytest.approx(theirs["value_loss"], rel=1e-3)
        assert len(session.evaluate(3, seed=1).episode_returns) == 3


@pytest.mark.slow
def test_simulators_that_share_an_agent_serve():
    policy = new_policy(SPEC, env_info(SPEC.env.id), torch.device("cpu"))
    shared = {
        "learner": {"model": policy.model.state_dict()},
        "obs_normaliser": policy.normaliser.state_dict(),
    }
    job = ServingJob(spec=SPEC, shared=shared, version=0, greedy=False, seed=5)
    with Session(
        SPEC,
        factory=serving_factory(job, "mp_dp"),
        make_plan=lambda machine: serving_plan_of(SPEC.gmi, "mp_dp", machine),
    ) as session:
        assert session.plan.worker_types == (("simulator",), ("simulator",), ("agent",))
        for steps in (20, 5):
            assert merged_results(session.run("serve", steps)).env_steps == steps * 4
        session.run("finish", 10.0)


def test_e_at_trains_evaluates_and_resumes_as_dp_only_does_and_a_killed_simulator_is_named():
    dp_only = dp_only_program()
    expected = [dp_only.iterate().metrics["policy_loss"] for _ in range(3)]
    with Session(SPEC) as session:
        assert session.plan.worker_types == (("simulator",), ("simulator",), ("agent", "trainer"))
        found = session.train(2)
        saved = session.state_dict()
        assert found[0].metrics["env_steps"] == 8 * 4
        assert [result.metrics["policy_loss"] for result in found] == expected[:2]
        # Another program in the same processes attaches to its own partners, not to those of the first.
        session.rebuild(training_factory(SPEC))
        assert [result.metrics["policy_loss"] for result in session.train(2)] == expected[:2]
    with Session(SPEC) as session:
        session.load_state_dict(saved)
        (last,) = session.train(1)
        assert (last.iteration, last.metrics["policy_loss"]) == (2, expected[2])
        state = session.state_dict()["shared"]
        for name, value in dp_only.state_dict()["shared"]["learner"]["model"].items():
            assert torch.equal(state["learner"]["model"][name], value), name
        assert session.evaluate(3, seed=1).episode_returns == dp_only.evaluate(3, seed=1).episode_returns

        session.submit(10**6)
        os.kill(session.workers[1].pid, signal.SIGKILL)
        told = r"GMI 1/3 .* GMI 1 \(simulator\) was lost while .* of iteration \d+: its process has ended"
        with pytest.raises(GmiLostError, match=told) as lost:
            session.collect()
        assert lost.value.index == 1
        with pytest.raises(SessionClosedError):
            session.train(1)
