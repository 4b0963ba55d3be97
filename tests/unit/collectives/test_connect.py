import gc
import os
import pickle
import re
import threading
import time
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
import user_transport
from members import run_group

from actors.rendezvous_actor import RendezvousActor
from collectives import transport_factory
from collectives.connect import connect
from collectives.errors import CommunicatorError, CompositionError, RendezvousError
from collectives.failure_detector import FailureDetector
from collectives.layout import Layout
from collectives.rendezvous import PROTOCOL, gather_members, host_identity, this_member
from collectives.schedule import PRIMITIVES
from collectives.solo import SoloCommunicator
from collectives.transport_factory import GroupContext, GroupTransportFactory
from collectives.transports import registry
from collectives.transports.gloo import GlooStore
from collectives.transports.registry import TRANSPORTS, TransportDefinition, candidates, transport_names
from collectives.transports.shm import Segment
from collectives.transports.shm.transport import map_first_members_segment
from tests.programs import run_python
from tests.threads import in_threads


def connect_all(members, transport, timeout_s=10.0, composition="auto"):
    """Each member in a thread of its own; communicators, or what was raised instead."""
    rendezvous = RendezvousActor(len(members))

    def connected(me):
        return connect(
            rendezvous,
            me,
            world_size=len(members),
            timeout_s=timeout_s,
            transport=transport,
            composition=composition,
        )

    return in_threads([lambda me=me: connected(me) for me in members])


def sum_of_ranks(communicators):
    tensors = [torch.tensor([float(communicator.rank)]) for communicator in communicators]
    pairs = zip(communicators, tensors, strict=True)
    assert in_threads([lambda c=c, t=t: c.all_reduce(t) for c, t in pairs]) == [None] * len(communicators)
    return [tensor.item() for tensor in tensors]


def test_one_member_needs_no_rendezvous():
    communicator = connect(RendezvousActor(1), this_member(0), world_size=1, timeout_s=1.0)
    assert isinstance(communicator, SoloCommunicator)
    tensor = torch.arange(3.0)
    communicator.all_reduce(tensor, "mean")
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert communicator.all_gather(tensor).tolist() == [[0.0, 1.0, 2.0]]


def test_members_of_different_versions_get_an_error_with_both():
    for error in connect_all([this_member(0), replace(this_member(1), protocol=PROTOCOL + 6)], "auto"):
        assert isinstance(error, RendezvousError)
        assert f"has version {PROTOCOL} of rayagi's protocol" in str(error)
        assert f"has version {PROTOCOL + 6}; install the same rayagi" in str(error)


def test_a_segment_of_another_version_is_refused_with_both():
    segment = Segment.host(2)
    segment.header[0] += 6
    with pytest.raises(CommunicatorError, match=f"version {PROTOCOL + 6} of .*this process has {PROTOCOL}$"):
        Segment.attach(segment.endpoint, 2, 1)
    segment.close()


def test_members_of_one_host_share_memory():
    found = connect_all([this_member(0), this_member(1)], "auto")
    assert (
        repr(found[1])
        == "rank 1 of 2: ip_only on 1x2 (the only composition without GPUs); ip by SharedMemoryTransport"
    )
    assert sum_of_ranks(found) == [1.0, 1.0]


def as_nobody(rank):
    """A member whose process belongs to another user: it may not open others' memory."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    return this_member(rank)


def mean_and_description(communicator, done):
    tensor = torch.full((5,), float(communicator.rank))
    communicator.all_reduce(tensor, "mean")
    return tensor.tolist(), repr(communicator)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("others", [1, 2])
def test_members_of_two_users_use_tcp(others):
    who = [this_member, *[as_nobody] * others]
    for rank, answer in enumerate(run_group("auto", 1 + others, mean_and_description, who=who)):
        means, described = answer
        assert means == [others / 2] * 5
        assert described.startswith(f"rank {rank} of {1 + others}: ip_only")
        assert described.endswith("ip by TcpTransport")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_shared_memory_of_two_users_is_refused_on_all_members_with_a_hint():
    for failed in run_group("shm", 3, mean_and_description, who=[this_member, this_member, as_nobody]):
        text = str(failed.error)
        assert re.search(
            r"rank 2 \(pid \d+, user 65534\) cannot map /proc/\d+/fd/\d+: .*Permission denied", text
        )
        assert "use transport='tcp' or 'gloo' or 'auto'" in text


def test_members_of_two_hosts_use_tcp():
    found = connect_all([this_member(0), replace(this_member(1), host_id="another")], "auto")
    assert (
        repr(found[0])
        == "rank 0 of 2: ip_only on 2x1x1 (the only composition without GPUs); net by TcpTransport"
    )
    assert sum_of_ranks(found) == [1.0, 1.0]


def test_two_hosts_of_two_share_memory_inside_and_use_tcp_across():
    there = [replace(this_member(rank), host_id="another") for rank in (2, 3)]
    found = connect_all([this_member(0), this_member(1), *there], "auto")
    assert repr(found[0]).endswith("; ip by SharedMemoryTransport, net by TcpTransport")
    assert found[0].schedule.layout == Layout.parse("2x1x2")
    assert sum_of_ranks(found) == [6.0] * 4


def test_the_layout_is_that_of_the_members_in_whatever_order_they_are_numbered():
    gpus = ["GPU-a", "GPU-b", "GPU-b", "GPU-a"]
    members = [this_member(rank, device=gpu) for rank, gpu in enumerate(gpus)]
    found = connect_all(members, "tcp", composition="har")
    assert found[2].schedule.layout.mpl == [[0, 3], [1, 2]]
    assert sum_of_ranks(found) == [6.0] * 4


def test_a_composition_that_does_not_apply_is_refused_with_the_layout():
    for error in connect_all([this_member(0), this_member(1)], "auto", composition="hybrid(1)"):
        assert isinstance(error, CompositionError)
        assert str(error) == "hybrid(1) on 1x2: a ring needs at least two devices in a host"


def test_groups_of_a_new_rendezvous_have_separate_names():
    found = connect_all([this_member(rank) for rank in range(3)], "auto")
    groups = in_threads([lambda c=c: (c.group([0, 2]), c.group([2, 1])) for c in found])
    assert [[group is not None for group in pair] for pair in groups] == [
        [True, False],
        [False, True],
        [True, True],
    ]
    first, second = [groups[0][0], groups[2][0]], [groups[2][1], groups[1][1]]
    assert sum_of_ranks(first) == sum_of_ranks(second) == [1.0, 1.0]
    for communicator in found:
        communicator.close()
    with pytest.raises(CommunicatorError, match="closed"):
        first[0].barrier()


def test_two_groups_of_one_process_do_not_disturb_each_other():
    first = connect_all([this_member(0), this_member(1)], "tcp")
    second = connect_all([this_member(rank) for rank in range(3)], "tcp")
    assert sum_of_ranks(first) == [1.0, 1.0]
    assert sum_of_ranks(second) == [3.0, 3.0, 3.0]
    for communicator in first:
        communicator.close()
    assert sum_of_ranks(second) == [3.0, 3.0, 3.0]


def watching_threads():
    """Threads of failure detectors, including those of groups that other tests left open."""
    return {thread for thread in threading.enumerate() if re.fullmatch(r"liveness-\d+", thread.name)}


def test_a_connection_that_fails_leaves_no_thread():
    before = watching_threads()
    found = connect_all([this_member(0), replace(this_member(1), host_id="another")], "shm")
    assert all(isinstance(error, CommunicatorError) for error in found)
    with pytest.raises(RendezvousError):
        connect(RendezvousActor(2), this_member(0), world_size=2, timeout_s=0.1)
    assert watching_threads() <= before


def test_shared_memory_across_hosts_is_refused_with_a_hint():
    found = connect_all([this_member(0), replace(this_member(1), host_id="another")], "shm")
    for error in found:
        assert isinstance(error, CommunicatorError)
        assert "use transport='tcp' or 'gloo' or 'auto'" in str(error)


@pytest.mark.parametrize("definition", TRANSPORTS, ids=lambda each: each.name)
def test_a_named_transport_is_the_only_candidate_where_it_serves_the_primitive(definition):
    assert callable(import_module(definition.module).connect)
    for primitive in definition.primitives:
        for device in ("cpu", "cuda"):
            found = [each.name for each in candidates(primitive, definition.name, device)]
            if definition.device in (None, device):
                assert found == [definition.name]
            else:
                assert definition.name not in found


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (
            "cpu",
            {
                "ip": ["shm", "tcp", "gloo"],
                "rp": ["tcp", "gloo"],
                "device": ["shm", "tcp", "gloo"],
                "net": ["tcp", "gloo"],
            },
        ),
        (
            "cuda",
            {
                "ip": ["shm", "tcp", "gloo"],
                "rp": ["nccl", "tcp", "gloo"],
                "device": ["device", "shm", "tcp", "gloo"],
                "net": ["tcp", "gloo"],
            },
        ),
    ],
)
def test_candidates_of_each_primitive_are_in_order_of_preference(device, expected):
    for primitive, names in expected.items():
        assert [each.name for each in candidates(primitive, "auto", device)] == names


def test_names_of_transports_are_unique_and_some_serve_each_primitive():
    assert len({each.name for each in TRANSPORTS}) == len(TRANSPORTS)
    assert {primitive for each in TRANSPORTS for primitive in each.primitives} == {*PRIMITIVES}
    assert transport_names() == ("auto", "shm", "tcp", "gloo")


THREADS = TransportDefinition("threads", ("ip",), user_transport.__name__)


@pytest.mark.parametrize("named", ["threads", "auto"])
def test_a_definition_is_all_that_a_new_transport_needs(monkeypatch, named):
    monkeypatch.setattr(registry, "TRANSPORTS", (THREADS, *TRANSPORTS))
    found = connect_all([this_member(0), this_member(1)], named)
    assert repr(found[1]).endswith("ip by InProcessTransport")
    assert sum_of_ranks(found) == [1.0, 1.0]
    user_transport.GROUPS.clear()


def test_a_transport_that_refuses_is_replaced_unless_it_was_named(monkeypatch, caplog):
    monkeypatch.setattr(registry, "TRANSPORTS", (THREADS, *TRANSPORTS))
    members = [this_member(0), this_member(1)]
    found = connect_all(members, "auto", timeout_s=9.0)
    assert repr(found[1]).endswith("ip by SharedMemoryTransport")
    assert sum_of_ranks(found) == [1.0, 1.0]
    assert caplog.messages == ["members reduce by shm, a slower transport: rank 1 does not want to"]
    for error in connect_all(members, "threads", timeout_s=9.0):
        assert isinstance(error, CommunicatorError)
        assert "rank 1 does not want to; use transport='shm' or 'tcp' or 'gloo' or 'auto'" in str(error)
    for error in connect_all([members[0], replace(members[1], host_id="another")], "threads"):
        assert "threads needs one host that all members share" in str(error)


def test_a_transport_that_does_not_exist_is_refused_with_those_that_do():
    for error in connect_all([this_member(0), this_member(1)], "pigeons"):
        assert "there is no transport 'pigeons'; use transport='shm' or 'tcp' or 'gloo' or 'auto'" in str(
            error
        )


def test_a_missing_member_is_named_with_those_that_came():
    with pytest.raises(RendezvousError, match=r"ranks \[1, 2\] of 3 did not come within 0.1 s.*rank 0"):
        connect(RendezvousActor(3), this_member(0), world_size=3, timeout_s=0.1)


def test_rank_0_that_publishes_nothing_is_named():
    rendezvous = RendezvousActor(2)
    rendezvous.register(0, this_member(0))
    with pytest.raises(RendezvousError, match=r"rank 0 .* published no endpoint 'ip 0 1' within 0.1 s"):
        connect(rendezvous, this_member(1), world_size=2, timeout_s=0.1)


def test_a_rank_that_is_taken_is_refused():
    rendezvous = RendezvousActor(2)
    rendezvous.register(0, this_member(1))
    rendezvous.register(0, this_member(1))  # the same member may repeat itself
    with pytest.raises(RendezvousError, match="already taken by rank 1"):
        rendezvous.register(0, replace(this_member(1), pid=1))
    rendezvous.register(1, replace(this_member(1), pid=1))  # the next generation is free


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_out_of_range_is_refused(rank):
    with pytest.raises(RendezvousError, match="ranks are 0 to 1"):
        RendezvousActor(2).register(0, this_member(rank))


def test_an_endpoint_is_published_once_per_key_and_generation():
    rendezvous = RendezvousActor(2)
    assert rendezvous.endpoint(0, "all") is None
    rendezvous.publish(0, "all", "a:1")
    assert rendezvous.endpoint(0, "all") == "a:1"
    with pytest.raises(RendezvousError, match="is a:1 already"):
        rendezvous.publish(0, "all", "b:2")
    rendezvous.publish(0, "node 1", "b:2")
    rendezvous.publish(1, "all", "c:3")
    assert (rendezvous.endpoint(0, "node 1"), rendezvous.endpoint(1, "all")) == ("b:2", "c:3")


def test_members_are_listed_by_rank():
    rendezvous = RendezvousActor(3)
    rendezvous.register(0, this_member(2))
    assert [member.rank for member in rendezvous.register(0, this_member(0)).present] == [0, 2]
    assert [member.rank for member in rendezvous.register(5, this_member(1)).present] == [1]


def test_processes_of_one_host_agree_on_its_identity():
    other = run_python(
        "from collectives.rendezvous import host_identity; print(host_identity())",
        cwd=Path(__file__).resolve().parents[3],
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


@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_of_the_members_that_a_transport_waits_for_only_the_missing_one_is_named(transport):
    """One of four members does not come. Another times out first, which the others see as broken connections."""
    members = [this_member(rank) for rank in range(4)]
    communicators = connect_all(members, transport, timeout_s=10.0)
    communicators[0]._group_transport._timeout_s = 0.3

    def reduce(communicator):
        communicator.all_reduce(torch.ones(100))

    errors = in_threads([lambda c=c: reduce(c) for c in (communicators[rank] for rank in (0, 1, 3))])
    for error in errors:
        assert error.waiting_for == str(communicators[2]._transport_factory._members[2])
        # Over TCP a member knows by itself whose data has not come.
        assert "the others gave up, too" in str(error) or (transport == "tcp" and error is errors[0])
    for communicator in communicators:
        communicator.close()


def test_a_group_that_failed_does_not_end_the_waits_of_the_whole(monkeypatch):
    """Ranks 0 and 1 are a group in which 1 does not come; in the operation of all that follows, 0 and 1 wait for 2."""
    monkeypatch.setattr(transport_factory, "_GAVE_UP_POLL_S", 0.06)
    monkeypatch.setattr(transport_factory, "_LOSS_NOTICE_WAIT_S", 0.0)
    communicators = connect_all([this_member(rank) for rank in range(3)], "tcp")
    groups = in_threads([lambda c=c: c.group((0, 1)) for c in communicators])
    groups[0]._group_transport._timeout_s = 0.1
    with pytest.raises(CommunicatorError):
        groups[0].all_reduce(torch.ones(3))
    asked, really_ask = [], RendezvousActor.endpoint

    def ask(self, generation, key):
        asked.append(key)
        return really_ask(self, generation, key)

    monkeypatch.setattr(RendezvousActor, "endpoint", ask)
    tensors = [torch.ones(3) for _ in communicators]

    def come_late():
        while asked.count("gave up") < 4:
            time.sleep(0.01)
        communicators[2].all_reduce(tensors[2])

    found = in_threads(
        [
            lambda: communicators[0].all_reduce(tensors[0]),
            lambda: communicators[1].all_reduce(tensors[1]),
            come_late,
        ]
    )
    assert found == [None] * 3
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 3] * 3
    for communicator in communicators:
        communicator.close()


def num_memfds():
    """Files in memory that this process has open."""
    gc.collect()
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this very listing
            count += "/memfd:rayagi" in os.readlink(entry)
    return count


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("maps", [False, True], ids=["never maps", "maps and never arrives"])
def test_a_failed_connect_leaves_no_memory_open(rank, maps):
    """One of two members registers and goes no further, or one step: the other's memory is closed when it times out."""
    rendezvous, before = RendezvousActor(2), num_memfds()

    def wires_of(me, failure_detector):
        members = gather_members(rendezvous, failure_detector, world_size=2, generation=0, timeout_s=10)
        settings = GroupContext(
            rendezvous=rendezvous,
            generation=0,
            timeout_s=0.5,
            transport="shm",
            composition="auto",
            device=torch.device("cpu"),
            failure_detector=failure_detector,
        )
        return GroupTransportFactory(settings, members, me, "")

    given_up = threading.Event()

    def goes_on():
        with FailureDetector(this_member(rank)) as failure_detector:
            try:
                wires_of(rank, failure_detector).transport("ip", (0, 1))
            finally:
                given_up.set()

    def stops():
        other = 1 - rank
        with FailureDetector(this_member(other)) as failure_detector:
            found = wires_of(other, failure_detector)
            if maps:
                segment, refusals = map_first_members_segment(found._group_of((0, 1), "ip 0 1"))
                assert refusals == []
                assert given_up.wait(20)
                segment.close()
            assert given_up.wait(20)

    raised, stopped = in_threads([goes_on, stops])
    assert isinstance(raised, CommunicatorError | RendezvousError)
    assert stopped is None
    del raised
    assert num_memfds() == before
