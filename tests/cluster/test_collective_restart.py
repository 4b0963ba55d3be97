"""The collective actor is killed and comes back: while a group reduces, and in the middle of a meeting."""

import os
import select
import signal
import sys
import threading

import pytest
import ray
import torch
from ray import cloudpickle

from actors.rendezvous import RemoteRendezvous, start_rendezvous_actor
from collectives.connect import connect
from collectives.errors import MemberLostError
from collectives.rendezvous import this_member

pytestmark = pytest.mark.cluster

LIMIT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _travelling_classes(cluster):
    # Workers cannot import this file: its classes travel as values.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


class GroupMember:
    """Belongs to a group through its generations."""

    def join(self, handle, rank, generation):
        self.rank = rank
        with RemoteRendezvous(handle) as rendezvous:
            self.communicator = connect(
                rendezvous, this_member(rank), world_size=3, timeout_s=LIMIT_S, generation=generation
            )

    def reduce(self, times):
        """The sum of all ranks plus one, as often."""
        for _ in range(times):
            tensor = torch.tensor([self.rank + 1.0])
            self.communicator.all_reduce(tensor)
        return tensor.item()

    def reduce_until_someone_is_lost(self):
        try:
            while True:
                self.reduce(1)
        except MemberLostError as error:
            self.communicator.close()
            return error

    def pid(self):
        return os.getpid()


def kill(pid):
    """SIGKILL, and wait until the process has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([descriptor], [], [], 10)[0], f"process {pid} did not end"
    finally:
        os.close(descriptor)


def kill_actor(handle):
    kill(ray.get(handle.__ray_call__.remote(lambda self: os.getpid()), timeout=LIMIT_S))


def test_the_actor_dies_while_a_group_reduces_and_the_next_generation_meets_at_the_one_that_comes_back():
    handle = start_rendezvous_actor(3)
    first, second, third, replacement = [
        ray.remote(GroupMember).options(num_cpus=0).remote() for _ in range(4)
    ]
    ray.get(
        [one.join.remote(handle, rank, 0) for rank, one in enumerate((first, second, third))], timeout=LIMIT_S
    )
    pid = ray.get(second.pid.remote())

    sums = [one.reduce.remote(2000) for one in (first, second, third)]
    kill_actor(handle)
    assert ray.get(sums, timeout=LIMIT_S) == [6.0] * 3

    errors = [one.reduce_until_someone_is_lost.remote() for one in (first, third)]
    kill(pid)
    errors = ray.get(errors, timeout=LIMIT_S)
    assert [[lost.pid for lost in error.lost] for error in errors] == [[pid], [pid]]
    kill_actor(handle)  # it has come back, and dies again
    live = (first, replacement, third)
    ray.get([one.join.remote(handle, rank, 1) for rank, one in enumerate(live)], timeout=LIMIT_S)
    assert ray.get([one.reduce.remote(10) for one in live], timeout=LIMIT_S) == [6.0] * 3
    for handle_of_it in (*live, handle):
        ray.kill(handle_of_it)


class Observed(RemoteRendezvous):
    """Lets a test act in the middle of a meeting."""

    def __init__(self, handle):
        super().__init__(handle)
        self.registered, self.published, self.may_look = (threading.Event() for _ in range(3))
        self.may_look.set()

    def register(self, generation, member):
        status = super().register(generation, member)
        self.registered.set()
        return status

    def publish(self, generation, key, endpoint):
        super().publish(generation, key, endpoint)
        self.published.set()

    def endpoint(self, generation, key):
        assert self.may_look.wait(LIMIT_S)
        return super().endpoint(generation, key)


class Connecting(threading.Thread):
    """One of two members, which are threads of this process."""

    def __init__(self, handle, rank):
        super().__init__(daemon=True)
        self.rendezvous, self.rank, self.answer = Observed(handle), rank, None

    def run(self):
        try:
            with (
                self.rendezvous,
                connect(self.rendezvous, this_member(self.rank), world_size=2, timeout_s=LIMIT_S) as group,
            ):
                tensor = torch.tensor([self.rank + 1.0])
                group.all_reduce(tensor)
                self.answer = tensor.item()
        except Exception as error:
            self.answer = error


def test_who_waits_in_a_meeting_is_known_to_the_actor_that_comes_back():
    handle = start_rendezvous_actor(2)
    early, late = Connecting(handle, 0), Connecting(handle, 1)
    early.start()
    assert early.rendezvous.registered.wait(LIMIT_S)
    kill_actor(handle)
    late.start()
    for member in (early, late):
        member.join(LIMIT_S)
    assert [early.answer, late.answer] == [3.0, 3.0]
    ray.kill(handle)


def test_an_endpoint_that_was_published_before_the_actor_died_is_found_afterwards():
    handle = start_rendezvous_actor(2)
    host, other = Connecting(handle, 0), Connecting(handle, 1)
    other.rendezvous.may_look.clear()
    host.start()
    other.start()
    assert host.rendezvous.published.wait(LIMIT_S)
    kill_actor(handle)
    other.rendezvous.may_look.set()
    for member in (host, other):
        member.join(LIMIT_S)
    assert [host.answer, other.answer] == [3.0, 3.0]
    ray.kill(handle)
