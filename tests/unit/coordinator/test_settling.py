"""When a measurement has warmed up and how well it is known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.inventory import local_machine
from rayagi.config.presets import preset
from rayagi.coordinator.probe import SessionProbe
from rayagi.coordinator.settling import Settled, settle


def test_the_first_value_never_counts():
    found = settle([9.0, 2.0, 2.0, 2.0])
    assert (found.warm_up, found.num_kept, found.mean_s, found.relative_error) == (1, 3, 2.0, 0.0)


def test_a_slow_start_is_left_out():
    # MSER: dropping 3 leaves no deviation at all; dropping fewer leaves some.
    found = settle([9.0, 5.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert (found.warm_up, found.mean_s) == (3, 2.0)


def test_no_more_than_half_is_left_out():
    assert settle([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).warm_up <= 3


def test_the_error_is_student_s():
    # 1 and 3: mean 2, variance 2, standard error sqrt(2 / 2) = 1; t(1) = 12.706, relative 6.353
    found = settle([7.0, 1.0, 3.0])
    assert found.relative_error == pytest.approx(6.353)
    assert settle([7.0, 1.0]).relative_error == math.inf


def test_one_value_is_too_few():
    with pytest.raises(ValueError, match="at least 2"):
        settle([1.0])


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=60))
def test_of_any_series(seconds):
    found = settle(seconds)
    assert found.warm_up + found.num_kept == len(seconds)
    assert 1 <= found.warm_up <= max(1, len(seconds) // 2)
    kept = seconds[found.warm_up :]
    assert min(kept) * (1 - 1e-9) <= found.mean_s <= max(kept) * (1 + 1e-9)


def settled(kept, mean_s, error):
    return Settled(warm_up=1, num_kept=kept, mean_s=mean_s, relative_error=error)


@pytest.mark.parametrize(
    ("found", "elapsed_s", "enough"),
    [
        (settled(4, 0.5, 0.03), 2.5, True),  # tight: four iterations, two seconds, 3 %
        (settled(3, 1.0, 0.01), 4.0, False),  # too few to be sure of it so early
        (settled(8, 0.1, 0.01), 1.0, False),  # too short
        (settled(8, 0.5, 0.08), 9.0, False),
        (settled(8, 0.5, 0.08), 11.0, True),  # after ten seconds 10 % will do
        (settled(8, 0.5, 0.5), 11.0, False),
        (settled(2, 9.0, 0.5), 31.0, True),  # after thirty whatever there is
        (settled(1, 20.0, math.inf), 31.0, False),
    ],
)
def test_when_a_measurement_will_do(found, elapsed_s, enough):
    probe = SessionProbe(preset("Ant-v5"), local_machine())
    assert probe._will_do(found, elapsed_s) is enough
