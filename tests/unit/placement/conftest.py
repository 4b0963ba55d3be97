"""Tests of placement leave no lock of a ledger open."""

import os

import pytest

from placement import ledger


@pytest.fixture(autouse=True)
def _no_locks_left():
    """A ledger that keeps steps holds its lock as long as this process lives."""
    yield
    for path in list(ledger._locks):
        os.close(ledger._locks.pop(path))
