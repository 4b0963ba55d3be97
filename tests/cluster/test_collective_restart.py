"""The collective actor is killed and comes back: while a group reduces, and in the middle of a meeting."""

import os
import select
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from ray import cloudpickle

from actors.rendezvous import RemoteRendezvous, start_rendezvous_actor
from collectives.connect import connect
from collectives.errors import MemberLostError
from collectives.membership import join, rejoin
from collectives.rendezvous import JoinRequest, MembershipView, this_member

pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    # Workers cannot import this file: its classes travel as values.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": str(REPOSITORY)}},
    )
    yield
    ray.shutdown()


class GroupMember:
    """Belongs to a group through its generations."""

    def join(self, handle, rank):
        with RemoteRendezvous(handle) as rendezvous:
            self._enter(rendezvous, join(rendezvous, this_member(rank), timeout_s=LIMIT_S))
        return self.membership

    def rejoin(self, handle, lost):
        self.communicator.close()
        with RemoteRendezvous(handle) as rendezvous:
            self._enter(
                rendezvous,
                rejoin(
                    rendezvous,
                    self.me,
                    self.membership,
                    lost=lost,
                    replacement_wait_s=LIMIT_S,
                    timeout_s=LIMIT_S,
                ),
            )
        return self.membership

    def reduce(self, times):
        """The sum of all ranks plus one, as often."""
        for _ in range(times):
            tensor = torch.tensor([self.me.rank + 1.0])
            self.communicator.all_reduce(tensor)
        return tensor.item()

    def reduce_until_someone_is_lost(self):
        try:
            while True:
                self.reduce(1)
        except MemberLostError as error:
            return error

    def pid(self):
        return os.getpid()

    def _enter(self, rendezvous, membership):
        self.membership, self.me = membership, membership.find_member(this_member(0))
        self.communicator = connect(
            rendezvous,
            self.me,
            world_size=len(membership.members),
            timeout_s=LIMIT_S,
            generation=membership.generation,
        )


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


def test_the_actor_dies_while_a_group_reduces_and_the_next_generation_forms_at_the_one_that_comes_back():
    handle = start_rendezvous_actor(3)
    members = [ray.remote(GroupMember).options(num_cpus=0).remote() for _ in range(4)]
    first, second, third, replacement = members
    rosters = ray.get(
        [one.join.remote(handle, rank) for rank, one in enumerate(members[:3])], timeout=LIMIT_S
    )
    assert rosters[0].generation == 0
    assert rosters[0] == rosters[1] == rosters[2]
    pid = ray.get(second.pid.remote())

    sums = [one.reduce.remote(2000) for one in members[:3]]
    kill_actor(handle)
    assert ray.get(sums, timeout=LIMIT_S) == [6.0] * 3

    errors = [one.reduce_until_someone_is_lost.remote() for one in (first, third)]
    kill(pid)
    errors = ray.get(errors, timeout=LIMIT_S)
    assert [[lost.pid for lost in error.lost] for error in errors] == [[pid], [pid]]
    kill_actor(handle)  # it has come back, and dies again
    following = [one.rejoin.remote(handle, errors[0].lost) for one in (first, third)]
    following.append(replacement.join.remote(handle, 1))
    following = ray.get(following, timeout=LIMIT_S)
    assert following[0] == following[1] == following[2]
    assert following[0].generation == 1
    # Survivors keep their ranks, and the replacement has the lost one's.
    old, new = rosters[0].members, following[0].members
    assert (new[0], new[2]) == (old[0], old[2])
    assert new[1].pid == ray.get(replacement.pid.remote())
    live = (first, third, replacement)
    assert ray.get([one.reduce.remote(10) for one in live], timeout=LIMIT_S) == [6.0] * 3
    for handle_of_it in (*live, handle):
        ray.kill(handle_of_it)


def newcomer(member):
    return JoinRequest(member=member, previous=None, lost=(), survivor_wait_s=0.0, replacement_wait_s=0.0)


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


def test_a_generation_that_only_one_heard_of_is_told_by_it_to_the_actor_that_comes_back():
    handle = start_rendezvous_actor(2)
    me, other = this_member(0), replace(this_member(1), pid=os.getppid())
    with RemoteRendezvous(handle) as informed, RemoteRendezvous(handle) as uninformed:
        uninformed.request_join(newcomer(me))
        formed = informed.request_join(newcomer(other))
        assert formed == MembershipView(generation=0, members=(me, other))
        kill_actor(handle)
        assert join(uninformed, me, timeout_s=LIMIT_S) == formed
    ray.kill(handle)
