"""Serving with simulators and agents in separate GMIs (threads here): the same rows as dp_only, per environment."""

from functools import partial

import pytest
import torch

from actors.errors import PartnerLostError
from actors.gmi import GmiContext, GmiIdentity
from actors.rendezvous_actor import RendezvousActor
from collectives.solo import SoloCommunicator
from placement.types import Slice
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import env_info
from rayagi.models.policy import new_policy
from rayagi.serving import simulating
from rayagi.serving.errors import WriterError
from rayagi.serving.program import ServingJob, merged_results
from rayagi.serving.templates import serving_factory
from tests.threads import in_threads

TASK = "InvertedPendulum-v5"
E, A, EA = ("simulator",), ("agent",), ("simulator", "agent")


def job(greedy=False):
    spec = RunSpec(
        env=EnvSpec(id=TASK),
        gmi=GmiSpec(num_envs=2, collective_timeout_s=30.0),
        network=NetworkSpec(hidden=(16, 8)),
    )
    policy = new_policy(spec, env_info(TASK), torch.device("cpu"))
    shared = {
        "learner": {"model": policy.model.state_dict()},
        "obs_normaliser": policy.normaliser.state_dict(),
    }
    return ServingJob(spec=spec, shared=shared, version=7, greedy=greedy, seed=5)


class Rows:
    """A sink that keeps what it receives."""

    wait_s = 0.0

    def __init__(self, fails_at=None):
        self.rows, self.fails_at, self.closed = [], fails_at, False

    def record_actions(self, obs, actions, log_probs):
        if len(self.rows) == self.fails_at:
            raise WriterError(0, "failed with a test")
        self.rows.append([obs.clone(), actions.clone(), log_probs.clone()])

    def record_step(self, step):
        self.rows[-1] += [step.rewards.clone(), step.terminated.clone(), step.truncated.clone()]

    def close(self, timeout_s):
        self.closed = True


@pytest.fixture
def sinks(monkeypatch):
    """Sinks by GMI, created when programs open theirs, with their arguments."""
    made = {}

    def open_sink(job, context, info, *, num_envs, first_env_index, total_envs):
        index = context.identity.index
        made[index] = Rows(made.get("fails_at") if index == 0 else None)
        made.setdefault("envs", []).append((index, num_envs, first_env_index, total_envs))
        return made[index]

    monkeypatch.setattr(simulating, "open_sink", open_sink)
    return made


def serve(worker_types, template, requests, job):
    """Every GMI's results of such requests, or its exception."""
    directory = RendezvousActor(len(worker_types))

    def member(index):
        identity = GmiIdentity(
            index=index, num_gmis=len(worker_types), task=TASK, roles=worker_types[index], worker_types=worker_types,
            slice=Slice(node="here", backend="cpu", cores=(0,)),
        )  # fmt: skip
        program = serving_factory(job, template)(
            GmiContext(identity, SoloCommunicator(), torch.device("cpu"), directory)
        )
        try:
            answers = [program.gmi_run("serve", steps) for steps in requests]
            program.gmi_run("finish", 10.0)
            return answers
        finally:
            program.close()

    return in_threads([partial(member, index) for index in range(len(worker_types))])


def side_by_side(sinks, gmis):
    """Rows of several GMIs as those of one."""
    parts = [sinks[index].rows for index in gmis]
    return [[torch.cat(fields) for fields in zip(*step, strict=True)] for step in zip(*parts, strict=True)]


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(
    ("template", "worker_types", "simulators"),
    [("mp_dp", (E, E, A), (0, 1)), ("dp_mp", (E, A, E, A), (0, 2))],
)
def test_task_dedicated_templates_serve_the_same_as_dp_only(
    sinks, template, worker_types, simulators, greedy
):
    requests = (20, 1, 30)
    alone = serve((EA, EA), "dp_only", requests, job(greedy))
    expected = side_by_side(sinks, (0, 1))
    sinks.clear()
    answers = serve(worker_types, template, requests, job(greedy))
    assert sorted(sinks["envs"]) == [(index, 2, 2 * place, 4) for place, index in enumerate(simulators)]
    found = side_by_side(sinks, simulators)
    assert len(found) == len(expected) == 51
    # Batches of other sizes round differently, and a pendulum falls soon: compare before that adds up.
    for mine, theirs in zip(found[:20], expected[:20], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.allclose(one.double(), other.double(), atol=1e-4)
    whole = merged_results(merged_results(answer[k] for answer in answers) for k in range(3))
    reference = merged_results(merged_results(answer[k] for answer in alone) for k in range(3))
    assert whole.env_steps == reference.env_steps == 51 * 4
    assert len(whole.episode_returns) == len(reference.episode_returns) > 0
    assert whole.simulate.count == whole.step.count == 51 * 2
    assert whole.act.count == 51 * (len(worker_types) - 2)
    assert all(sinks[index].closed for index in simulators)


def test_a_writer_that_fails_ends_its_agent_and_the_agent_s_other_simulators(sinks):
    sinks["fails_at"] = 3
    first, second, agent = serve((E, E, A), "mp_dp", (10,), job())
    assert isinstance(first, WriterError)
    assert isinstance(agent, PartnerLostError)
    assert (agent.partner, agent.asked) == ("GMI 0 (simulator)", "the outcome of step 4 of iteration 1")
    assert isinstance(second, PartnerLostError)
    assert second.partner == "GMI 2 (agent)"
