"""Collectors and learners on two hosts: two Ray nodes of this one, whose GMIs take the second for another host."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster

from rayagi.algorithms.appo import AppoSpec
from rayagi.algorithms.factory import TrainingFactory
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.decoupled import session_of
from tests.fakes.point import make_point

pytestmark = pytest.mark.cluster

SPEC = RunSpec(
    env=EnvSpec(id="Point"),
    algorithm="appo",
    gmi=GmiSpec(num_envs=4, template="decoupled", backend="cpu"),
    network=NetworkSpec(hidden=(16, 8)),
    learning=AppoSpec(rollout_length=8, num_minibatches=2, num_epochs=2, learning_rate=1e-3, max_lag=1),
    seed=3,
)


@dataclass(frozen=True)
class Elsewhere:
    """Programs in processes whose host has its Ray node's name: no two nodes share memory, as far as they know."""

    factory: TrainingFactory

    def __call__(self, context):
        socket.gethostname = lambda: f"the host of {context.node}"
        return self.factory(context)


@pytest.fixture(scope="module", autouse=True)
def nodes():
    # Workers cannot import this file: its classes travel as values.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_health_check_period_ms", "500")  # a lost node is noticed in seconds
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        root = str(Path(__file__).resolve().parents[2])
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": root}},  # so that workers can import the fakes
        )
        cluster.wait_for_nodes(timeout=30)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        patch.undo()


def session(spec, messages):
    factory = Elsewhere(TrainingFactory(spec, make_point))
    return session_of(spec, log=messages.append, factory=factory)


def ask(opened, index, method, *arguments):
    return ray.get(getattr(opened._group.handles[index], method).remote(*arguments))


@pytest.mark.slow
def test_a_collector_on_another_host_is_learned_from_and_follows_the_learner_even_a_new_one():
    messages: list[str] = []
    with session(SPEC, messages) as opened:
        collectors, (learner,) = opened.plan.hosting("simulator"), opened.plan.hosting("trainer")
        hosts = [ask(opened, index, "worker_info").node_id for index in (*collectors, learner)]
        assert len(collectors) == len(set(hosts)) == 2
        results = opened.train(10)
        # In step: every update takes a rollout of both, with parameters that are one update old at most.
        assert {result.metrics["train_samples"] for result in results} == {2 * 4 * 8}
        assert max(result.metrics["policy_lag_max"] for result in results) <= SPEC.learning.max_lag
        assert opened.sample_counts().missing == 0
        states = [ask(opened, index, "state_dict") for index in collectors]
        shared = ask(opened, learner, "state_dict")["shared"]
        for state in states:
            assert state["shared"]["iteration"] == shared["iteration"]
            for name, tensor in shared["learner"]["model"].items():
                assert state["shared"]["learner"]["model"][name].equal(tensor), name

        os.kill(ask(opened, learner, "worker_info").pid, signal.SIGKILL)
        opened.train(5)
        while not any("goes on" in text for text in messages):
            opened.train(1)
        later = opened.train(10)
        assert {result.metrics["train_samples"] for result in later[-3:]} == {2 * 4 * 8}
        found = opened.experience()
        assert found["rows"]["missing"] == 0
        assert set(found["lags"]) <= {"0", "1"}


@pytest.mark.slow
def test_synchronous_collectors_on_another_host_make_the_same_updates():
    spec = replace(SPEC, learning=replace(SPEC.learning, max_lag=0))
    with session(spec, []) as opened:
        results = opened.train(6)
        assert {result.metrics["policy_lag_max"] for result in results} == {0.0}
        assert {result.metrics["train_samples"] for result in results} == {2 * 4 * 8}


@pytest.mark.slow
def test_gmis_of_a_lost_node_go_on_on_one_that_has_joined_since_and_share_its_cores(nodes):
    messages: list[str] = []
    with session(SPEC, messages) as opened:
        opened.train(5)
        (lost,) = nodes.worker_nodes
        there = [index for index, own in enumerate(opened.workers) if own.node_id == lost.node_id]
        assert there
        before = {node["NodeID"] for node in ray.nodes()}
        nodes.add_node(num_cpus=1)
        os.kill(lost.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        while not all(
            any(f"GMI {index}/" in text and "goes on" in text for text in messages) for index in there
        ):
            opened.train(1)
        (joined,) = (node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in before)
        assert {opened.workers[index].node_id for index in there} == {joined}
        for index in there:
            own = opened.plan.slices[index]
            assert (opened.plan.machine.node(own.node).ray_node_id, own.cores) == (joined, ())
            assert own.label() == "cpu[1 thread]"
        later = opened.train(10)
        assert {result.metrics["train_samples"] for result in later[-3:]} == {2 * 4 * 8}
        assert opened.sample_counts().missing == 0
