"""Forming generations: by hand, for random histories with an actor that restarts, and with real processes."""

import os
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rendezvous_actor import RendezvousActor
from collectives.connect import connect
from collectives.errors import CommunicatorError, MemberLostError, RendezvousError
from collectives.failure_detector import FailureDetector
from collectives.membership import join, rejoin
from collectives.rendezvous import JoinRequest, Member, MembershipView, RendezvousStatus, this_member
from collectives.transport_factory import GroupContext
from collectives.transports import gloo, gloo_mesh
from tests.unit.collectives.rendezvous_processes import run_processes

FOR_EVER_S = 1e9


def process(pid, rank=0):
    """A made-up process; its pid tells it from others."""
    return Member(rank=rank, hostname="here", host_id="here", pid=pid, address="127.0.0.1")


A, B, C, D, E = (process(pid, rank) for pid, rank in ((1, 0), (2, 1), (3, 2), (4, 0), (5, 0)))


def join_request(member, previous=None, lost=(), survivor_wait_s=FOR_EVER_S, replacement_wait_s=FOR_EVER_S):
    return JoinRequest(
        member=member,
        previous=previous,
        lost=lost,
        survivor_wait_s=survivor_wait_s,
        replacement_wait_s=replacement_wait_s,
    )


def first_generation(collective, *members):
    for member in members:
        collective.request_join(join_request(member))
    membership = collective.request_join(join_request(members[0]))
    assert isinstance(membership, MembershipView)
    return membership


def pids(membership):
    assert [member.rank for member in membership.members] == list(range(len(membership.members)))
    return [member.pid for member in membership.members]


def test_the_first_generation_forms_when_it_is_full_with_the_wanted_ranks():
    collective = RendezvousActor(3)
    waiting = collective.request_join(join_request(process(7, rank=2)))
    assert waiting == RendezvousStatus(present=(process(7, rank=2),), expected=(), lost=())
    assert isinstance(collective.request_join(join_request(process(8, rank=0))), RendezvousStatus)
    membership = collective.request_join(
        join_request(process(9, rank=0))
    )  # taken: it gets the first that is free
    assert (membership.generation, pids(membership)) == (0, [8, 9, 7])
    assert collective.request_join(join_request(process(7, rank=2))) == membership


def test_a_newcomer_takes_the_place_of_the_lost_one():
    collective = RendezvousActor(3)
    membership = first_generation(collective, A, B, C)
    assert isinstance(collective.request_join(join_request(A, membership, lost=(B,))), RendezvousStatus)
    assert isinstance(collective.request_join(join_request(C, membership)), RendezvousStatus)
    following = collective.request_join(join_request(D))
    assert (following.generation, pids(following)) == (1, [1, 4, 3])
    assert collective.request_join(join_request(A, membership, lost=(B,))) == following
    assert collective.request_join(join_request(C, membership)) == following


def test_without_a_newcomer_survivors_keep_their_order_and_ranks_become_dense():
    collective = RendezvousActor(3)
    membership = first_generation(collective, A, B, C)
    collective.request_join(join_request(C, membership, replacement_wait_s=0.0))
    following = collective.request_join(join_request(B, membership, lost=(A,), replacement_wait_s=0.0))
    assert (following.generation, pids(following)) == (1, [2, 3])


def test_the_longest_requested_wait_for_a_newcomer_counts():
    collective = RendezvousActor(3)
    membership = first_generation(collective, A, B, C)
    collective.request_join(join_request(C, membership, lost=(A,), replacement_wait_s=0.0))
    assert isinstance(collective.request_join(join_request(B, membership)), RendezvousStatus)


def test_a_survivor_that_has_not_come_is_waited_for_although_the_group_would_be_full():
    collective = RendezvousActor(3)
    membership = first_generation(collective, A, B, C)
    for newcomer in (D, E):
        collective.request_join(join_request(newcomer))
    waiting = collective.request_join(join_request(A, membership, lost=(B,), replacement_wait_s=0.0))
    assert [member.pid for member in waiting.expected] == [3]
    following = collective.request_join(join_request(C, membership, replacement_wait_s=0.0))
    assert pids(following) == [1, 4, 3]  # E waits for the next loss
    following = collective.request_join(join_request(A, following, lost=(C, D), replacement_wait_s=0.0))
    assert pids(following) == [1, 5]


def test_a_survivor_that_does_not_come_in_time_is_left_out_and_comes_back_as_a_newcomer():
    collective = RendezvousActor(2)
    membership = first_generation(collective, A, B)
    following = collective.request_join(
        join_request(A, membership, survivor_wait_s=0.0, replacement_wait_s=0.0)
    )
    assert pids(following) == [1]
    assert isinstance(collective.request_join(join_request(B, membership)), RendezvousStatus)
    assert pids(collective.request_join(join_request(A, following))) == [1, 2]


def test_an_applicant_that_dies_or_withdraws_is_left_out():
    collective = RendezvousActor(4)
    membership = first_generation(collective, A, B, C, D)
    collective.request_join(join_request(B, membership, lost=(D,), replacement_wait_s=0.0))
    collective.request_join(join_request(E))
    collective.cancel_join(E)
    collective.request_join(join_request(C, membership, lost=(B,), replacement_wait_s=0.0))
    assert pids(collective.request_join(join_request(A, membership, replacement_wait_s=0.0))) == [1, 3]


def test_newcomers_alone_form_only_a_full_group_without_survivors():
    collective = RendezvousActor(2)
    membership = first_generation(collective, A, B)
    for member in (D, E):
        answer = collective.request_join(join_request(member, replacement_wait_s=0.0))
    assert [member.pid for member in answer.expected] == [1, 2]
    following = collective.request_join(join_request(E, lost=membership.members))
    assert (following.generation, pids(following)) == (1, [4, 5])


def test_a_restarted_actor_learns_the_generation_from_the_first_who_call():
    membership = MembershipView(generation=5, members=(A, B, C))
    collective = RendezvousActor(3)
    assert isinstance(collective.request_join(join_request(D)), RendezvousStatus)
    collective.request_join(join_request(A, membership, lost=(C,)))
    following = collective.request_join(join_request(B, membership))
    assert (following.generation, pids(following)) == (6, [1, 2, 4])


def test_a_restarted_actor_learns_a_generation_from_one_member_that_knows_it():
    membership = MembershipView(generation=5, members=(A, B, C))
    formed = MembershipView(generation=6, members=(A, B))
    collective = RendezvousActor(3)
    assert isinstance(
        collective.request_join(join_request(B, membership, lost=(C,), replacement_wait_s=0.0)),
        RendezvousStatus,
    )
    collective.adopt_membership(formed)
    assert collective.request_join(join_request(B, membership, lost=(C,), replacement_wait_s=0.0)) == formed


def test_a_generation_that_lost_a_member_is_not_answered_any_more():
    collective = RendezvousActor(3)
    membership = first_generation(collective, A, B, C)
    collective.request_join(join_request(B, membership, replacement_wait_s=0.0, lost=(C,)))
    following = collective.request_join(join_request(A, membership, replacement_wait_s=0.0))
    collective.request_join(join_request(D))
    collective.request_join(join_request(A, following))  # something went wrong with it
    again = collective.request_join(join_request(B, membership))  # has not heard of it yet
    assert (again.generation, pids(again)) == (2, [1, 2, 4])


def test_a_formed_generation_expects_its_members_and_refuses_others():
    collective = RendezvousActor(2)
    first_generation(collective, A, B)
    status = collective.register(0, replace(A, port=77))
    assert status.present == (replace(A, port=77),)
    assert status.expected == (B,)
    with pytest.raises(
        RendezvousError, match=r"does not belong: it was formed of rank 0 .pid 1 on here., rank 1"
    ):
        collective.register(0, process(4, rank=1))


def test_a_generation_is_over_when_the_next_was_formed():
    collective = RendezvousActor(2)
    membership = first_generation(collective, A, B)
    collective.publish(0, "all", "somewhere")
    collective.request_join(join_request(A, membership, lost=(B,), replacement_wait_s=0.0))
    for call in (lambda: collective.register(0, A), lambda: collective.endpoint(0, "all")):
        with pytest.raises(RendezvousError, match="rendezvous 0: it is over: generation 1 was formed"):
            call()
    assert collective.endpoint(1, "all") is None


def test_a_late_member_learns_which_members_are_lost():
    collective = RendezvousActor(3)
    collective.register(0, A)
    collective.register(0, B)
    collective.report(0, (B,))
    assert collective.register(0, C).lost == (B,)


@settings(deadline=None)
@given(data=st.data())
def test_survivors_agree_on_one_membership_in_their_old_order(data):
    world_size = data.draw(st.integers(1, 6), label="world_size")
    members = tuple(process(pid, rank) for rank, pid in enumerate(range(10, 10 + world_size)))
    membership = MembershipView(generation=3, members=members)
    survivors = data.draw(st.lists(st.sampled_from(members), min_size=1, unique=True), label="survivors")
    dead = tuple(member for member in members if member not in survivors)
    # If newcomers alone fill a group, a restarted actor that knows of no survivors would form one of them.
    most = min(3, world_size - 1)
    newcomers = [process(pid, pid % 3) for pid in range(data.draw(st.integers(0, most), label="newcomers"))]
    asking = [join_request(member, membership, dead, replacement_wait_s=0.0) for member in survivors]
    asking += [join_request(member) for member in newcomers]
    heard = {}
    collective = RendezvousActor(world_size)
    for _ in range(200):
        if all(member.process in heard for member in survivors):
            break
        if data.draw(st.integers(0, 9), label="restart on 0") == 0:
            collective = RendezvousActor(world_size)
            for known in heard.values():
                collective.adopt_membership(known)
        one = data.draw(st.sampled_from(asking), label="who asks")
        if one.member.process not in heard:
            answer = collective.request_join(one)
            if isinstance(answer, MembershipView):
                heard[one.member.process] = answer
        elif data.draw(st.booleans(), label="meets"):
            place = heard[one.member.process].find_member(one.member)
            collective.register(4, place)
    (agreed,) = set(heard.values()) or {None}
    if agreed is not None:
        assert agreed.generation == 4
        there = [pid for pid in pids(agreed) if pid >= 10]
        assert there == sorted(member.pid for member in survivors)
        assert len(agreed.members) <= world_size
        assert not {member.pid for member in dead} & set(pids(agreed))


def reduced(communicator, rank):
    tensor = torch.full((1000,), float(rank + 1))
    communicator.all_reduce(tensor)
    return tensor.unique().tolist()


def live_through_a_death(rendezvous, rank, event):
    """Rank 1 of the first generation dies in the middle; a replacement of it has rank 3 here."""
    if rank == 3:
        event.wait(60)
        membership = join(rendezvous, this_member(1), timeout_s=60)
    else:
        membership = join(rendezvous, this_member(rank), timeout_s=60)
    me = membership.find_member(this_member(0))
    found = [(membership.generation, me.rank)]
    while True:
        try:
            with connect(
                rendezvous, me, world_size=3, generation=membership.generation, timeout_s=60
            ) as communicator:
                found.append(reduced(communicator, me.rank))
                if membership.generation == 1:
                    return found
                if me.rank == 1:
                    event.set()
                    os.kill(os.getpid(), 9)
                reduced(communicator, me.rank)
        except CommunicatorError as error:
            lost = error.lost if isinstance(error, MemberLostError) else ()
            found.append([member.rank for member in lost])
            membership = rejoin(rendezvous, me, membership, lost=lost, replacement_wait_s=60, timeout_s=60)
            me = membership.find_member(me)
            found.append((membership.generation, me.rank))


def test_survivors_and_a_replacement_reduce_in_the_next_generation():
    first, killed, third, replacement = run_processes(4, live_through_a_death, world_size=3)
    assert killed is None
    assert first == [(0, 0), [6.0], [1], (1, 0), [6.0]]
    assert third == [(0, 2), [6.0], [1], (1, 2), [6.0]]
    assert replacement == [(1, 1), [6.0]]


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


def test_a_group_that_does_not_form_names_the_expected_members_and_withdraws():
    collective = RendezvousActor(3)
    collective.request_join(join_request(process(os.getppid(), rank=1)))
    with pytest.raises(
        RendezvousError, match=r"waited 0\.\d s for it to form; present: .*expected: newcomers"
    ):
        join(collective, this_member(0), timeout_s=0.1)
    assert [other.pid for other in collective.request_join(join_request(C)).present] == [os.getppid(), 3]


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
