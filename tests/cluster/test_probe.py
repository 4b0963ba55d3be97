"""The probe on real slices: what it measures, and that it outlives candidates that do not."""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import replace
from functools import partial

import pytest

from placement.inventory import local_machine
from placement.search import TrialFailure, TrialMeasurement
from rayagi.config.presets import preset
from rayagi.config.spec import EnvSpec
from rayagi.coordinator.probe import PHASES, ProbeSettings, SessionProbe
from rayagi.coordinator.template_probe import by_turns, trained_steps_per_s

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_of_this_machine")]

QUICK = ProbeSettings(
    relative_error=0.5,
    min_duration_s=0.5,
    loose_after_s=2.0,
    loose_error=0.5,
    max_duration_s=5.0,
    iteration_s=1.0,
    max_iteration_s=math.inf,
    hang_s=10.0,
)


def measured(spec, gmis, num_envs):
    with SessionProbe(spec, local_machine(), QUICK) as probe:
        return probe(gmis, num_envs)


def misbehaving(how):
    spec = preset("CartPole-v1")
    env = EnvSpec(id="tests.fakes.misbehaving:Misbehaving-v0", kwargs={"how": how})
    return replace(spec, env=env, learning=replace(spec.learning, rollout_length=8, num_minibatches=1))


def test_all_gmis_of_a_candidate_are_measured_and_stay_for_the_next():
    gmis = min(2, local_machine().num_cores)
    found, pids = [], set()
    with SessionProbe(preset("CartPole-v1"), local_machine(), QUICK) as probe:
        for num_envs in (8, 1024):
            found.append(probe(gmis, num_envs))
            pids |= {worker.pid for worker in probe._session.workers}
    assert len(pids) == gmis
    few, many = found
    assert isinstance(few, TrialMeasurement)
    assert isinstance(many, TrialMeasurement)
    # The mean of the phases is an iteration of 8 environments and 64 steps: they account for most of its time.
    iteration_s = 8 * 64 / few.steps_per_s
    assert set(few.phases_s) == set(PHASES)
    assert 0.5 * iteration_s < sum(few.phases_s.values()) <= 1.1 * iteration_s
    assert 50 * 2**20 < few.memory_bytes < many.memory_bytes < 4 * 2**30
    assert min(few.duration_s, many.duration_s) > 0
    assert min(few.steps_per_s, many.steps_per_s) > 0


@pytest.mark.slow
def test_a_candidate_that_is_killed_is_an_answer_and_the_next_one_runs():
    found = measured(misbehaving("killed"), 1, 2)
    assert isinstance(found, TrialFailure)
    assert found.kind == "crashed"
    assert "was lost" in found.reason
    assert isinstance(measured(misbehaving("not at all"), 1, 2), TrialMeasurement)


@pytest.mark.slow
def test_a_turn_of_a_template_trains_and_one_whose_gmi_is_killed_leaves_it_out():
    sac = preset("Pendulum-v1", "sac")
    sac = replace(sac, gmi=replace(sac.gmi, template="auto", num_gmis=2, num_envs=4))
    assert trained_steps_per_s(sac, "decoupled") > 0
    killed = misbehaving("killed")
    killed = replace(killed, gmi=replace(killed.gmi, template="auto", num_gmis=1, num_envs=2))
    found, is_final = by_turns(["dp_only"], partial(trained_steps_per_s, killed))
    assert found.turns == {}
    assert found.failures["dp_only"].startswith("crashed (GmiLostError: ")
    assert not is_final


@pytest.mark.slow
def test_a_candidate_that_hangs_is_given_up():
    began = time.monotonic()
    found = measured(misbehaving("hangs"), 1, 2)
    assert isinstance(found, TrialFailure)
    assert found.kind == "hung"
    assert "within 10 s" in found.reason
    assert re.search(r"its program was at .*/tests/fakes/misbehaving\.py:\d+ in step$", found.reason)
    assert time.monotonic() - began >= 10


def test_a_candidate_with_more_gmis_than_cores_is_an_answer():
    cores = len(os.sched_getaffinity(0))
    found = measured(preset("CartPole-v1"), cores + 1, 8)
    assert isinstance(found, TrialFailure)
    assert f"num_gmis={cores + 1}" in found.reason
