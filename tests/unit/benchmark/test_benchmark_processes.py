"""Objects in processes that are asked all at once, with real processes."""

import os
import signal
from functools import partial

import pytest

from collectives.errors import LayoutError
from collectives.layout import Layout
from rayagi.benchmark.measure import MemberEndedError
from rayagi.benchmark.processes import MemberProcesses


class Counter:
    def __init__(self, first):
        if first is None:
            raise LayoutError("none", "nothing to count from")
        self.value = first

    def add(self, number):
        if number < 0:
            raise LayoutError(str(number), "counts up only")
        self.value += number
        return self.value

    def pid(self):
        return os.getpid()

    def end_if(self, value):
        if self.value == value:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self):
        pass


@pytest.fixture(scope="module")
def counters():
    with MemberProcesses([partial(Counter, 0), partial(Counter, 10)]) as processes:
        yield processes


def test_every_object_lives_in_a_process_of_its_own_and_keeps_its_state(counters):
    assert counters.ask("add", 1) == [1, 11]
    assert counters.ask("add", 1) == [2, 12]
    assert len({os.getpid(), *counters.ask("pid")}) == 3


def test_what_a_method_raises_comes_back_as_itself_and_the_processes_go_on(counters):
    before = counters.ask("add", 0)
    with pytest.raises(LayoutError, match="counts up only"):
        counters.ask("add", -1)
    assert counters.ask("add", 0) == before


def test_what_a_maker_raises_is_raised_at_the_start():
    with pytest.raises(LayoutError, match="nothing to count from"):
        MemberProcesses([partial(Counter, 0), partial(Counter, None)])


def test_a_process_that_is_killed_is_named_and_close_leaves_none_behind():
    with MemberProcesses([partial(Counter, 0), partial(Counter, 1)]) as processes:
        pids = processes.ask("pid")
        with pytest.raises(MemberEndedError, match=r"rank 1 .* exit code -9"):
            processes.ask("end_if", 1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_members_of_a_layout_meet_in_the_processes(counters):
    # The rendezvous is a process too, and it takes as many members as there are processes.
    assert counters.rendezvous.endpoint(0, "nothing published") is None
    assert Layout.parse("2x1").world_size == len(counters.ask("pid"))
