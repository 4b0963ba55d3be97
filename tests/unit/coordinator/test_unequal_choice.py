"""Unequal sizes: proposed where cores would idle, chosen by the model, kept only if every turn confirms them."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest

from placement.errors import PlanError
from placement.inventory import load_machine
from placement.search import TrialFailure, TrialMeasurement
from rayagi.config.errors import ConfigError
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.coordinator import search_store, template_probe, unequal_choice
from rayagi.coordinator.auto import resolve_auto
from rayagi.coordinator.model_validation import ModelValidation
from tests.unit.coordinator.test_template_choice import COSTS, on_cores

CPU16, CPU2 = (load_machine(f"tests/data/machines/cpu{cores}.json") for cores in (16, 2))
GOOD = ModelValidation(
    date="d",
    cpu="A",
    cores=16,
    kinds=("ppo",),
    cases=20,
    pairs=100,
    right=95,
    median_error=0.06,
    p90_error=0.15,
)
SLOW_PHYSICS = dataclasses.replace(COSTS, rollout=on_cores(0.0, 1e-2), step_spread=0.0)


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch, tmp_path):
    """Searches are cached in the test's own folder."""
    monkeypatch.setattr("rayagi.coordinator.search_store.default_folder", lambda: tmp_path)


def spec_of(num_gmis=None, **gmi):
    spec = preset("Ant-v5")
    return dataclasses.replace(
        spec, gmi=dataclasses.replace(spec.gmi, num_gmis=num_gmis, slices="auto", **gmi)
    )


@pytest.fixture
def speeds(monkeypatch):
    """Begins another process: sets the steps per second of a GMI by turn, equal and unequal; counts the turns."""
    measured: list[str] = []

    def set_speeds(equal, unequal, validation=GOOD, costs=SLOW_PHYSICS):
        left = {"equal": list(equal), "unequal": list(unequal)}

        class FakeProbe(nullcontext):
            def __init__(self, spec, machine):
                super().__init__(self)
                self.turn = "unequal" if spec.gmi.slices else "equal"

            def measure(self, gmis, num_envs, settings):
                measured.append(self.turn)
                found = left[self.turn].pop(0)
                return (
                    TrialFailure(kind=found, reason="no")
                    if isinstance(found, str)
                    else TrialMeasurement(steps_per_s=found, memory_bytes=1)
                )

        monkeypatch.setattr(search_store, "_measured_here", set())
        monkeypatch.setattr(unequal_choice, "SessionProbe", FakeProbe)
        monkeypatch.setattr(template_probe, "connected", nullcontext)
        monkeypatch.setattr(unequal_choice, "load", lambda: validation)
        monkeypatch.setattr(unequal_choice, "cached_unit_costs", lambda spec, machine, **options: costs)
        return measured

    return set_speeds


def test_sizes_use_the_cores_that_equal_gmis_leave_idle():
    assert unequal_choice.proposed_sizes(spec_of(3), CPU16) == (6, 5, 5)
    assert unequal_choice.proposed_sizes(spec_of(5), CPU16) == (4, 3, 3, 3, 3)
    assert unequal_choice.proposed_sizes(spec_of(), CPU16) is None  # eight GMIs of two cores
    assert unequal_choice.proposed_sizes(spec_of(), CPU2) is None
    assert unequal_choice.proposed_sizes(spec_of(3, threads_per_gmi=1), CPU16) is None
    gpus = load_machine("tests/data/machines/a100_80x8.json")
    assert unequal_choice.proposed_sizes(spec_of(3), gpus) is None


def test_sizes_that_every_turn_confirms_are_kept_and_cached(speeds):
    measured = speeds(equal=[100, 104], unequal=[105, 110])
    lines = []
    found = resolve_auto(spec_of(3), CPU16, log=lines.append)
    assert found.gmi.slices == (6, 5, 5)
    assert measured == ["equal", "unequal", "unequal", "equal"]
    # Physics of 32 environments on 5 cores with equal GMIs; of 36 on 6, and 30 on 5, with unequal ones: 6.4 over 6.
    assert any(line.startswith("Sizes 6+5+5: predicted 1.0") for line in lines)
    assert lines[-1] == "6+5+5: measured 315 and 330 steps/s unequal, 300 and 312 equal."
    again = resolve_auto(spec_of(3), CPU16, measuring="nothing")
    assert again.gmi.slices == (6, 5, 5)
    assert len(measured) == 4


@pytest.mark.parametrize("unequal", [[103, 120], [90, 90], ["crashed"], ["out of memory"]])
def test_one_turn_that_is_not_faster_keeps_equal_gmis(speeds, unequal):
    speeds(equal=[100, 104], unequal=unequal)
    lines = []
    assert resolve_auto(spec_of(3), CPU16, log=lines.append).gmi.slices is None
    assert lines[-1].startswith("Equal GMIs: ")


@pytest.mark.parametrize(("kind", "turns_again"), [("crashed", 4), ("hung", 4), ("out of memory", 0)])
def test_a_turn_that_failed_by_chance_is_measured_again_by_the_next_run(speeds, kind, turns_again):
    measured = speeds(equal=[100], unequal=[kind])
    resolve_auto(spec_of(3), CPU16)
    assert len(measured) == 2
    resolve_auto(spec_of(3), CPU16)  # the same process
    speeds([], [])
    resolve_auto(spec_of(3), CPU16, measuring="missing")  # a trial
    assert len(measured) == 2
    measured = speeds(equal=[100, 104], unequal=[105, 110])
    measured.clear()
    found = resolve_auto(spec_of(3), CPU16)
    assert len(measured) == turns_again
    assert found.gmi.slices == ((6, 5, 5) if turns_again else None)


def test_what_the_model_forecasts_without_a_validation_is_measured_too(speeds):
    speeds(equal=[100, 104], unequal=[105, 110], validation=None)
    lines = []
    assert resolve_auto(spec_of(3), CPU16, log=lines.append).gmi.slices == (6, 5, 5)
    assert any("not validated" in line for line in lines)


def test_what_the_model_does_not_prefer_is_not_measured(speeds):
    measured, lines = speeds([], []), []
    no_physics = dataclasses.replace(COSTS, rollout=on_cores(1.0, 0.0))
    speeds([], [], costs=no_physics)
    assert resolve_auto(spec_of(3), CPU16, log=lines.append).gmi.slices is None
    assert lines[-1] == "Equal GMIs: the predicted gain is too small to be measured."
    assert measured == []


def test_a_plan_does_not_measure(speeds):
    speeds([], [])
    with pytest.raises(PlanError, match="Start the run, which compares them"):
        resolve_auto(spec_of(3), CPU16, measuring="nothing")


def test_settings_that_contradict_it_are_refused():
    assert checked(spec_of(3)).gmi.slices == "auto"
    for gmi in ({"num_envs": "auto"}, {"template": "ea_t"}, {"gmis_per_gpu": 2}):
        with pytest.raises(ConfigError, match=r"gmi\.slices"):
            checked(spec_of(**gmi))
    with pytest.raises(ValueError, match="resolve_auto"):
        _ = spec_of().gmi.sizes
