"""e_at on a Ray of this machine: the updates of dp_only, saved, loaded, evaluated, and ended by a lost simulator."""

import os
import signal
from dataclasses import replace

import pytest
import torch

from actors.gmi import GmiContext, GmiIdentity
from actors.groups import GmiLostError
from collectives.solo import SoloCommunicator
from placement.types import Slice
from rayagi.algorithms.program import dp_only_factory
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, PPOSpec, RunSpec
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.session import Session, SessionClosedError

pytestmark = pytest.mark.cluster

SPEC = RunSpec(
    env=EnvSpec(id="InvertedPendulum-v5"),
    gmi=GmiSpec(backend="cpu", template="e_at", num_gmis=3, num_envs=2, threads_per_gmi=1),
    network=NetworkSpec(hidden=(16, 8)),
    ppo=PPOSpec(rollout_length=8, num_minibatches=2, num_epochs=2),
    seed=3,
)


@pytest.fixture(scope="module", autouse=True)
def ray_of_this_machine():
    """One for all sessions of this file."""
    with connected():
        yield


def dp_only_program():
    """One GMI of all environments, here."""
    spec = replace(SPEC, gmi=replace(SPEC.gmi, template="dp_only", num_gmis=1, num_envs=4))
    identity = GmiIdentity(
        index=0, num_gmis=1, task=SPEC.env.id, roles=("simulator", "agent", "trainer"),
        slice=Slice(node="here", backend="cpu", cores=(0,)),
    )  # fmt: skip
    return dp_only_factory(spec)(GmiContext(identity, SoloCommunicator(), torch.device("cpu")))


def test_e_at_trains_evaluates_and_resumes_as_dp_only_does_and_a_killed_simulator_is_named():
    dp_only = dp_only_program()
    expected = [dp_only.iterate().metrics["policy_loss"] for _ in range(3)]
    with Session(SPEC) as session:
        assert session.plan.kinds == (("simulator",), ("simulator",), ("agent", "trainer"))
        found = session.train(2)
        saved = session.state_dict()
        assert found[0].metrics["env_steps"] == 8 * 4
        assert [result.metrics["policy_loss"] for result in found] == expected[:2]
    with Session(SPEC) as session:
        session.load_state_dict(saved)
        (last,) = session.train(1)
        assert (last.iteration, last.metrics["policy_loss"]) == (2, expected[2])
        state = session.state_dict()["shared"]
        for name, value in dp_only.state_dict()["shared"]["learner"]["model"].items():
            assert torch.equal(state["learner"]["model"][name], value), name
        assert session.evaluate(3, seed=1).episode_returns == dp_only.evaluate(3, seed=1).episode_returns

        session.submit(10**6)
        os.kill(session.landings[1].pid, signal.SIGKILL)
        told = r"GMI 1/3 .* GMI 1 \(simulator\) was lost while .* step \d+ of iteration \d+: its process has ended"
        with pytest.raises(GmiLostError, match=told) as lost:
            session.collect()
        assert lost.value.index == 1
        with pytest.raises(SessionClosedError):
            session.train(1)
