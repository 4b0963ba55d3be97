"""Forming generations: by hand, for random histories with an actor that restarts, and with real processes."""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.connect import connect
from collectives.errors import CommunicatorError, MemberLostError, RendezvousError
from collectives.rendezvous import Member, RendezvousStatus, this_member
from experiments.allreduce.membership import ElasticRendezvous, JoinRequest, MembershipView, join, rejoin
from tests.unit.collectives.members import _RendezvousManager
from tests.unit.collectives.rendezvous_processes import run_processes

_RendezvousManager.register("ElasticRendezvous", ElasticRendezvous)

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
    collective = ElasticRendezvous(3)
    waiting = collective.request_join(join_request(process(7, rank=2)))
    assert waiting == RendezvousStatus(present=(process(7, rank=2),), lost=())
    assert isinstance(collective.request_join(join_request(process(8, rank=0))), RendezvousStatus)
    membership = collective.request_join(
        join_request(process(9, rank=0))
    )  # taken: it gets the first that is free
    assert (membership.generation, pids(membership)) == (0, [8, 9, 7])
    assert collective.request_join(join_request(process(7, rank=2))) == membership


def test_a_newcomer_takes_the_place_of_the_lost_one():
    collective = ElasticRendezvous(3)
    membership = first_generation(collective, A, B, C)
    assert isinstance(collective.request_join(join_request(A, membership, lost=(B,))), RendezvousStatus)
    assert isinstance(collective.request_join(join_request(C, membership)), RendezvousStatus)
    following = collective.request_join(join_request(D))
    assert (following.generation, pids(following)) == (1, [1, 4, 3])
    assert collective.request_join(join_request(A, membership, lost=(B,))) == following
    assert collective.request_join(join_request(C, membership)) == following


def test_without_a_newcomer_survivors_keep_their_order_and_ranks_become_dense():
    collective = ElasticRendezvous(3)
    membership = first_generation(collective, A, B, C)
    collective.request_join(join_request(C, membership, replacement_wait_s=0.0))
    following = collective.request_join(join_request(B, membership, lost=(A,), replacement_wait_s=0.0))
    assert (following.generation, pids(following)) == (1, [2, 3])


def test_the_longest_requested_wait_for_a_newcomer_counts():
    collective = ElasticRendezvous(3)
    membership = first_generation(collective, A, B, C)
    collective.request_join(join_request(C, membership, lost=(A,), replacement_wait_s=0.0))
    assert isinstance(collective.request_join(join_request(B, membership)), RendezvousStatus)


def test_a_survivor_that_has_not_come_is_waited_for_although_the_group_would_be_full():
    collective = ElasticRendezvous(3)
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
    collective = ElasticRendezvous(2)
    membership = first_generation(collective, A, B)
    following = collective.request_join(
        join_request(A, membership, survivor_wait_s=0.0, replacement_wait_s=0.0)
    )
    assert pids(following) == [1]
    assert isinstance(collective.request_join(join_request(B, membership)), RendezvousStatus)
    assert pids(collective.request_join(join_request(A, following))) == [1, 2]


def test_an_applicant_that_dies_or_withdraws_is_left_out():
    collective = ElasticRendezvous(4)
    membership = first_generation(collective, A, B, C, D)
    collective.request_join(join_request(B, membership, lost=(D,), replacement_wait_s=0.0))
    collective.request_join(join_request(E))
    collective.cancel_join(E)
    collective.request_join(join_request(C, membership, lost=(B,), replacement_wait_s=0.0))
    assert pids(collective.request_join(join_request(A, membership, replacement_wait_s=0.0))) == [1, 3]


def test_newcomers_alone_form_only_a_full_group_without_survivors():
    collective = ElasticRendezvous(2)
    membership = first_generation(collective, A, B)
    for member in (D, E):
        answer = collective.request_join(join_request(member, replacement_wait_s=0.0))
    assert [member.pid for member in answer.expected] == [1, 2]
    following = collective.request_join(join_request(E, lost=membership.members))
    assert (following.generation, pids(following)) == (1, [4, 5])


def test_a_restarted_actor_learns_the_generation_from_the_first_who_call():
    membership = MembershipView(generation=5, members=(A, B, C))
    collective = ElasticRendezvous(3)
    assert isinstance(collective.request_join(join_request(D)), RendezvousStatus)
    collective.request_join(join_request(A, membership, lost=(C,)))
    following = collective.request_join(join_request(B, membership))
    assert (following.generation, pids(following)) == (6, [1, 2, 4])


def test_a_restarted_actor_learns_a_generation_from_one_member_that_knows_it():
    membership = MembershipView(generation=5, members=(A, B, C))
    formed = MembershipView(generation=6, members=(A, B))
    collective = ElasticRendezvous(3)
    assert isinstance(
        collective.request_join(join_request(B, membership, lost=(C,), replacement_wait_s=0.0)),
        RendezvousStatus,
    )
    collective.adopt_membership(formed)
    assert collective.request_join(join_request(B, membership, lost=(C,), replacement_wait_s=0.0)) == formed


def test_a_generation_that_lost_a_member_is_not_answered_any_more():
    collective = ElasticRendezvous(3)
    membership = first_generation(collective, A, B, C)
    collective.request_join(join_request(B, membership, replacement_wait_s=0.0, lost=(C,)))
    following = collective.request_join(join_request(A, membership, replacement_wait_s=0.0))
    collective.request_join(join_request(D))
    collective.request_join(join_request(A, following))  # something went wrong with it
    again = collective.request_join(join_request(B, membership))  # has not heard of it yet
    assert (again.generation, pids(again)) == (2, [1, 2, 4])


def test_a_formed_generation_expects_its_members_and_refuses_others():
    collective = ElasticRendezvous(2)
    first_generation(collective, A, B)
    status = collective.register(0, replace(A, port=77))
    assert status.present == (replace(A, port=77),)
    assert status.expected == (B,)
    with pytest.raises(
        RendezvousError, match=r"does not belong: it was formed of rank 0 .pid 1 on here., rank 1"
    ):
        collective.register(0, process(4, rank=1))


def test_a_generation_is_over_when_the_next_was_formed():
    collective = ElasticRendezvous(2)
    membership = first_generation(collective, A, B)
    collective.publish(0, "all", "somewhere")
    collective.request_join(join_request(A, membership, lost=(B,), replacement_wait_s=0.0))
    for call in (lambda: collective.register(0, A), lambda: collective.endpoint(0, "all")):
        with pytest.raises(RendezvousError, match="rendezvous 0: it is over: generation 1 was formed"):
            call()
    assert collective.endpoint(1, "all") is None


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
    collective = ElasticRendezvous(world_size)
    for _ in range(200):
        if all(member.process in heard for member in survivors):
            break
        if data.draw(st.integers(0, 9), label="restart on 0") == 0:
            collective = ElasticRendezvous(world_size)
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
    first, killed, third, replacement = run_processes(
        4, live_through_a_death, world_size=3, actor="ElasticRendezvous"
    )
    assert killed is None
    assert first == [(0, 0), [6.0], [1], (1, 0), [6.0]]
    assert third == [(0, 2), [6.0], [1], (1, 2), [6.0]]
    assert replacement == [(1, 1), [6.0]]


def test_a_group_that_does_not_form_names_the_expected_members_and_withdraws():
    collective = ElasticRendezvous(3)
    collective.request_join(join_request(process(os.getppid(), rank=1)))
    with pytest.raises(
        RendezvousError, match=r"waited 0\.\d s for it to form; present: .*expected: newcomers"
    ):
        join(collective, this_member(0), timeout_s=0.1)
    assert [other.pid for other in collective.request_join(join_request(C)).present] == [os.getppid(), 3]
