"""Fixtures of the algorithms' tests."""

import threading
from contextlib import contextmanager

import pytest

from rayagi.algorithms import gradient_updater


@pytest.fixture
def watched(monkeypatch):
    """Gives a function that makes a communicator record of each sum whether it is timed as one."""
    thread, timed_operation = threading.local(), gradient_updater.timed_operation

    @contextmanager
    def timed(name):
        with timed_operation(name) as timing:
            thread.name = name
            yield timing
            thread.name = None

    def watch(communicator, found):
        all_reduce = communicator.all_reduce

        def recorded(*given):
            found.append(getattr(thread, "name", None))
            return all_reduce(*given)

        communicator.all_reduce = recorded
        return communicator

    monkeypatch.setattr(gradient_updater, "timed_operation", timed)
    return watch
