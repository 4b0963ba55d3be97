"""Step exchange: remote simulators equal a local one, and a lost partner is named."""

import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import IterationMismatchError, PartnerLostError
from actors.protocols import ActionSpec
from actors.roles import LocalSimulator
from actors.stepping import RemoteSimulators, StepServer, action_schema
from collectives.experience.errors import ChannelTimeoutError, SchemaError
from tests.fakes.point import ACTION_DIM, PointEnv
from tests.unit.forkserver import context

LIMIT_S = 30.0


def connected(num_envs, server=StepServer, limit_s=LIMIT_S, env=PointEnv):
    """An agent's end, and the ends of simulators with so many environments, attached."""
    envs = [env(count, sum(num_envs[:place]), 7) for place, count in enumerate(num_envs)]
    servers = [
        server(LocalSimulator(env), env.info, env.num_envs, place=place, agent="the agent", limit_s=limit_s)
        for place, env in enumerate(envs)
    ]
    names = [f"simulator {place}" for place in range(len(num_envs))]
    remote = RemoteSimulators(envs[0].info, num_envs, simulators=names, limit_s=limit_s)
    remote.attach([server.endpoint for server in servers])
    for each in servers:
        each.attach(remote.endpoint)
    return remote, servers


class Serving:
    """Every server in a thread of its own; what a thread raised is kept."""

    def __init__(self, servers, num_steps, num_iterations=1):
        self.errors = [None] * len(servers)

        def serve(place):
            try:
                for iteration in range(num_iterations):
                    servers[place].begin(iteration)
                    for _ in range(num_steps):
                        servers[place].step()
            except Exception as error:
                self.errors[place] = error

        self.threads = [threading.Thread(target=serve, args=(place,)) for place in range(len(servers))]
        for thread in self.threads:
            thread.start()

    def join(self):
        for thread in self.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        return self.errors


def push(step, num_envs):
    generator = torch.Generator().manual_seed(step)
    return torch.rand(num_envs, ACTION_DIM, generator=generator) * 2 - 1


def assert_same(found, expected):
    for name in ("obs", "rewards", "terminated", "truncated", "final_ids", "final_obs"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 20))
def test_remote_simulators_equal_one_simulator_bitwise(num_envs, num_steps):
    remote, servers = connected(num_envs)
    serving = Serving(servers, num_steps)
    local = LocalSimulator(PointEnv(sum(num_envs), 0, 7))
    remote.begin(0)
    assert torch.equal(remote.obs, local.obs)
    ended = 0
    for step in range(num_steps):
        actions = push(step, sum(num_envs))
        expected = local.step(actions)
        assert_same(remote.step(actions), expected)
        ended += len(expected.final_ids)
    assert ended >= num_steps // 7  # the time limit is 7 steps
    assert serving.join() == [None] * len(servers)
    for end in (remote, *servers):
        end.close()


def test_a_simulator_that_is_ahead_waits_for_the_others():
    ahead = threading.Event()

    class Ahead(StepServer):
        def begin(self, iteration):
            super().begin(iteration)
            if iteration == 1:
                ahead.set()

    class Slow(PointEnv):
        def step(self, actions):
            if self.first and self.steps == 2:  # the last of the first iteration, in the second simulator
                assert ahead.wait(LIMIT_S)
            return super().step(actions)

    remote, servers = connected([2, 3], server=Ahead, env=Slow)
    serving = Serving(servers, num_steps=3, num_iterations=2)
    local = LocalSimulator(PointEnv(5, 0, 7))
    for iteration in range(2):
        remote.begin(iteration)
        assert torch.equal(remote.obs, local.obs)
        for step in range(3):
            actions = push(step, 5)
            assert_same(remote.step(actions), local.step(actions))
    assert serving.join() == [None, None]
    for end in (remote, *servers):
        end.close()


def test_steps_reuse_their_memory():
    remote, servers = connected([2])
    serving = Serving(servers, num_steps=40)
    remote.begin(0)
    places = set()
    for step in range(40):
        result = remote.step(push(step, 2))
        places.add((result.obs.data_ptr(), result.rewards.data_ptr(), remote.obs.data_ptr()))
    assert len(places) == 1
    assert serving.join() == [None]
    assert servers[0]._ring._shape.slots == 2


def test_discrete_actions_are_sent_as_integers():
    point = PointEnv(2, 0, 7).info
    info = replace(point, action=ActionSpec(kind="discrete", dim=1, num_choices=4))
    (field,) = action_schema(info).fields
    assert (field.dtype, field.shape) == (torch.int64, ())


def test_a_simulator_of_another_environment_is_refused_when_they_connect():
    class Wide(PointEnv):
        def __init__(self, *args):
            super().__init__(*args)
            self.info = replace(self.info, obs_dim=4)

    env = Wide(2, 0, 7)
    wide = StepServer(LocalSimulator(env), env.info, 2, place=0, agent="the agent", limit_s=1.0)
    remote = RemoteSimulators(PointEnv(2, 0, 7).info, [2], simulators=["simulator 0"], limit_s=1.0)
    with pytest.raises(SchemaError, match=r"obs: float32\[3\] where obs: float32\[4\] is expected"):
        wide.attach(remote.endpoint)


def test_a_simulator_that_leaves_is_named_with_the_step():
    remote, servers = connected([2, 2])
    first, second = Serving(servers[:1], num_steps=9), Serving(servers[1:], num_steps=2)
    remote.begin(0)
    for step in range(2):
        remote.step(push(step, 4))
    assert second.join() == [None]
    servers[1].close()
    with pytest.raises(PartnerLostError, match="step 3 of iteration 1: it has left") as raised:
        remote.step(push(2, 4))
    assert raised.value.partner == "simulator 1"
    remote.close()
    (error,) = first.join()
    assert isinstance(error, PartnerLostError)
    assert error.partner == "the agent"
    assert "the actions of step 4 of iteration 1" in str(error)


def test_a_silent_simulator_is_named_with_the_time_limit():
    remote, _servers = connected([2, 2], limit_s=0.2)
    with pytest.raises(
        ChannelTimeoutError, match=r"the outcome of step 1 .* from simulator 0 and simulator 1"
    ):
        remote.step(push(0, 4))


def test_gmis_in_different_iterations_raise():
    remote, servers = connected([2])
    serving = Serving(servers, num_steps=1)
    with pytest.raises(
        IterationMismatchError, match="simulator 0 is in iteration 1 where this GMI is in iteration 6"
    ):
        remote.begin(5)
    remote.close()
    (error,) = serving.join()
    assert isinstance(error, PartnerLostError)


def _simulate(pipe, agent):
    """Of a process: a simulator that serves until it is killed, or the agent leaves."""
    env = PointEnv(2, 0, 7)
    server = StepServer(LocalSimulator(env), env.info, 2, place=0, agent="the agent", limit_s=LIMIT_S)
    pipe.send(server.endpoint)
    server.attach(agent)
    pipe.send("attached")
    try:
        server.begin(0)
        while True:
            server.step()
    except PartnerLostError as error:
        pipe.send(str(error))


def _act(pipe, simulator):
    """Of a process: an agent that steps until it is killed."""
    remote = RemoteSimulators(PointEnv(1, 0, 7).info, [2], simulators=["simulator 0"], limit_s=LIMIT_S)
    pipe.send(remote.endpoint)
    remote.attach([simulator])
    pipe.send("attached")
    remote.begin(0)
    for step in range(10**6):
        remote.step(push(step, 2))
        pipe.send(step)


@pytest.fixture
def process():
    """Starts a process with a pipe; none is left running."""
    started = []

    def start(target, argument):
        here, there = context.Pipe()
        started.append(context.Process(target=target, args=(there, argument)))
        started[-1].start()
        return here, started[-1]

    yield start
    for each in started:
        each.kill()
        each.join()


def received(pipe):
    assert pipe.poll(LIMIT_S)
    return pipe.recv()


def test_a_killed_simulator_is_named_and_a_simulator_detects_that_its_agent_left(process):
    remote = RemoteSimulators(PointEnv(1, 0, 7).info, [2], simulators=["simulator 0"], limit_s=LIMIT_S)
    pipe, child = process(_simulate, remote.endpoint)
    remote.attach([received(pipe)])
    assert received(pipe) == "attached"
    remote.begin(0)
    for step in range(3):
        remote.step(push(step, 2))
    os.kill(child.pid, signal.SIGKILL)
    child.join(LIMIT_S)
    with pytest.raises(
        PartnerLostError, match=r"simulator 0 was lost .* step 4 of iteration 1: its process has ended"
    ):
        remote.step(push(3, 2))
    remote.close()


def test_a_killed_agent_is_named(process):
    env = PointEnv(2, 0, 7)
    server = StepServer(LocalSimulator(env), env.info, 2, place=0, agent="GMI 0 (agent)", limit_s=LIMIT_S)
    pipe, child = process(_act, server.endpoint)
    server.attach(received(pipe))
    assert received(pipe) == "attached"
    serving = Serving([server], num_steps=10**6)
    while received(pipe) < 5:
        pass
    os.kill(child.pid, signal.SIGKILL)
    (error,) = serving.join()
    assert isinstance(error, PartnerLostError)
    assert error.partner == "GMI 0 (agent)"
    assert "its process has ended" in str(error)
