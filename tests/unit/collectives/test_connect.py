import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.collective import Collective
from collectives.connect import connect
from collectives.errors import CommunicatorError, RendezvousError
from collectives.rendezvous import host_identity, this_member
from collectives.solo import SoloCommunicator
from collectives.transports.gloo import GlooCommunicator, GlooStore
from collectives.transports.shm import Segment, SharedMemoryTransport


def connect_all(members, transport, timeout_s=10.0):
    """Each member in a thread of its own; communicators, or what was raised instead."""
    meeting = Collective(len(members))
    found = [None] * len(members)

    def member(me):
        try:
            found[me.rank] = connect(
                meeting, me, world_size=len(members), timeout_s=timeout_s, transport=transport
            )
        except Exception as error:
            found[me.rank] = error

    threads = [threading.Thread(target=member, args=(me,)) for me in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def sum_of_ranks(communicators):
    tensors = [torch.tensor([float(communicator.rank)]) for communicator in communicators]
    threads = [
        threading.Thread(target=communicator.all_reduce, args=(tensor,))
        for communicator, tensor in zip(communicators, tensors, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [tensor.item() for tensor in tensors]


def test_one_member_needs_no_rendezvous():
    communicator = connect(Collective(1), this_member(0), world_size=1, timeout_s=1.0)
    assert isinstance(communicator, SoloCommunicator)
    tensor = torch.arange(3.0)
    communicator.all_reduce(tensor, "mean")
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert communicator.all_gather(tensor).tolist() == [[0.0, 1.0, 2.0]]


def test_members_of_one_host_share_memory():
    found = connect_all([this_member(0), this_member(1)], "auto")
    assert all(isinstance(communicator, SharedMemoryTransport) for communicator in found)
    assert sum_of_ranks(found) == [1.0, 1.0]


def test_members_of_two_hosts_use_gloo():
    found = connect_all([this_member(0), replace(this_member(1), host_id="another")], "auto")
    assert all(isinstance(communicator, GlooCommunicator) for communicator in found)
    assert sum_of_ranks(found) == [1.0, 1.0]


def test_two_groups_of_one_process_do_not_disturb_each_other():
    first = connect_all([this_member(0), this_member(1)], "gloo")
    second = connect_all([this_member(rank) for rank in range(3)], "gloo")
    assert sum_of_ranks(first) == [1.0, 1.0]
    assert sum_of_ranks(second) == [3.0, 3.0, 3.0]
    for communicator in first:
        communicator.close()
    assert sum_of_ranks(second) == [3.0, 3.0, 3.0]


def test_shared_memory_across_hosts_is_refused_with_the_way_out():
    found = connect_all([this_member(0), replace(this_member(1), host_id="another")], "shm")
    for error in found:
        assert isinstance(error, CommunicatorError)
        assert "gloo" in str(error)


def test_a_missing_member_is_named_with_those_that_came():
    with pytest.raises(RendezvousError, match=r"ranks \[1, 2\] of 3 did not come within 0.1 s.*rank 0"):
        connect(Collective(3), this_member(0), world_size=3, timeout_s=0.1)


def test_rank_0_that_publishes_nothing_is_named():
    meeting = Collective(2)
    meeting.register(0, this_member(0))
    with pytest.raises(RendezvousError, match=r"rank 0 .* published no endpoint 'all' within 0.1 s"):
        connect(meeting, this_member(1), world_size=2, timeout_s=0.1)


def test_a_rank_that_is_taken_is_refused():
    meeting = Collective(2)
    meeting.register(0, this_member(1))
    meeting.register(0, this_member(1))  # the same member may repeat itself
    with pytest.raises(RendezvousError, match="already taken by rank 1"):
        meeting.register(0, replace(this_member(1), pid=1))
    meeting.register(1, replace(this_member(1), pid=1))  # the next generation is free


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_out_of_range_is_refused(rank):
    with pytest.raises(RendezvousError, match="ranks are 0 to 1"):
        Collective(2).register(0, this_member(rank))


def test_an_endpoint_is_published_once_per_key_and_generation():
    meeting = Collective(2)
    assert meeting.endpoint(0, "all") is None
    meeting.publish(0, "all", "a:1")
    assert meeting.endpoint(0, "all") == "a:1"
    with pytest.raises(RendezvousError, match="a:1 was published before"):
        meeting.publish(0, "all", "b:2")
    meeting.publish(0, "node 1", "b:2")
    meeting.publish(1, "all", "c:3")
    assert (meeting.endpoint(0, "node 1"), meeting.endpoint(1, "all")) == ("b:2", "c:3")


def test_members_are_listed_by_rank():
    meeting = Collective(3)
    for rank in (2, 0):
        meeting.register(0, this_member(rank))
    assert [member.rank for member in meeting.members(0)] == [0, 2]
    assert meeting.members(5) == ()


def test_processes_of_one_host_agree_on_its_identity():
    other = subprocess.run(
        [sys.executable, "-c", "from collectives.rendezvous import host_identity; print(host_identity())"],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert other.stdout.strip() == host_identity()
    assert host_identity().count("/") >= 3


def test_a_segment_that_is_gone_is_an_error():
    with pytest.raises(CommunicatorError, match="cannot map"):
        Segment.attach("/proc/self/fd/99999", 2, 1)


def test_a_store_that_nobody_hosts_is_an_error():
    with pytest.raises(CommunicatorError, match=r"rank 0's store at 127\.0\.0\.1:1"):
        GlooStore.connect("127.0.0.1:1", 1, timeout_s=0.5)


@pytest.mark.parametrize(
    "error",
    [
        CommunicatorError("barrier", 1, "rank 0 (pid 7 on here)", 2.5, "it left the group"),
        RendezvousError(3, "rank 1 is missing"),
    ],
)
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_a_communicator_error_says_what_was_awaited_from_whom_and_for_how_long():
    text = str(CommunicatorError("barrier", 1, "rank 0 (pid 7 on here)", 2.5, "it left the group"))
    assert (
        text == "barrier on rank 1 failed after 2.5 s waiting for rank 0 (pid 7 on here): it left the group"
    )
