"""Failure detector with real processes, and with members that claim another host, so that TCP is used."""

import ctypes
import errno
import gc
import os
import pickle
import shutil
import signal
import socket
import subprocess
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import pytest

from collectives.errors import CommunicatorError, MemberLostError
from collectives.failure_detector import FailureDetector
from collectives.failure_detector_server import (
    DEATH_NOTICE,
    FailureDetectorServer,
    get_failure_detector_server,
)
from collectives.rendezvous import this_member
from tests.unit.forkserver import context

LIMIT_S = 30.0
"""What is not detected by then never is. `experiments.allreduce.chaos` measures how long it takes."""

CLONE_NEWNET = 0x40000000
CABLE = f"rayagi{os.getpid()}"


def member(rank, host=None):
    me = this_member(rank)
    return me if host is None else replace(me, host_id=host)


def live(pipe, rank, host):
    """A member's process: sends its ``Member``, receives the others, and waits to be ended."""
    with FailureDetector(member(rank, host)) as failure_detector:
        pipe.send(failure_detector.me)
        failure_detector.watch(pipe.recv())
        pipe.send("watching")
        while (asked := pipe.recv()) in ("who?", "fork"):
            if asked == "fork":
                child = os.fork()
                if child == 0:
                    signal.pause()
                pipe.send(child)
            else:
                pipe.send(failure_detector.lost())
    pipe.send("closed")
    pipe.recv()


class Other:
    """A member in a process of its own."""

    def __init__(self, rank, host=None):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=live, args=(theirs, rank, host), daemon=True)
        self.process.start()
        theirs.close()
        self.member = self.ask()

    def ask(self, question=None):
        if question is not None:
            self.pipe.send(question)
        assert self.pipe.poll(30), "no answer within 30 s"
        return self.pipe.recv()

    def kill(self):
        self.process.kill()
        self.process.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.pipe.close()


def live_in_a_namespace(pipe):
    """A member with a network of its own, on which an address appears when the parent has made it."""
    assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    pipe.send(os.getpid())
    address = pipe.recv()
    with FailureDetector(replace(member(1, "another"), address=address)) as failure_detector:
        pipe.send(failure_detector.me)
        pipe.recv()


class Losses:
    """Losses that a failure detector reported, and a wait for them."""

    def __init__(self):
        self.reported, self._arrived = [], threading.Semaphore(0)

    def __call__(self, members):
        self.reported.extend(members)
        self._arrived.release()

    def wait(self):
        assert self._arrived.acquire(timeout=LIMIT_S), f"nothing was detected within {LIMIT_S} s"


class Watching(FailureDetector):
    """Reports each loss at once."""

    def __init__(self, me, losses):
        self._report = losses
        super().__init__(me)

    def _record_loss(self, member, reason):
        known = self.lost()
        super()._record_loss(member, reason)
        if self.lost() != known:
            self._report((member,))


def descriptors():
    """How many of each kind this process holds."""
    gc.collect()
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return Counter(os.readlink(name).split(":")[0] for name in names if os.path.islink(name))


def ip(*arguments, inside=None):
    prefix = [] if inside is None else ["nsenter", "-t", str(inside), "-n"]
    subprocess.run([*prefix, "ip", *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture
def other_network():
    """A process behind a virtual ethernet pair: its pipe and process id; the pair is removed afterwards."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("nsenter")):
        pytest.skip("needs root, ip and nsenter to lay a cable between two network namespaces")
    pipe, theirs = context.Pipe()
    process = context.Process(target=live_in_a_namespace, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        pid = pipe.recv()
        ip("link", "add", CABLE, "type", "veth", "peer", "name", "far", "netns", str(pid))
        ip("addr", "add", "10.213.77.1/30", "dev", CABLE)
        ip("link", "set", CABLE, "up")
        ip("addr", "add", "10.213.77.2/30", "dev", "far", inside=pid)
        ip("link", "set", "far", "up", inside=pid)
        yield pipe, pid
    except (EOFError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a cable between two network namespaces cannot be laid here: {error!r}")
    finally:
        process.kill()
        process.join()


def test_a_silent_host_is_detected(other_network):
    pipe, pid = other_network
    losses = Losses()
    pipe.send("10.213.77.2")
    far = pipe.recv()
    with Watching(replace(member(0), address="10.213.77.1"), losses) as failure_detector:
        failure_detector.watch([failure_detector.me, far])
        failure_detector.check("barrier")
        ip("link", "set", "far", "down", inside=pid)  # its process lives, and nothing says goodbye
        losses.wait()
        with pytest.raises(MemberLostError, match="its host is silent"):
            failure_detector.check("barrier")


@pytest.mark.parametrize("host", [None, "another"], ids=["same host", "another host"])
def test_the_end_of_a_process_is_detected_and_reported(host):
    losses = Losses()
    with Other(1, host) as other, Watching(member(0), losses) as failure_detector:
        failure_detector.watch([failure_detector.me, other.member])
        failure_detector.check("all_reduce")
        assert failure_detector.lost() == ()
        other.kill()
        losses.wait()
        assert losses.reported == [other.member]
        assert failure_detector.lost() == (other.member,)
        with pytest.raises(MemberLostError) as caught:
            failure_detector.check("all_reduce", "step 2 of 3", 0.25)
    assert (caught.value.operation, caught.value.rank, caught.value.step) == ("all_reduce", 0, "step 2 of 3")
    assert caught.value.lost == (other.member,)
    assert str(caught.value) == (
        f"all_reduce on rank 0 failed in step 2 of 3 after 0.2 s waiting for {other.member}: "
        "its process has ended"
    )


@pytest.mark.parametrize("host", [None, "another"], ids=["same host", "another host"])
def test_a_member_that_had_ended_before_is_lost_at_once(host):
    with Other(1, host) as other:
        other.kill()
        with FailureDetector(member(0)) as failure_detector:
            failure_detector.watch([other.member])
            assert failure_detector.lost() == (other.member,)


def test_a_member_of_another_host_can_be_watched_between_its_generations():
    losses = Losses()
    with Other(1, "another") as other, Watching(member(0), losses) as failure_detector:
        other.pipe.send([])
        assert other.ask() == "watching"
        assert other.ask("close") == "closed"
        failure_detector.watch([other.member])
        assert failure_detector.lost() == ()
        other.kill()
        losses.wait()


@pytest.mark.parametrize("host", [None, "another"], ids=["same host", "another host"])
def test_a_member_that_leaves_in_order_is_not_lost(host):
    losses = Losses()
    with Other(1, host) as leaver, Other(2) as dier, Watching(member(0), losses) as failure_detector:
        failure_detector.watch([leaver.member, dier.member])
        leaver.ask([failure_detector.me, dier.member])
        assert leaver.ask("close") == "closed"
        dier.kill()
        losses.wait()
        assert losses.reported == [dier.member]


def test_a_forked_child_keeps_no_connection_of_its_parent():
    losses = Losses()
    with Other(1, "another") as other, Watching(member(0), losses) as failure_detector:
        other.pipe.send([])
        assert other.ask() == "watching"
        failure_detector.watch([other.member])
        child = other.ask("fork")
        try:
            other.process.kill()
            losses.wait()
            assert losses.reported == [other.member]
        finally:
            os.kill(child, signal.SIGKILL)


def fork_while_accepting(pipe):
    here = get_failure_detector_server("127.0.0.1")
    accepting, forked = threading.Event(), threading.Event()

    class Slow:
        """A listener whose ``accept`` is slow."""

        fileno, close = here._listener.fileno, here._listener.close

        def accept(self, accept=here._listener.accept):
            subscriber = accept()
            accepting.set()
            forked.wait(0.5)
            return subscriber

    here._listener = Slow()
    pipe.send(here.port)
    assert accepting.wait(30)
    child = os.fork()
    if child == 0:
        signal.pause()
    forked.set()
    pipe.send(child)
    signal.pause()


def test_a_child_forked_while_a_connection_is_accepted_does_not_keep_it():
    pipe, theirs = context.Pipe()
    process = context.Process(target=fork_while_accepting, args=(theirs,), daemon=True)
    process.start()
    assert pipe.poll(30)
    with socket.create_connection(("127.0.0.1", pipe.recv()), timeout=30) as subscriber:
        assert pipe.poll(30)
        child = pipe.recv()
        try:
            process.kill()
            process.join()
            subscriber.settimeout(LIMIT_S)
            assert subscriber.recv(1) == b""
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.fixture
def another_host():
    """Its two members, a failure detector here, and what that reports."""
    losses = Losses()
    with (
        Other(1, "another") as first,
        Other(2, "another") as second,
        Watching(member(0), losses) as failure_detector,
    ):
        yield first, second, failure_detector, losses


def test_the_first_member_of_another_host_sends_death_notices(another_host):
    first, second, failure_detector, losses = another_host
    everyone = [failure_detector.me, first.member, second.member]
    first.ask(everyone)
    failure_detector.watch(everyone)
    second.kill()
    losses.wait()
    assert losses.reported == [second.member]
    assert first.ask("who?") == (second.member,)


def test_a_new_subscriber_gets_earlier_death_notices(another_host):
    first, second, failure_detector, losses = another_host
    second.kill()
    first.ask([first.member, second.member])
    failure_detector.watch([first.member, second.member])
    losses.wait()
    assert losses.reported == [second.member]


def test_a_new_subscriber_gets_death_notices_of_a_member_that_has_left(another_host):
    """A member may leave a generation while others of it are still connecting to its server."""
    first, second, failure_detector, losses = another_host
    second.kill()
    first.ask([first.member, second.member])
    assert first.ask("who?") == (second.member,)
    assert first.ask("leave") == "closed"
    failure_detector.watch([first.member, second.member])
    losses.wait()
    assert losses.reported == [second.member]


@pytest.mark.parametrize(("remembered_s", "expected"), [(60.0, (7, 8)), (0.0, (8,))])
def test_withdrawn_death_notices_expire_after_a_while(monkeypatch, remembered_s, expected):
    monkeypatch.setattr("collectives.failure_detector_server._REMEMBERED_S", remembered_s)
    server, owner, other = FailureDetectorServer("127.0.0.1"), object(), object()
    server.announce(owner, 7)
    server.withdraw(owner)
    server.announce(other, 8)
    with socket.create_connection(("127.0.0.1", server.port)) as subscriber:
        subscriber.settimeout(LIMIT_S)
        with subscriber.makefile("rb") as heard_file:
            heard = heard_file.read(len(expected) * DEATH_NOTICE.size)
    assert sorted(pid for (pid,) in DEATH_NOTICE.iter_unpack(heard)) == list(expected)


def test_a_stopped_process_is_not_lost():
    losses = Losses()
    with Other(1) as busy, Other(2) as dier, Watching(member(0), losses) as failure_detector:
        failure_detector.watch([busy.member, dier.member])
        os.kill(busy.member.pid, signal.SIGSTOP)
        dier.kill()
        losses.wait()
        assert losses.reported == [dier.member]


def test_closing_leaves_no_thread_and_no_descriptor():
    with ExitStack() as stack:
        others = [stack.enter_context(Other(rank, host)) for rank, host in ((1, None), (2, "x"), (3, "y"))]
        FailureDetector(member(0)).close()  # the server stays open
        before, threads = descriptors(), threading.active_count()
        for _ in range(3):
            failure_detector = FailureDetector(member(0))
            failure_detector.watch([other.member for other in others])
            failure_detector.close()
            failure_detector.close()
        assert descriptors() <= before
        assert threading.active_count() == threads


def test_closing_uses_no_descriptor_that_the_thread_has_closed(monkeypatch):
    """The number may be another file's by then."""
    write, woken = os.eventfd_write, []

    def write_before_and_after_the_thread_had_time(descriptor, value):
        write(descriptor, value)
        failure_detector._thread.join(0.3)
        woken.append(failure_detector._thread.is_alive())
        write(descriptor, value)

    failure_detector = FailureDetector(member(0))
    monkeypatch.setattr(os, "eventfd_write", write_before_and_after_the_thread_had_time)
    failure_detector.close()
    assert woken == [True]
    assert not failure_detector._thread.is_alive()


def test_watching_after_closing_leaks_nothing():
    """Another thread may close the detector while it connects to other hosts."""
    with Other(1) as near, Other(2, "another") as far:
        FailureDetector(member(0)).close()
        before = descriptors()
        failure_detector = FailureDetector(member(0))
        failure_detector.close()
        failure_detector.watch([near.member, far.member])
        assert descriptors() <= before
        assert failure_detector.lost() == ()


def test_an_address_of_another_host_is_refused():
    with pytest.raises(OSError, match="assign"):
        FailureDetector(replace(member(0), address="192.0.2.1"))


def test_a_loss_survives_pickling():
    error = MemberLostError("barrier", 0, (member(1), member(2)), 1.5, "step 1 of 2", "the host fell silent")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.lost, again.step, again.reason) == (
        str(error),
        error.lost,
        error.step,
        error.reason,
    )


def test_what_this_process_lacks_is_no_loss_of_others(monkeypatch):
    detector = FailureDetector(this_member(0))
    others = [
        replace(this_member(rank), host_id="another host", pid=99_000 + rank, port=1) for rank in (1, 2)
    ]
    asked = []

    def lacks(address, timeout):
        asked.append(address)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", lacks)
        for _ in range(2):  # it is tried again
            with pytest.raises(CommunicatorError, match=r"cannot watch it: Too many open files\. Raise"):
                detector.watch(others)
    assert len(asked) == 2
    assert detector.lost() == ()
    detector.close()
