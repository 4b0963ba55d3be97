"""Fixtures of every test."""

import pytest

from tests.signals import default_signals as default_signals_block


@pytest.fixture
def default_signals():
    """Ctrl-C and a hangup reach this test and what it starts, though the tests run in the background or under nohup."""
    with default_signals_block():
        yield
