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

QUICK = ProbeSettings(
    relative_error=0.5,
    shortest_s=0.5,
    time_s=2.0,
    loose_error=0.5,
    most_s=5.0,
    iteration_s=1.0,
    hang_s=10.0,
)


@pytest.fixture(scope="module", autouse=True)
def ray_of_this_machine():
    with connected():
        yield


def measured(spec, gmis, num_envs):
    with SessionProbe(spec, local_machine(), QUICK) as probe:
        return probe(gmis, num_envs)


def misbehaving(how):
    spec = preset("CartPole-v1")
    env = EnvSpec(id="tests.fakes.misbehaving:Misbehaving-v0", kwargs={"how": how})
    return replace(spec, env=env, ppo=replace(spec.ppo, rollout_length=8, num_minibatches=1))


def test_a_candidate_is_measured_with_all_its_gmis():
    gmis = min(2, local_machine().num_cores)
    found = measured(preset("CartPole-v1"), gmis, 8)
    assert isinstance(found, Measured)
    # The mean of the phases is an iteration of 8 environments and 64 steps: they account for most of its time.
    iteration_s = 8 * 64 / found.steps_per_s
    assert set(found.phases_s) == set(PHASES)
    assert 0.5 * iteration_s < sum(found.phases_s.values()) <= 1.1 * iteration_s
    assert 50 * 2**20 < found.memory_bytes < 4 * 2**30
    assert found.duration_s > 0


def test_gmis_stay_for_another_number_of_environments():
    gmis = min(2, local_machine().num_cores)
    with SessionProbe(preset("CartPole-v1"), local_machine(), QUICK) as probe:
        found = []
        pids = set()
        for num_envs in (8, 64, 1024):
            found.append(probe(gmis, num_envs))
            pids |= {landing.pid for landing in probe._session.landings}
    assert len(pids) == gmis
    assert all(isinstance(each, Measured) for each in found), found
    # 64 steps of four 4-byte numbers in a rollout, and what 65,536 samples take on their way through two networks
    assert found[2].memory_bytes > found[0].memory_bytes
    assert found[2].steps_per_s > found[0].steps_per_s


def test_a_candidate_that_is_killed_is_an_answer_and_the_next_one_runs():
    found = measured(misbehaving("killed"), 1, 2)
    assert isinstance(found, Failed)
    assert found.kind == "crashed"
    assert "was lost" in found.reason
    assert isinstance(measured(misbehaving("not at all"), 1, 2), Measured)


def test_a_candidate_that_hangs_is_given_up():
    began = time.monotonic()
    found = measured(misbehaving("hangs"), 1, 2)
    assert isinstance(found, Failed)
    assert found.kind == "hung"
    assert "within 10 s" in found.reason
    assert time.monotonic() - began >= 10


def test_a_candidate_with_more_gmis_than_cores_is_an_answer():
    cores = len(os.sched_getaffinity(0))
    found = measured(preset("CartPole-v1"), cores + 1, 8)
    assert isinstance(found, Failed)
    assert f"num_gmis={cores + 1}" in found.reason
