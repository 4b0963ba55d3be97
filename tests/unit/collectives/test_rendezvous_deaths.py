"""Members that die while a group meets and connects."""

import os
import threading

import pytest
import torch

from actors.rendezvous_actor import RendezvousActor
from collectives.connect import connect
from collectives.errors import MemberLostError
from collectives.failure_detector import FailureDetector
from collectives.rendezvous import Member, this_member
from collectives.transport_factory import GroupContext
from collectives.transports import gloo, gloo_mesh
from tests.unit.collectives.rendezvous_processes import run_processes


def process(pid, rank=0):
    """A made-up process; its pid tells it from others."""
    return Member(rank=rank, hostname="here", host_id="here", pid=pid, address="127.0.0.1")


A, B, C, D, E = (process(pid, rank) for pid, rank in ((1, 0), (2, 1), (3, 2), (4, 0), (5, 0)))


def test_a_late_member_learns_which_members_are_lost():
    collective = RendezvousActor(3)
    collective.register(0, A)
    collective.register(0, B)
    collective.report(0, (B,))
    assert collective.register(0, C).lost == (B,)


def reduced(communicator, rank):
    tensor = torch.full((1000,), float(rank + 1))
    communicator.all_reduce(tensor)
    return tensor.unique().tolist()


def die_during_rendezvous(rendezvous, rank, event):
    if rank == 1:
        rendezvous.register(0, this_member(1))
        event.set()
        os.kill(os.getpid(), 9)
    event.wait(60)
    with pytest.raises(MemberLostError) as caught:
        connect(rendezvous, this_member(rank), world_size=4, timeout_s=3600)
    return caught.value.operation, 1 in [member.rank for member in caught.value.lost]


def test_a_death_during_the_rendezvous_ends_it_for_present_and_late_members():
    # Rank 3 never comes: without the report of a loss the others would wait for an hour.
    answers = run_processes(3, die_during_rendezvous, world_size=4)
    assert answers == [("rendezvous", True), None, ("rendezvous", True)]


def die():
    os.kill(os.getpid(), 9)


def die_before_it_has_an_address(rendezvous, rank, event):
    if rank == 1:
        gloo.connected_mesh = lambda *_: die()
    return connect_by_gloo(rendezvous, rank)


def die_after_it_has_an_address(rendezvous, rank, event):
    if rank == 1:
        gloo_mesh._WatchedStore.set = lambda self, key, value: (self._store.set(key, value), die())
    return connect_by_gloo(rendezvous, rank)


def die_when_all_have_addresses(rendezvous, rank, event):
    """A constructor that waits for a dead member's connection is abandoned, and ends long before the time limit."""
    if rank == 1:
        said = gloo_mesh._WatchedStore.set
        gloo_mesh._WatchedStore.set = lambda *arguments: (said(*arguments), die())
    answer = connect_by_gloo(rendezvous, rank)
    for thread in threading.enumerate():
        if thread.name == "gloo-connecting":
            thread.join(60)
            assert not thread.is_alive()
    return answer


def hear_of_it_after_connections_broke(rendezvous, rank, event):
    """The kernel may close an ended process's connections before its pidfd becomes readable."""
    asked = threading.Event()
    hear, with_root_cause = FailureDetector._handle, GroupContext.with_root_cause
    FailureDetector._handle = lambda *arguments: (asked.wait(60), hear(*arguments))
    GroupContext.with_root_cause = lambda *arguments: (asked.set(), with_root_cause(*arguments))[1]
    return die_when_all_have_addresses(rendezvous, rank, event)


def come_late_to_an_operation(rendezvous, rank, event):
    """Rank 1 is late by more than all attempts to connect may take together."""
    gloo_mesh._CONNECT_S = 0.2
    with connect(rendezvous, this_member(rank), world_size=2, timeout_s=60, transport="gloo") as communicator:
        if rank == 1:
            assert not event.wait(2.0)
        return reduced(communicator, rank)


def test_the_time_limit_of_connecting_is_not_that_of_operations():
    assert run_processes(2, come_late_to_an_operation, world_size=2) == [[3.0], [3.0]]


def connect_by_gloo(rendezvous, rank):
    """If the dead member was still connected to, the first operation detects the loss."""
    with (
        pytest.raises(MemberLostError) as caught,
        connect(
            rendezvous, this_member(rank), world_size=3, timeout_s=3600, transport="gloo"
        ) as communicator,
    ):
        communicator.barrier()
    return 1 in [member.rank for member in caught.value.lost]


@pytest.mark.parametrize(
    "task",
    [
        die_before_it_has_an_address,
        die_after_it_has_an_address,
        pytest.param(die_when_all_have_addresses, marks=pytest.mark.slow),
        hear_of_it_after_connections_broke,
    ],
)
def test_a_death_between_rendezvous_and_connection_is_detected(task):
    answers = run_processes(3, task, world_size=3)
    assert answers == [True, None, True]
