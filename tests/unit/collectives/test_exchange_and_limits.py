import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from members import Failed, run_group

from collectives.limits import call_with_timeout, poll_until_done
from collectives.objects import exchange


class Exchange:
    def __init__(self, messages):
        self.messages = messages

    def __call__(self, communicator, done):
        return exchange(communicator, self.messages[communicator.rank])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=40), min_size=2, max_size=4))
def test_every_member_gets_every_message_by_rank(messages):
    assert run_group("inprocess", len(messages), Exchange(messages)) == [messages] * len(messages)


def test_messages_pass_between_processes():
    messages = [b"", bytes(range(256)) * 9]
    assert run_group("shm", 2, Exchange(messages)) == [messages] * 2


def test_an_answer_within_the_limit_is_returned_and_an_error_raised():
    assert call_with_timeout(5.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(5.0, lambda: 1 // 0)


def test_a_call_that_hangs_does_not_hang_the_caller():
    end = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        call_with_timeout(0.1, lambda: end.wait(60))
    assert not end.is_set()
    end.set()


def test_completion_is_awaited_until_it_is_there():
    answers = iter([False] * 300 + [True])
    poll_until_done(lambda: next(answers), 60.0, lambda: None)
    assert next(answers, None) is None


def test_what_never_completes_ends_at_the_limit():
    with pytest.raises(TimeoutError, match=r"not done within 0\.1 s"):
        poll_until_done(lambda: False, 0.1, lambda: None)


def test_a_check_ends_the_wait():
    def lost():
        raise ConnectionError("rank 1 is lost")

    with pytest.raises(ConnectionError):
        poll_until_done(lambda: False, 60.0, lost)


def test_a_broken_group_is_not_waited_for():
    def leave(communicator, done):
        if communicator.rank == 1:
            communicator.close()
            return
        exchange(communicator, b"here")

    assert isinstance(run_group("inprocess", 2, leave)[0], Failed)
