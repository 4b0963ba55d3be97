"""How generations form: by hand, for random histories with an actor that restarts, and with real processes."""

import os
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.collective import Collective
from collectives.connect import connect
from collectives.errors import CommunicatorError, MemberLostError, RendezvousError
from collectives.liveness import Liveness
from collectives.membership import join, rejoin
from collectives.rendezvous import Attendance, Candidacy, Member, Roster, this_member
from collectives.transports import gloo, gloo_mesh
from collectives.wires import Meeting
from tests.unit.collectives.rendezvous_processes import run_processes

FOR_EVER_S = 1e9


def process(pid, rank=0):
    """A made-up process; its pid tells it from others."""
    return Member(rank=rank, hostname="here", host_id="here", pid=pid, address="127.0.0.1")


A, B, C, D, E = (process(pid, rank) for pid, rank in ((1, 0), (2, 1), (3, 2), (4, 0), (5, 0)))


def candidacy(member, previous=None, lost=(), survivor_wait_s=FOR_EVER_S, replacement_wait_s=FOR_EVER_S):
    return Candidacy(
        member=member,
        previous=previous,
        lost=lost,
        survivor_wait_s=survivor_wait_s,
        replacement_wait_s=replacement_wait_s,
    )


def first_generation(collective, *members):
    for member in members:
        collective.enlist(candidacy(member))
    roster = collective.enlist(candidacy(members[0]))
    assert isinstance(roster, Roster)
    return roster


def pids(roster):
    assert [member.rank for member in roster.members] == list(range(len(roster.members)))
    return [member.pid for member in roster.members]


def test_the_first_generation_forms_when_it_is_full_with_the_wanted_ranks():
    collective = Collective(3)
    waiting = collective.enlist(candidacy(process(7, rank=2)))
    assert waiting == Attendance(present=(process(7, rank=2),), expected=(), lost=())
    assert isinstance(collective.enlist(candidacy(process(8, rank=0))), Attendance)
    roster = collective.enlist(candidacy(process(9, rank=0)))  # taken: it gets the first that is free
    assert (roster.generation, pids(roster)) == (0, [8, 9, 7])
    assert collective.enlist(candidacy(process(7, rank=2))) == roster


def test_a_newcomer_takes_the_place_of_the_lost_one():
    collective = Collective(3)
    roster = first_generation(collective, A, B, C)
    assert isinstance(collective.enlist(candidacy(A, roster, lost=(B,))), Attendance)
    assert isinstance(collective.enlist(candidacy(C, roster)), Attendance)
    following = collective.enlist(candidacy(D))
    assert (following.generation, pids(following)) == (1, [1, 4, 3])
    assert collective.enlist(candidacy(A, roster, lost=(B,))) == following
    assert collective.enlist(candidacy(C, roster)) == following


def test_without_a_newcomer_survivors_keep_their_order_and_ranks_become_dense():
    collective = Collective(3)
    roster = first_generation(collective, A, B, C)
    collective.enlist(candidacy(C, roster, replacement_wait_s=0.0))
    following = collective.enlist(candidacy(B, roster, lost=(A,), replacement_wait_s=0.0))
    assert (following.generation, pids(following)) == (1, [2, 3])


def test_the_longest_told_wait_for_a_newcomer_counts():
    collective = Collective(3)
    roster = first_generation(collective, A, B, C)
    collective.enlist(candidacy(C, roster, lost=(A,), replacement_wait_s=0.0))
    assert isinstance(collective.enlist(candidacy(B, roster)), Attendance)


def test_a_survivor_that_has_not_come_is_waited_for_although_the_group_would_be_full():
    collective = Collective(3)
    roster = first_generation(collective, A, B, C)
    for newcomer in (D, E):
        collective.enlist(candidacy(newcomer))
    waiting = collective.enlist(candidacy(A, roster, lost=(B,), replacement_wait_s=0.0))
    assert [member.pid for member in waiting.expected] == [3]
    following = collective.enlist(candidacy(C, roster, replacement_wait_s=0.0))
    assert pids(following) == [1, 4, 3]  # E waits for the next loss
    following = collective.enlist(candidacy(A, following, lost=(C, D), replacement_wait_s=0.0))
    assert pids(following) == [1, 5]


def test_a_survivor_that_does_not_come_in_time_is_left_out_and_comes_back_as_a_newcomer():
    collective = Collective(2)
    roster = first_generation(collective, A, B)
    following = collective.enlist(candidacy(A, roster, survivor_wait_s=0.0, replacement_wait_s=0.0))
    assert pids(following) == [1]
    assert isinstance(collective.enlist(candidacy(B, roster)), Attendance)
    assert pids(collective.enlist(candidacy(A, following))) == [1, 2]


def test_a_candidate_that_dies_or_withdraws_is_left_out():
    collective = Collective(4)
    roster = first_generation(collective, A, B, C, D)
    collective.enlist(candidacy(B, roster, lost=(D,), replacement_wait_s=0.0))
    collective.enlist(candidacy(E))
    collective.withdraw(E)
    collective.enlist(candidacy(C, roster, lost=(B,), replacement_wait_s=0.0))
    assert pids(collective.enlist(candidacy(A, roster, replacement_wait_s=0.0))) == [1, 3]


def test_newcomers_alone_form_a_group_only_when_it_is_full_and_nobody_is_left_of_the_last():
    collective = Collective(2)
    roster = first_generation(collective, A, B)
    for member in (D, E):
        answer = collective.enlist(candidacy(member, replacement_wait_s=0.0))
    assert [member.pid for member in answer.expected] == [1, 2]
    following = collective.enlist(candidacy(E, lost=roster.members))
    assert (following.generation, pids(following)) == (1, [4, 5])


def test_a_restarted_actor_learns_the_generation_from_the_first_who_call():
    roster = Roster(generation=5, members=(A, B, C))
    collective = Collective(3)
    assert isinstance(collective.enlist(candidacy(D)), Attendance)
    collective.enlist(candidacy(A, roster, lost=(C,)))
    following = collective.enlist(candidacy(B, roster))
    assert (following.generation, pids(following)) == (6, [1, 2, 4])


def test_a_generation_that_only_one_heard_of_before_the_restart_is_told_by_that_one():
    roster = Roster(generation=5, members=(A, B, C))
    formed = Roster(generation=6, members=(A, B))
    collective = Collective(3)
    assert isinstance(collective.enlist(candidacy(B, roster, lost=(C,), replacement_wait_s=0.0)), Attendance)
    collective.learn(formed)
    assert collective.enlist(candidacy(B, roster, lost=(C,), replacement_wait_s=0.0)) == formed


def test_a_generation_that_lost_someone_before_all_heard_of_it_is_not_told_any_more():
    collective = Collective(3)
    roster = first_generation(collective, A, B, C)
    collective.enlist(candidacy(B, roster, replacement_wait_s=0.0, lost=(C,)))
    following = collective.enlist(candidacy(A, roster, replacement_wait_s=0.0))
    collective.enlist(candidacy(D))
    collective.enlist(candidacy(A, following))  # something went wrong with it
    again = collective.enlist(candidacy(B, roster))  # has not heard of it yet
    assert (again.generation, pids(again)) == (2, [1, 2, 4])


def test_the_meeting_of_a_formed_generation_expects_its_members_and_refuses_others():
    collective = Collective(2)
    first_generation(collective, A, B)
    attendance = collective.register(0, replace(A, port=77))
    assert attendance.present == (replace(A, port=77),)
    assert attendance.expected == (B,)
    with pytest.raises(
        RendezvousError, match=r"does not belong: it was formed of rank 0 .pid 1 on here., rank 1"
    ):
        collective.register(0, process(4, rank=1))


def test_a_generation_is_over_when_the_next_was_formed():
    collective = Collective(2)
    roster = first_generation(collective, A, B)
    collective.publish(0, "all", "somewhere")
    collective.enlist(candidacy(A, roster, lost=(B,), replacement_wait_s=0.0))
    for call in (lambda: collective.register(0, A), lambda: collective.endpoint(0, "all")):
        with pytest.raises(RendezvousError, match="rendezvous 0: it is over: generation 1 was formed"):
            call()
    assert collective.endpoint(1, "all") is None


def test_who_comes_to_a_meeting_learns_who_was_lost_in_it():
    collective = Collective(3)
    collective.register(0, A)
    collective.register(0, B)
    collective.report(0, (B,))
    assert collective.register(0, C).lost == (B,)


@settings(deadline=None)
@given(data=st.data())
def test_whatever_dies_and_restarts_survivors_agree_on_one_roster_in_their_old_order(data):
    world_size = data.draw(st.integers(1, 6), label="world_size")
    members = tuple(process(pid, rank) for rank, pid in enumerate(range(10, 10 + world_size)))
    roster = Roster(generation=3, members=members)
    survivors = data.draw(st.lists(st.sampled_from(members), min_size=1, unique=True), label="survivors")
    dead = tuple(member for member in members if member not in survivors)
    # So many that they alone fill a group would form one where a restarted actor hears of no other.
    most = min(3, world_size - 1)
    newcomers = [process(pid, pid % 3) for pid in range(data.draw(st.integers(0, most), label="newcomers"))]
    asking = [candidacy(member, roster, dead, replacement_wait_s=0.0) for member in survivors]
    asking += [candidacy(member) for member in newcomers]
    heard = {}
    collective = Collective(world_size)
    for _ in range(200):
        if all(member.process in heard for member in survivors):
            break
        if data.draw(st.integers(0, 9), label="restart on 0") == 0:
            collective = Collective(world_size)
            for known in heard.values():
                collective.learn(known)
        one = data.draw(st.sampled_from(asking), label="who asks")
        if one.member.process not in heard:
            answer = collective.enlist(one)
            if isinstance(answer, Roster):
                heard[one.member.process] = answer
        elif data.draw(st.booleans(), label="meets"):
            place = heard[one.member.process].place_of(one.member)
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
        roster = join(rendezvous, this_member(1), timeout_s=60)
    else:
        roster = join(rendezvous, this_member(rank), timeout_s=60)
    me = roster.place_of(this_member(0))
    found = [(roster.generation, me.rank)]
    while True:
        try:
            with connect(
                rendezvous, me, world_size=3, generation=roster.generation, timeout_s=60
            ) as communicator:
                found.append(reduced(communicator, me.rank))
                if roster.generation == 1:
                    return found
                if me.rank == 1:
                    event.set()
                    os.kill(os.getpid(), 9)
                reduced(communicator, me.rank)
        except CommunicatorError as error:
            lost = error.lost if isinstance(error, MemberLostError) else ()
            found.append([member.rank for member in lost])
            roster = rejoin(rendezvous, me, roster, lost=lost, replacement_wait_s=60, timeout_s=60)
            me = roster.place_of(me)
            found.append((roster.generation, me.rank))


def test_survivors_and_a_replacement_reduce_in_the_next_generation():
    first, killed, third, replacement = run_processes(4, live_through_a_death, world_size=3)
    assert killed is None
    assert first == [(0, 0), [6.0], [1], (1, 0), [6.0]]
    assert third == [(0, 2), [6.0], [1], (1, 2), [6.0]]
    assert replacement == [(1, 1), [6.0]]


def die_in_the_meeting(rendezvous, rank, event):
    if rank == 1:
        rendezvous.register(0, this_member(1))
        event.set()
        os.kill(os.getpid(), 9)
    event.wait(60)
    with pytest.raises(MemberLostError) as caught:
        connect(rendezvous, this_member(rank), world_size=4, timeout_s=3600)
    return caught.value.operation, 1 in [member.rank for member in caught.value.lost]


def test_a_death_inside_the_meeting_ends_it_for_all_who_are_and_come_there():
    # Rank 3 never comes: without news the others would wait for an hour.
    answers = run_processes(3, die_in_the_meeting, world_size=4)
    assert answers == [("meeting", True), None, ("meeting", True)]


def test_a_group_that_does_not_form_says_who_was_awaited_and_withdraws():
    collective = Collective(3)
    collective.enlist(candidacy(process(os.getppid(), rank=1)))
    with pytest.raises(
        RendezvousError, match=r"waited 0\.\d s for it to form; here are .*awaited are newcomers"
    ):
        join(collective, this_member(0), timeout_s=0.1)
    assert [other.pid for other in collective.enlist(candidacy(C)).present] == [os.getppid(), 3]


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
    """A constructor that waits for the dead one's connection is given up, and ends long before the time limit."""
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
    """What the kernel tells of an ended process may come after what it tells of its connections."""
    asked = threading.Event()
    hear, explained = Liveness._handle, Meeting.explained
    Liveness._handle = lambda *arguments: (asked.wait(60), hear(*arguments))
    Meeting.explained = lambda *arguments: (asked.set(), explained(*arguments))[1]
    return die_when_all_have_addresses(rendezvous, rank, event)


def come_late_to_an_operation(rendezvous, rank, event):
    """By more than all attempts to connect may take together."""
    gloo_mesh._CONNECT_S = 0.2
    with connect(rendezvous, this_member(rank), world_size=2, timeout_s=60, transport="gloo") as communicator:
        if rank == 1:
            assert not event.wait(2.0)
        return reduced(communicator, rank)


def test_the_time_limit_of_connecting_is_not_that_of_operations():
    assert run_processes(2, come_late_to_an_operation, world_size=2) == [[3.0], [3.0]]


def connect_by_gloo(rendezvous, rank):
    """Where the dead one was connected to in its last moment, the first operation finds out."""
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
        die_when_all_have_addresses,
        hear_of_it_after_connections_broke,
    ],
)
def test_a_death_after_the_meeting_and_before_all_are_connected_is_noticed(task):
    answers = run_processes(3, task, world_size=3)
    assert answers == [True, None, True]
