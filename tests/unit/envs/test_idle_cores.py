"""Core sharing: stepping environments on idle cores of waiting GMIs does not change their trajectories."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actors.idle_cores import share_idle_cores
from collectives.barrier_progress import BarrierProgress
from collectives.solo import SoloCommunicator
from rayagi.envs import make_env_factory
from rayagi.envs.mujoco_cpu import contact_physics

NUM_ENVS = 6
LIMIT_S = 30.0


@pytest.fixture(params=["compiled", "python"])
def loop(request, monkeypatch):
    """The kind of WorldLoop."""
    if request.param == "python":
        monkeypatch.setattr(contact_physics, "compiled_loop", lambda worlds: None)


def ants(num_threads=1):
    return make_env_factory("Ant-v5")(num_envs=NUM_ENVS, first_env_index=0, seed=3, num_threads=num_threads)


def trajectory(env, num_steps=8):
    """Observations and rewards of some steps with fixed random actions."""
    generator = torch.Generator().manual_seed(5)
    env.reset()
    steps = [env.step(2 * torch.rand(NUM_ENVS, 8, generator=generator) - 1) for _ in range(num_steps)]
    return [(step.obs, step.rewards) for step in steps]


def barrier_progress(*counts):
    """``counts``: operations that each rank has reached; this GMI is the first rank with the fewest."""
    return BarrierProgress(torch.tensor(counts), counts.index(min(counts)))


class IdleCore:
    """A peer that waits from check number ``first`` on. The checking thread then waits until a world is stepped there."""

    def __init__(self, env, first):
        self.first, self.checks, self.used = first, 0, threading.Event()
        self._run = env._physics.loop.run
        env._physics.loop.run = self.run
        env.use_idle_cores({1: os.sched_getaffinity(0)}, self)

    def waiting_ranks(self):
        self.checks += 1
        return (1,) if self.checks >= self.first else ()

    def run(self, data, num_substeps, most):
        if threading.current_thread().name.startswith("idle_core"):
            more = self._run(data, num_substeps, 1)
            self.used.set()
            return more
        if self.checks >= self.first:
            assert self.used.wait(LIMIT_S)
        return self._run(data, num_substeps, most)


@pytest.mark.parametrize("first", [1, 2, 6])
def test_idle_cores_do_not_change_trajectories(loop, first):
    alone = ants()
    expected = trajectory(alone)
    alone.close()
    sharing = ants()
    core = IdleCore(sharing, first)
    for found, same in zip(trajectory(sharing), expected, strict=True):
        assert all(map(torch.equal, found, same))
    sharing.close()
    assert core.used.is_set()


def test_own_threads_and_idle_cores_share_the_worlds(loop):
    alone, shared = ants(), ants(num_threads=3)
    shared.use_idle_cores({rank: os.sched_getaffinity(0) for rank in (0, 2)}, barrier_progress(2, 1, 2))
    for found, same in zip(trajectory(shared), trajectory(alone), strict=True):
        assert all(map(torch.equal, found, same))
    alone.close()
    shared.close()


def test_only_the_idle_core_thread_is_pinned_to_the_idle_cores(loop):
    own = sorted(os.sched_getaffinity(0))
    where = []
    env = ants()
    run = env._physics.loop.run

    def recorded(*arguments):
        where.append((threading.current_thread().name, sorted(os.sched_getaffinity(0))))
        return run(*arguments)

    env._physics.loop.run = recorded
    env.use_idle_cores({1: own[-1:]}, barrier_progress(1, 2))
    trajectory(env, num_steps=2)
    env.close()
    assert dict(where) == {"MainThread": own, "idle_core_0": own[-1:]}


def test_an_unstable_world_is_counted_on_any_thread(loop):
    env = ants()
    env.use_idle_cores({1: os.sched_getaffinity(0)}, barrier_progress(1, 2))
    env.reset()
    env._physics.fields["qpos"][4, 0] = np.nan
    assert env.step(torch.zeros(NUM_ENVS, 8)).terminated.nonzero().flatten().tolist() == [4]
    assert env.sim_errors == {"unstable": 1}
    env.close()


class Group:
    """Rank 1 of three, of which the last has no cores of its own."""

    rank, world_size = 1, 3

    def all_gather(self, own):
        others = torch.zeros_like(own), torch.zeros_like(own)
        others[0][[4, 5]] = 1
        return torch.stack([others[0], own, others[1]])

    def barrier_progress(self):
        return barrier_progress(8, 7, 7)


def test_a_gmi_uses_its_peers_cores():
    asked = []
    env = ants()
    env.use_idle_cores = lambda cores, progress: not asked.append((cores, progress.waiting_ranks()))
    context = SimpleNamespace(
        communicator=Group(), identity=SimpleNamespace(slice=SimpleNamespace(cores=(0, 2)))
    )
    assert share_idle_cores(env, context)
    assert asked == [({0: [4, 5]}, (0,))]
    context.communicator = SoloCommunicator()
    assert not share_idle_cores(env, context)
    assert len(asked) == 1
    env.close()


def test_batch_physics_does_not_use_idle_cores():
    env = make_env_factory("HalfCheetah-v5")(num_envs=2, first_env_index=0, seed=3, num_threads=1)
    assert not env.use_idle_cores({1: [0]}, barrier_progress(1, 2))
    env.close()
