"""A process that has no descriptor left gets an error, and what it could not receive once it has."""

import os
import resource
from contextlib import suppress

import pytest

from collectives.experience.descriptors import DescriptorInbox, send_descriptor


@pytest.fixture
def full():
    """Takes every descriptor of this process but ``free``; gives some back when asked to, and all at the end."""
    taken, limits = [], resource.getrlimit(resource.RLIMIT_NOFILE)

    def fill(free):
        most = max(map(int, os.listdir("/proc/self/fd"))) + 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        give_back(free)
        return give_back

    def give_back(free):
        for _ in range(free):
            os.close(taken.pop())

    yield fill
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("free", [0, 1])  # for the connection none, or one, and none for what is sent
def test_a_descriptor_that_does_not_fit_is_an_error_and_comes_later(full, free):
    inbox = DescriptorInbox()
    with open("/dev/null") as file:
        send_descriptor(inbox.token, file.fileno())
        give_back = full(free)
        with pytest.raises(OSError, match="Too many open files"):
            list(inbox.receive())
        give_back(2)
        (received,) = inbox.receive()
        assert os.path.sameopenfile(received, file.fileno())
    os.close(received)
    inbox.close()


def test_a_descriptor_is_received():
    inbox = DescriptorInbox()
    with open("/dev/null") as file:
        send_descriptor(inbox.token, file.fileno())
        (received,) = inbox.receive()
        assert os.path.sameopenfile(received, file.fileno())
    os.close(received)
    inbox.close()
