"""What a wait for a Gloo operation makes of the operation's end."""

from datetime import timedelta

import pytest

from collectives.rendezvous import this_member
from collectives.transports.gloo import GlooStore, GlooTransport


class EndsAfterTheInterval:
    """As torch's Work: a wait with a limit raises when it is over, and the operation may end before anyone asks again."""

    def __init__(self, error: str | None = None) -> None:
        self.error, self.waits = error, 0

    def wait(self, limit: timedelta | None = None) -> bool:
        self.waits += 1
        if limit is not None:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return True


@pytest.fixture
def alone():
    members = (this_member(0),)
    transport = GlooTransport(GlooStore.host(members, 10.0), members, 0, 10.0)
    yield transport
    transport.close()


def test_an_operation_that_ends_just_after_the_interval_did_not_fail(alone):
    alone._run("all_reduce", lambda group: [EndsAfterTheInterval()])
    alone.barrier()  # and the transport still works


def test_one_that_failed_meanwhile_says_why(alone):
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        alone._run("all_reduce", lambda group: [EndsAfterTheInterval("connection closed by peer")])
