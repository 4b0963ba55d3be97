"""Environments that are stepped on the cores of GMIs that wait: by whom does not change their course."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actors.idle_cores import borrow_idle_cores
from collectives.solo import SoloCommunicator
from rayagi.envs import make_env_factory
from rayagi.envs.errors import SimulationError
from rayagi.envs.mujoco_cpu.contact_physics import ContactPhysics

NUM_ENVS = 6
LIMIT_S = 30.0


def ants(num_threads=1):
    return make_env_factory("Ant-v5")(num_envs=NUM_ENVS, first_env_index=0, seed=3, num_threads=num_threads)


def course(env, num_steps=8):
    """Observations and rewards of some steps with actions of their own."""
    generator = torch.Generator().manual_seed(5)
    env.reset()
    steps = [env.step(2 * torch.rand(NUM_ENVS, 8, generator=generator) - 1) for _ in range(num_steps)]
    return [(step.obs, step.rewards) for step in steps]


class Borrowed:
    """A core that is lent from the ``first`` world on that its borrower would step; the next then waits until it is used."""

    def __init__(self, monkeypatch, first):
        self.first, self.asked, self.used, self.worlds = first, 0, threading.Event(), []
        run = ContactPhysics._run

        def noted(physics, data, worlds, num_substeps):
            run(physics, data, self.noting(worlds), num_substeps)

        monkeypatch.setattr(ContactPhysics, "_run", noted)

    def noting(self, worlds):
        for world in worlds:
            self.worlds.append(world[0])
            if threading.current_thread().name.startswith("borrowed"):
                self.used.set()
            yield world

    def lent(self):
        self.asked += 1
        if self.asked > self.first:
            assert self.used.wait(LIMIT_S)
        return (1,) if self.asked >= self.first else ()


@pytest.mark.parametrize("first", [1, 3, NUM_ENVS + 2])
def test_worlds_stepped_on_lent_cores_go_the_same_course(monkeypatch, first):
    alone = ants()
    expected = course(alone)
    alone.close()
    core = Borrowed(monkeypatch, first)
    borrowing = ants()
    borrowing.borrow({1: os.sched_getaffinity(0)}, core.lent)
    for found, same in zip(course(borrowing), expected, strict=True):
        assert all(map(torch.equal, found, same))
    borrowing.close()
    assert core.used.is_set()
    for begin in range(0, len(core.worlds), NUM_ENVS):  # each once in every step
        assert sorted(core.worlds[begin : begin + NUM_ENVS]) == list(range(NUM_ENVS))


def test_threads_of_ones_own_and_borrowed_ones_share_the_worlds():
    alone, crowd = ants(), ants(num_threads=3)
    crowd.borrow({rank: os.sched_getaffinity(0) for rank in (0, 2)}, lambda: (0, 2))
    for found, same in zip(course(crowd), course(alone), strict=True):
        assert all(map(torch.equal, found, same))
    alone.close()
    crowd.close()


def test_the_borrowed_thread_alone_goes_to_the_lent_cores(monkeypatch):
    own = sorted(os.sched_getaffinity(0))
    where = []
    run = ContactPhysics._run

    def noted(physics, data, worlds, num_substeps):
        where.append((threading.current_thread().name, sorted(os.sched_getaffinity(0))))
        run(physics, data, worlds, num_substeps)

    monkeypatch.setattr(ContactPhysics, "_run", noted)
    env = ants()
    env.borrow({1: own[-1:]}, lambda: (1,))
    course(env, num_steps=2)
    env.close()
    assert dict(where) == {"MainThread": own, "borrowed_0": own[-1:]}


def test_an_unstable_world_is_named_whoever_steps_it():
    env = ants()
    env.borrow({1: os.sched_getaffinity(0)}, lambda: (1,))
    env.reset()
    env._physics.fields["qpos"][4, 0] = np.nan
    with pytest.raises(SimulationError, match="environment 4"):
        env.step(torch.zeros(NUM_ENVS, 8))
    env.close()


class Group:
    """Rank 1 of three, of which the last has no cores of its own."""

    rank, world_size = 1, 3

    def all_gather(self, own):
        others = torch.zeros_like(own), torch.zeros_like(own)
        others[0][[4, 5]] = 1
        return torch.stack([others[0], own, others[1]])

    def waiting(self):
        return (0,)


def test_a_gmi_borrows_what_the_others_have():
    asked = []
    env = ants()
    env.borrow = lambda cores, lent: asked.append((cores, lent()))
    context = SimpleNamespace(
        communicator=Group(), identity=SimpleNamespace(slice=SimpleNamespace(cores=(0, 2)))
    )
    borrow_idle_cores(env, context)
    assert asked == [({0: [4, 5]}, (0,))]
    context.communicator = SoloCommunicator()
    borrow_idle_cores(env, context)
    assert len(asked) == 1
    env.close()
