"""The collective actor behind a real actor handle, and runs that join a cluster by its address."""

import os
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from actors.rendezvous import RemoteDirectory, RemoteRendezvous, start_rendezvous_actor
from actors.rendezvous_actor import RendezvousActor
from collectives.errors import RendezvousError
from collectives.rendezvous import poll, this_member
from tests.programs import run_python

pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).resolve().parents[2]

DRIVER = """
from actors.protocols import IterationResult
from rayagi.config.spec import GmiSpec, RunSpec
from rayagi.coordinator.session import Session

class Program:
    def __init__(self, context):
        self.context = context
    def iterate(self):
        self.context.communicator.barrier()
        return IterationResult(iteration=1, metrics={"env_steps": 1.0})
    def close(self):
        pass

with Session(RunSpec(gmi=GmiSpec(num_gmis=2, threads_per_gmi=1)), factory=Program) as session:
    print("origin", session.plan.machine.origin)
    print("steps", session.train(1)[0].metrics["env_steps"])
"""


def test_errors_of_the_collective_actor_arrive_as_themselves(cluster):
    handle = ray.remote(RendezvousActor).options(num_cpus=0).remote(2)
    with RemoteRendezvous(handle) as meeting:
        assert meeting.register(0, this_member(0)).present == (this_member(0),)
        with pytest.raises(RendezvousError, match="already taken by rank 0"):
            meeting.register(0, replace(this_member(0), pid=1))
        assert meeting.endpoint(0, "all") is None
        meeting.publish(0, "all", "127.0.0.1:7")
        assert meeting.endpoint(0, "all") == "127.0.0.1:7"
        ray.kill(handle)
        with pytest.raises(RendezvousError, match="the rendezvous actor does not answer"):
            # The process ends a moment after the kill.
            deque((meeting.endpoint(0, "all") for _ in range(10_000)), maxlen=0)


def test_a_directory_is_said_again_to_a_collective_actor_that_came_back(cluster):
    handle = start_rendezvous_actor(2)
    directories = [RemoteDirectory(handle) for _ in range(3)]
    first, successor, reader = directories
    try:
        first.announce("consumers/experience/0", "old")
        first.announce("parameters/0", "board")
        successor.announce("consumers/experience/0", "new")
        expected = {"consumers/experience/0": "new"}
        assert reader.announced("consumers/") == expected
        ray.kill(handle, no_restart=False)
        found = poll(lambda: True if len(reader.announced("")) == 2 else None, timeout_s=30.0)
        assert found, "announcements did not come back"
        # The first still repeats what it said, and is not listened to.
        assert poll(lambda: True if reader.announced("consumers/") == expected else None, timeout_s=30.0)
    finally:
        for directory in directories:
            directory.close()
        ray.kill(handle)


@pytest.mark.slow
def test_a_cluster_that_asks_for_a_token_says_so(cluster):
    environment = {**os.environ, "RAY_ADDRESS": cluster.address_info["gcs_address"]}
    environment |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPOSITORY)}
    done = run_python(DRIVER, env=environment, cwd=REPOSITORY, check=False)
    assert done.returncode != 0
    assert "RAY_AUTH_MODE=token" in done.stderr.splitlines()[-1]


def test_a_run_joins_the_cluster_that_ray_address_names_and_leaves_it_running(cluster):
    environment = {
        **os.environ,
        "RAY_ADDRESS": cluster.address_info["gcs_address"],
        "RAY_AUTH_MODE": "token",  # a Ray started by ray.init asks for its token, which lies in the user's home
        "PYTHONPATH": str(REPOSITORY),
    }
    done = run_python(DRIVER, env=environment, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr
    assert "origin ray" in done.stdout
    assert "steps 2.0" in done.stdout
    assert ray.cluster_resources()["CPU"] == 2.0
