"""Which share of unstable simulations ends a run."""

import pytest

from rayagi.run.errors import UnstableSimulationsError
from rayagi.run.measures import UnstableShare


def add(share, env_steps, unstable):
    share.add({"env_steps": env_steps, "faults_unstable": unstable})


def test_as_many_as_allowed_are_no_error():
    share = UnstableShare(0.01)
    for _ in range(3):
        add(share, 10_000.0, 100.0)


def test_one_more_is_an_error_that_names_counts_setting_and_remedy():
    share = UnstableShare(0.01)
    with pytest.raises(
        UnstableSimulationsError,
        match=r"in 101 of the last 10,000 environment steps \(1\.01%; env\.max_unstable_share allows 1\.00%\).*timestep",
    ):
        add(share, 10_000.0, 101.0)


def test_few_steps_are_only_accumulated():
    share = UnstableShare(0.01)
    for _ in range(9):
        add(share, 1_000.0, 12.0)
    with pytest.raises(UnstableSimulationsError, match=r"120 of the last 10,000"):
        add(share, 1_000.0, 12.0)


def test_a_new_window_starts_from_zero():
    share = UnstableShare(0.01)
    add(share, 10_000.0, 0.0)
    with pytest.raises(UnstableSimulationsError, match=r"150 of the last 10,000"):
        add(share, 10_000.0, 150.0)


def test_simulators_that_count_nothing():
    UnstableShare(0.0).add({"env_steps": 20_000.0})
