"""A member that is killed at any point of any operation: the others raise within two seconds and keep nothing."""

import os
import signal
import subprocess
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from shm_members import run_members
from test_shm_transport import held

from collectives.errors import CommunicatorError, MemberLostError
from collectives.rendezvous import this_member
from collectives.transports.shm import SharedMemoryTransport
from collectives.transports.shm.memory import Segment

OPERATIONS = ("barrier", "all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast")
LARGE = 400_000
NOTICED_WITHIN_S = 2.0


@dataclass(frozen=True)
class LoseAMember:
    """All repeat an operation until one of them dies, after so many seconds: somewhere within an operation."""

    operation: str
    registered: bool
    after_s: float
    victim: int = 1

    def __call__(self, transport):
        tensor = transport.buffer(LARGE, torch.float32) if self.registered else torch.ones(LARGE)
        arguments = () if self.operation == "barrier" else (tensor,)
        call = getattr(transport, self.operation)
        call(*arguments)
        if transport.rank == self.victim:
            threading.Timer(self.after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                call(*arguments)
        except CommunicatorError as error:
            found = error.with_traceback(None)  # its frames hold the tensor and the call
        del tensor, arguments, call
        return found, held()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "registered", [pytest.param(True, marks=pytest.mark.slow), False], ids=["registered", "private"]
)
def test_survivors_of_any_operation_raise_in_time_and_keep_nothing(operation, registered):
    lose_and_check(operation, registered, without_compiler=())


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "private"])
def test_so_do_those_without_a_compiler(registered):
    lose_and_check("all_reduce", registered, without_compiler=(2,))


def lose_and_check(operation, registered, without_compiler):
    after_s = 0.001 * (1 + OPERATIONS.index(operation))
    task = LoseAMember(operation, registered, after_s)
    answers = run_members(3, task, timeout_s=60.0, without_compiler=without_compiler)
    assert answers[1] is None
    for rank in (0, 2):
        error, (descriptors, mappings) = answers[rank]
        assert error.operation == operation
        assert "rank 1" in error.waiting_for or "left the group" in error.detail
        assert error.waited_s < NOTICED_WITHIN_S
        assert (descriptors, mappings) == ([], 0)


def test_the_death_of_rank_0_which_made_the_memory_is_noticed_too():
    answers = run_members(2, LoseAMember("all_reduce", True, 0.002, victim=0), timeout_s=60.0)
    error, left = answers[1]
    assert "its process has ended" in str(error)
    assert left == ([], 0)


def ask_for_a_buffer_alone(transport):
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        transport.buffer(1000, torch.float32)
    except CommunicatorError as error:
        found = error.with_traceback(None)
    return found, held()


def test_a_member_that_dies_before_a_buffer_is_made_is_named():
    error, left = run_members(2, ask_for_a_buffer_alone, timeout_s=60.0)[0]
    assert "rank 1" in error.waiting_for
    assert error.operation == "buffer"
    assert left == ([], 0)


def test_a_member_that_died_before_it_came_is_named_and_nothing_is_kept():
    ended = subprocess.Popen(["true"])
    ended.wait()
    members = [this_member(0), replace(this_member(1), pid=ended.pid)]
    before = held()
    segment = Segment.host(2)
    with pytest.raises(CommunicatorError, match=r"connect on rank 0 .*its process has ended"):
        SharedMemoryTransport(segment, members, 0, timeout_s=30.0)
    assert held() == before


def test_a_member_that_left_because_of_a_loss_on_another_host_is_not_waited_for():
    """It is alive, and stored no goodbye here: only the whole group's failure detector knows why it does not come."""
    members = [this_member(0), replace(this_member(1), pid=os.getppid())]
    elsewhere = replace(this_member(2), host_id="another")
    lost = threading.Event()

    def check(waited_s):
        if lost.is_set():
            raise MemberLostError("connect", 0, (elsewhere,), 0.0, "", reason="its process has ended")

    before = held()
    segment = Segment.host(2)
    timer = threading.Timer(0.2, lost.set)  # while it waits
    timer.start()
    with pytest.raises(MemberLostError) as found:
        SharedMemoryTransport(segment, members, 0, timeout_s=600.0, check=check)
    timer.join()
    assert found.value.lost == (elsewhere,)
    del found
    assert held() == before
