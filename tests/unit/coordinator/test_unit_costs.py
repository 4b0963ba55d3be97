"""Unit costs: arithmetic by hand, and consistency of a real profile."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from actors.gmi import GmiContext, GmiIdentity
from collectives.solo import SoloCommunicator
from placement.types import Slice
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.unit_costs import CostProgram, CostReadings, Timing, unit_costs
from tests.fakes.point import ACTION_DIM, OBS_DIM, make_point

GIB = 2**30


def reading(**changes):
    base = CostReadings(
        simulate=Timing(wall_s=0.6, busy=0.99), act=Timing(wall_s=0.1, busy=0.97), train=Timing(wall_s=0.2, busy=1.9),
        act_shared_s=0.2, train_own_s=0.16, train_shared_s=0.32, copy_bytes_per_s=5e9,
        memory_bytes={"simulator": GIB, "agent": GIB // 2, "trainer": GIB // 2},
        sizes={"state_bytes": 12.0, "action_bytes": 8.0, "reward_bytes": 6.0, "model_bytes": 4096.0},
        num_steps=4, num_envs=8,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_shares_are_of_cores_that_are_kept_busy():
    found = unit_costs([reading()], cores=4, memory_bytes=16 * GIB, on_gpu=False)
    # one core, one core, two cores of four; memory 1 / 16 at most
    assert found.resource == "compute"
    assert (found.simulator_share, found.agent_share, found.trainer_share) == (0.25, 0.25, 0.5)


def test_alpha_and_beta_are_what_a_fourfold_batch_costs_each():
    found = unit_costs([reading()], cores=4, memory_bytes=16 * GIB, on_gpu=False)
    # 0.2 s for four simulators against 4 x 0.1 s; 0.32 against 4 x 0.16
    assert (found.alpha, found.beta) == (pytest.approx(0.5), pytest.approx(0.5))


def test_memory_is_the_dominant_resource_where_it_is_scarcer():
    found = unit_costs([reading()], cores=4, memory_bytes=int(1.25 * GIB), on_gpu=False)
    assert found.resource == "memory"
    assert (found.simulator_share, found.agent_share) == (pytest.approx(0.8), pytest.approx(0.4))


def test_the_first_round_warms_up_and_the_median_of_the_others_counts():
    slow = reading(simulate=Timing(wall_s=9.0, busy=1.0))
    rounds = [slow, *(reading(simulate=Timing(wall_s=wall, busy=1.0)) for wall in (0.5, 0.7, 0.6))]
    assert unit_costs(rounds, cores=2, memory_bytes=GIB * 8, on_gpu=False).simulate_s == pytest.approx(0.6)


def test_a_gpu_s_utilisation_is_its_share():
    found = unit_costs(
        [reading(train=Timing(wall_s=0.2, busy=0.4))], cores=64, memory_bytes=80 * GIB, on_gpu=True
    )
    assert found.trainer_share == pytest.approx(0.4)


def test_no_readings_are_refused():
    with pytest.raises(ValueError, match="no readings"):
        unit_costs([], cores=1, memory_bytes=GIB, on_gpu=False)


def profiled(network):
    """The readings of three iterations."""
    spec = RunSpec(
        env=EnvSpec(id="Point"),
        gmi=GmiSpec(num_envs=8),
        network=network,
        learning=PPOSpec(rollout_length=4, num_epochs=2, num_minibatches=2),
    )
    identity = GmiIdentity(index=0, num_gmis=1, slice=Slice(node="n", backend="cpu"), roles=(), task="Point")
    context = GmiContext(identity=identity, communicator=SoloCommunicator(), device=torch.device("cpu"))
    program = CostProgram(spec, make_point, context)
    for _ in range(3):
        program.iterate()
    readings = program.state_dict()["shared"]["measured"]
    program.close()
    return readings


def test_a_real_profile_knows_the_sizes_and_times_the_phases():
    readings = profiled(NetworkSpec(hidden=(8,)))
    found = unit_costs(readings, cores=2, memory_bytes=8 * GIB, on_gpu=False)
    # float32 observations and actions; a float32 reward and two flags
    assert (found.state_bytes, found.action_bytes, found.reward_bytes) == (4 * OBS_DIM, 4 * ACTION_DIM, 6)
    # policy and value 3-8-2 and 3-8-1, two log standard deviations: 32 + 18 + 32 + 9 + 2 = 93, in a row of 512
    assert found.model_bytes == 4 * 512
    assert (found.num_steps, found.num_envs) == (4, 8)
    assert 0 < found.simulate_s < 5
    assert found.bandwidth > 1e7
    assert min(found.alpha, found.beta) > 0


@pytest.mark.parametrize("shared", [False, True])
def test_a_recurrent_model_is_profiled_by_whole_sequences(shared):
    readings = profiled(NetworkSpec(hidden=(8,), core="gru", core_size=4, shared=shared))
    found = unit_costs(readings, cores=2, memory_bytes=8 * GIB, on_gpu=False)
    assert min(found.alpha, found.beta, found.train_s) > 0
