"""Sessions on a Ray of this machine, with a small program that really communicates."""

import os
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import torch
from ray.util import state as ray_state

from actors.errors import GmiLostError
from actors.protocols import EvaluationResult, IterationResult
from collectives.errors import CommunicatorError, CompositionError
from placement.errors import PlanError
from rayagi.config.spec import EnvSpec, GmiSpec, RunSpec
from rayagi.coordinator.session import Session, SessionClosedError
from rayagi.envs.errors import NamedFailures
from tests.waiting import until

pytestmark = pytest.mark.cluster


@dataclass(frozen=True)
class SumProgram:
    """Adds the sum of all ranks plus one to a weight that every GMI holds alike; misbehaves when told to."""

    raise_at: int | None = None
    die_at: int | None = None
    terminate_at: int | None = None
    raise_in_build: bool = False
    stop_in: str = ""

    def __call__(self, context):
        if self.raise_in_build and context.identity.index == 1:
            raise LookupError("no such environment")
        if context.identity.index == 1:
            self.stop("build")
        return _Running(self, context)

    def stop(self, where):
        if where == self.stop_in:
            os.kill(os.getpid(), signal.SIGSTOP)


class _Running:
    def __init__(self, program, context):
        self.program, self.context = program, context
        self.iteration, self.weight, self.steps = 0, torch.zeros(3), 0

    def iterate(self):
        self.iteration += 1
        index = self.context.identity.index
        if index == 1 and self.iteration == self.program.raise_at:
            raise FloatingPointError("policy_loss is NaN")
        if index == 1 and self.iteration == self.program.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 1 and self.iteration == self.program.terminate_at:
            with NamedFailures("Ant-v5", lambda: "step 1"):
                signal.raise_signal(signal.SIGTERM)
        if index == 1:
            self.program.stop("iterate")
        gradient = torch.full((3,), float(index + 1))
        self.context.communicator.all_reduce(gradient)
        self.weight += gradient
        self.steps += 10
        return IterationResult(
            iteration=self.iteration,
            metrics={
                "env_steps": 10.0,
                "iteration_s": float(index),
                "resident_bytes": 2.0**28 if index else 2.0**28 * self.iteration,  # GMI 0 leaks
            },
            episode_returns=[self.weight[0].item()],
            episode_lengths=[index],
        )

    def evaluate(self, num_episodes, seed):
        if self.context.identity.index == 1:
            self.program.stop("evaluate")
        return EvaluationResult(
            episode_returns=[float(seed + episode) for episode in range(num_episodes)],
            episode_lengths=[self.context.identity.index] * num_episodes,
        )

    def state_dict(self):
        if self.context.identity.index == 1:
            self.program.stop("state_dict")
        shared = {"weight": self.weight.clone(), "iteration": self.iteration}
        return {"shared": shared, "local": {"steps": self.steps, "index": self.context.identity.index}}

    def load_state_dict(self, state):
        self.weight, self.iteration = state["shared"]["weight"].clone(), state["shared"]["iteration"]
        self.steps = state.get("local", {}).get("steps", 0)

    def close(self):
        pass


@pytest.fixture(scope="module")
def cluster():
    here = Path(__file__).resolve().parent
    # So that workers can import the programs of this file.
    path = os.pathsep.join([str(here), str(here.parents[1])])
    context = ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=True,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    yield context
    ray.shutdown()


def spec(num_gmis=2, **gmi):
    return RunSpec(
        env=EnvSpec(id="Ant-v5"), gmi=GmiSpec(num_gmis=num_gmis, num_envs=4, threads_per_gmi=1, **gmi)
    )


def free_cpus():
    return ray.available_resources().get("CPU", 0.0)


def trains_two_iterations(session):
    results = session.train(2)
    # What each measured, before it was merged.
    assert [[own.metrics["iteration_s"] for own in each] for each in session.collected] == [
        [0.0] * 2,
        [1.0] * 2,
    ]
    assert session.plan.num_gmis == 2
    assert [result.iteration for result in results] == [1, 2]
    assert [result.metrics["env_steps"] for result in results] == [20.0, 20.0]
    assert results[1].metrics["iteration_s"] == 1.0  # the slowest GMI's
    assert results[1].episode_returns == [6.0, 6.0]  # 1 + 2, twice, on both
    assert results[1].episode_lengths == [0, 1]


class TestTwoGmis:
    """One session for all: to start its processes takes longer than what they are asked here."""

    @pytest.fixture(scope="class")
    def plans(self):
        return []

    @pytest.fixture(scope="class")
    def opened(self, cluster, plans):
        until(lambda: free_cpus() == 2.0)  # who is not alone on the node is not pinned
        with Session(spec(), factory=SumProgram(), on_plan=plans.append) as session:
            yield session

    @pytest.fixture
    def session(self, opened):
        opened.rebuild(SumProgram())
        return opened

    def test_iterations_run_on_all_gmis_and_merge(self, session, plans):
        trains_two_iterations(session)
        assert plans == [session.plan]

    def test_gmis_land_on_disjoint_cores_in_processes_of_their_own(self, session):
        first, second = session.workers
        assert first.pid != second.pid
        assert (first.num_threads, second.num_threads) == (1, 1)
        assert first.node_id == ray.get_runtime_context().get_node_id()
        (node,) = session.plan.machine.nodes
        if not node.pinnable:
            pytest.skip("a quota, not a set of cores, limits this machine: GMIs are not pinned")
        assert [worker.cores for worker in session.workers] == [s.cores for s in session.plan.slices]
        assert first.cores
        assert second.cores
        assert not set(first.cores) & set(second.cores)

    def test_ray_lists_gmis_by_slice_roles_and_task(self, cluster, session):
        actors = ray_state.list_actors(
            address=cluster.address_info["gcs_address"], filters=[("state", "=", "ALIVE")], detail=True
        )
        names = sorted(actor.repr_name for actor in actors if actor.class_name == "GmiActor")
        assert [name.split(" cpu[")[0] for name in names] == ["GMI 0/2", "GMI 1/2"]
        assert all(name.endswith("simulator+agent+trainer Ant-v5") for name in names)

    def test_requests_can_be_kept_in_flight(self, session):
        session.submit(1)
        session.submit(2)
        with pytest.raises(RuntimeError, match="2 submitted requests"):
            session.train(1)
        assert [result.iteration for result in session.collect()] == [1]
        assert [result.iteration for result in session.collect()] == [2, 3]
        with pytest.raises(RuntimeError, match="nothing was submitted"):
            session.collect()

    def test_evaluation_episodes_are_spread_over_gmis_with_distinct_seeds(self, session):
        result = session.evaluate(3, seed=100)
        assert result.episode_returns == [100.0, 101.0, 102.0]
        assert result.episode_lengths == [0, 0, 1]
        assert session.evaluate(1).episode_lengths == [0]


@pytest.mark.slow
def test_iterations_run_on_all_gmis_and_merge_over_gloo(cluster):
    with Session(spec(transport="gloo"), factory=SumProgram()) as session:
        trains_two_iterations(session)


@pytest.mark.slow
def test_another_program_takes_the_place_of_the_first_in_the_same_processes(cluster):
    with Session(spec(), factory=SumProgram()) as session:
        before = [worker.pid for worker in session.workers]
        session.train(2)
        session.submit(1)
        with pytest.raises(RuntimeError, match=r"collect \d+ submitted requests? first"):
            session.rebuild(SumProgram())
        session.collect()
        session.rebuild(SumProgram())
        (result,) = session.train(1)
        # weights began at zero again: 1 + 2, once
        assert (result.iteration, result.episode_returns) == (1, [3.0, 3.0])
        assert [worker.pid for worker in session.workers] == before
        with pytest.raises(LookupError, match="no such environment"):
            session.rebuild(SumProgram(raise_in_build=True))
        with pytest.raises(SessionClosedError, match="LookupError in building another program"):
            session.train(1)
    until(lambda: free_cpus() == 2.0)


@pytest.mark.slow
def test_a_composition_that_does_not_apply_is_refused_with_the_layout(cluster):
    refused = pytest.raises(CompositionError, match=r"hybrid\(1\) on 1x2: a ring needs at least two devices")
    with refused, Session(spec(composition="hybrid:1"), factory=SumProgram()):
        pass
    until(lambda: free_cpus() == 2.0)


def test_beside_another_holder_of_cpus_no_gmi_is_pinned(cluster):
    holder = ray.remote(_Holder).options(num_cpus=1).remote()
    ray.get(holder.everything.remote(), timeout=60)
    try:
        with Session(spec(num_gmis=1), factory=SumProgram()) as session:
            assert session.plan.slices[0].cores == ()
            assert session.workers[0].cores == tuple(sorted(os.sched_getaffinity(0)))
            assert session.workers[0].num_threads == 1
    finally:
        ray.kill(holder)
    until(lambda: free_cpus() == 2.0)


class _Holder:
    """Holds what it was started with."""

    def everything(self):
        return ray.get_runtime_context().get_assigned_resources()


def test_state_moves_to_a_new_session_and_to_another_number_of_gmis(cluster):
    with Session(spec(), factory=SumProgram()) as session:
        session.train(2)
        state = session.state_dict()
        assert state["num_gmis"] == 2
        assert state["shared"]["weight"].tolist() == [6.0, 6.0, 6.0]
        assert [local["index"] for local in state["local"]] == [0, 1]
        session.train(2)
        session.load_state_dict(state)
        assert session.train(1)[0].iteration == 3
        assert session.state_dict()["local"][1]["steps"] == 30
    with Session(spec(num_gmis=1), factory=SumProgram()) as session:
        session.load_state_dict(state)
        again = session.state_dict()
        assert again["shared"]["weight"].tolist() == [6.0, 6.0, 6.0]
        assert again["local"][0]["steps"] == 0


def test_what_a_program_raises_arrives_as_itself_and_ends_the_session(cluster):
    with Session(spec(), factory=SumProgram(raise_at=2)) as session:
        session.train(1)
        with pytest.raises(FloatingPointError, match="policy_loss is NaN"):
            session.train(3)
        with pytest.raises(SessionClosedError, match="FloatingPointError"):
            session.train(1)
    until(lambda: free_cpus() == 2.0)


@pytest.mark.parametrize("transport", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_gmi_that_dies_is_named_and_the_session_ends(cluster, transport):
    with Session(spec(transport=transport), factory=SumProgram(die_at=3)) as session:
        session.train(1)
        session.train(1)
        message = (
            r"GMI 1/2 .* was lost during 2 training iterations: its process was killed, as the kernel does"
        )
        with pytest.raises(GmiLostError, match=message) as caught:
            session.train(2)
        assert caught.value.index == 1
        # The one that is lost may not be the one that has taken the memory.
        (note,) = caught.value.__notes__
        assert note.startswith(
            "Resident memory before that: GMI 0 512 MiB (256 at first), GMI 1 256 MiB (256 at first). Where it grows"
        )
        # What the other one was doing, and for how long it waited.
        assert "on rank 0 failed" in caught.value.known
        assert "waiting for rank 1 (pid" in caught.value.known
    until(lambda: free_cpus() == 2.0)


def test_sigterm_to_a_gmi_is_no_error_of_its_environment(cluster):
    with Session(spec(), factory=SumProgram(terminate_at=2)) as session:
        session.train(1)
        with pytest.raises(GmiLostError, match=r"GMI 1/2 .* iterations: its process was sent SIGTERM, as by"):
            session.train(2)
    until(lambda: free_cpus() == 2.0)


@pytest.mark.slow
def test_what_building_raises_arrives_as_itself_and_nothing_stays_reserved(cluster):
    with pytest.raises(LookupError, match="no such environment"):
        Session(spec(), factory=SumProgram(raise_in_build=True)).__enter__()
    until(lambda: free_cpus() == 2.0)


def test_more_gmis_than_the_cluster_has_cpus_are_refused(cluster):
    with pytest.raises(PlanError, match="num_gmis=3"):
        Session(spec(num_gmis=3), factory=SumProgram()).__enter__()


def test_a_session_leaves_a_ray_that_was_there_before_running(cluster):
    with Session(spec(num_gmis=1), factory=SumProgram()) as session:
        session.train(1)
    assert ray.is_initialized()
    until(lambda: free_cpus() == 2.0)


@dataclass(frozen=True)
class _OneStaysAway:
    """GMI 1 never takes part."""

    def __call__(self, context):
        return (_Running if context.identity.index == 0 else _Absent)(SumProgram(), context)


class _Absent(_Running):
    def iterate(self):
        threading.Event().wait(60)


@pytest.mark.slow
def test_a_gmi_that_waits_for_another_in_vain_says_for_whom_and_how_long(cluster):
    with (
        Session(spec(collective_timeout_s=3.0), factory=_OneStaysAway()) as session,
        pytest.raises(CommunicatorError, match=r"rank 1 .* did not come within 3.0 s") as caught,
    ):
        session.train(1)
    assert caught.value.rank == 0
    (note,) = caught.value.__notes__
    assert re.fullmatch(rf"GMI 1/2 .* is still at {re.escape(__file__)}:\d+ in iterate\.", note)


def trained_and_evaluated(run_spec, factory):
    with Session(run_spec, factory=factory) as session:
        return session.train(1), session.evaluate(4), session.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "asked"),
    [
        ("build", "building its program"),
        ("iterate", "1 training iteration"),
        ("evaluate", "evaluation of 4 episodes"),
        ("state_dict", "its state"),
    ],
)
def test_a_gmi_whose_process_is_stopped_is_lost_wherever_it_was(cluster, where, asked):
    factory = SumProgram(stop_in=where)
    message = rf"GMI 1/2 .* was lost during {asked}: its process has answered nothing for \d+ s"
    with pytest.raises(GmiLostError, match=message):
        trained_and_evaluated(spec(collective_timeout_s=3.0), factory)
    until(lambda: free_cpus() == 2.0)
