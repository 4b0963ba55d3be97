"""A Tune trial on a cluster that has changed since the trial reserved its bundles."""

from types import SimpleNamespace

import pytest
import ray

from placement.errors import ReservationError
from rayagi import PPO, PPOConfig, algorithm


def trial(**gmi):
    """An algorithm that is not set up yet."""
    made = PPO.__new__(PPO)
    made.config = PPOConfig().environment("CartPole-v1").gmi(num_envs=4, **gmi)
    made._trial = None
    return made


def reserve(monkeypatch, *bundles):
    group = None if not bundles else SimpleNamespace(bundle_specs=list(bundles))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(algorithm, "get_current_placement_group", lambda: group)


def numbers(made):
    gmi = made._as_reserved(made.config.to_run_spec()).gmi
    return gmi.num_gmis, gmi.threads_per_gmi


@pytest.mark.parametrize(
    ("bundles", "expected"),
    [
        ([{"CPU": 1.0}, {"CPU": 1.0}], (2, 1)),
        ([{"CPU": 3.0}, {"CPU": 3.0}], (2, 3)),
        ([{"CPU": 3.0}, {"CPU": 1.0}], (2, None)),
        ([{"CPU": 2.0, "GPU": 1.0}], (1, None)),
        ([], (None, None)),  # no trial
    ],
)
def test_a_trial_has_the_gmis_that_it_reserved_if_their_number_is_the_machines(
    monkeypatch, bundles, expected
):
    reserve(monkeypatch, *bundles)
    assert numbers(trial()) == expected


def test_the_bundle_of_the_trials_own_process_is_no_gmi(monkeypatch):
    reserve(monkeypatch, {"CPU": 1.0}, {"CPU": 2.0})
    made = trial()
    made.config.resources(num_cpus_for_main_process=1)
    assert numbers(made) == (1, 2)


@pytest.mark.parametrize("gmi", [{"num_gmis": 3}, {"slices": [1, 1, 2]}])
def test_given_numbers_stay(monkeypatch, gmi):
    reserve(monkeypatch, {"CPU": 1.0})
    assert numbers(trial(**gmi))[0] == gmi.get("num_gmis")


def test_a_session_that_does_not_open_is_the_error_and_not_the_algorithms_name(monkeypatch):
    """Ray asks an actor whose constructor has raised for its name."""

    class Refusing:
        def __enter__(self):
            raise ReservationError("2 bundles", "1 bundle", "wait", 1.0)

    monkeypatch.setattr(algorithm, "session_of", lambda *spec, **options: Refusing())
    made = trial()
    with pytest.raises(ReservationError):
        made.setup(made.config)
    assert repr(made) == "rayagi.PPO"
