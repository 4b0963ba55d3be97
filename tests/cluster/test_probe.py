"""The probe on real slices: what it measures, and that it outlives candidates that do not."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from placement.inventory import local_machine
from placement.search import Failed, Measured
from rayagi.config.presets import preset
from rayagi.config.spec import EnvSpec
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.probe import PHASES, ProbeSettings, SessionProbe

pytestmark = pytest.mark.cluster

QUICK = ProbeSettings(relative_error=0.5, time_s=2.0, loose_error=0.5, most_s=5.0, hang_s=10.0)


@pytest.fixture(scope="module", autouse=True)
def ray_of_this_machine():
    with connected():
        yield


def misbehaving(how):
    spec = preset("CartPole-v1")
    env = EnvSpec(id="tests.fakes.misbehaving:Misbehaving-v0", kwargs={"how": how})
    return replace(spec, env=env, ppo=replace(spec.ppo, rollout_length=8, num_minibatches=1))


def test_a_candidate_is_measured_with_all_its_gmis():
    machine = local_machine()
    gmis = min(2, machine.num_cores)
    found = SessionProbe(preset("CartPole-v1"), machine, QUICK)(gmis, 8)
    assert isinstance(found, Measured)
    # The mean of the phases is an iteration of 8 environments and 64 steps: they account for most of its time.
    iteration_s = 8 * 64 / found.steps_per_s
    assert set(found.phases_s) == set(PHASES)
    assert 0.5 * iteration_s < sum(found.phases_s.values()) <= 1.1 * iteration_s
    assert 50 * 2**20 < found.memory_bytes < 4 * 2**30
    assert found.duration_s > 0


def test_a_candidate_that_is_killed_is_an_answer_and_the_next_one_runs():
    found = SessionProbe(misbehaving("killed"), local_machine(), QUICK)(1, 2)
    assert isinstance(found, Failed)
    assert found.kind == "crashed"
    assert "was lost" in found.reason
    assert isinstance(SessionProbe(misbehaving("not at all"), local_machine(), QUICK)(1, 2), Measured)


@pytest.mark.slow
def test_a_candidate_that_hangs_is_given_up():
    began = time.monotonic()
    found = SessionProbe(misbehaving("hangs"), local_machine(), QUICK)(1, 2)
    assert isinstance(found, Failed)
    assert found.kind == "hung"
    assert "within 10 s" in found.reason
    assert time.monotonic() - began >= 10


def test_a_candidate_with_more_gmis_than_cores_is_an_answer():
    cores = len(os.sched_getaffinity(0))
    found = SessionProbe(preset("CartPole-v1"), local_machine(), QUICK)(cores + 1, 8)
    assert isinstance(found, Failed)
    assert f"num_gmis={cores + 1}" in found.reason
