"""Unit costs: the fit by hand, and real profiles of two GMIs in threads and of one."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from functools import partial

import pytest
import torch

from actors.gmi import GmiContext, GmiIdentity
from actors.rendezvous_actor import RendezvousActor
from placement.types import Slice
from rayagi import profiler
from rayagi.algorithms.appo import APPO
from rayagi.algorithms.ppo import PPO, PPOSpec
from rayagi.algorithms.trpo import TRPO
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.throughput_model import Worker
from rayagi.coordinator.unit_costs import (
    EXCHANGES,
    REDUCTIONS,
    CostProgram,
    CostReadings,
    SizeReading,
    unit_costs,
)
from rayagi.profiler.trace import Category, read_profile
from tests.fakes.point import ACTION_DIM, OBS_DIM, make_point
from tests.threads import in_threads, unfailed
from tests.unit.collectives.thread_group import ThreadGroup

ONE_CORE = Worker(roles=(), cores=1)


def size(**changes):
    base = SizeReading(rollout_s=0.0, simulate_s=0.0, act_s=0.0, update_s=0.0, step_spread=0.1)
    return dataclasses.replace(base, **changes)


def reading(small, large, **changes):
    base = CostReadings(
        small=small, large=large, reduce_s=0.003, num_gmis=2, cores=1, num_envs=(8, 32), simulates_on_gpu=False,
        memory_bytes=(1000, 1640),
        sizes={"state_bytes": 10.0, "action_bytes": 4.0, "reward_bytes": 6.0, "model_bytes": 4096.0},
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


# A core: 0.2 + 0.05 N seconds; two cores: 0.2 + 0.0375 N.
SHARED = reading(size(update_s=0.6, exchange_s=0.013), size(update_s=1.8, exchange_s=0.022))
ALONE = reading(size(update_s=0.5), size(update_s=1.4), num_gmis=1, cores=2)


def fitted(shared=(SHARED,), alone=(ALONE,), **options):
    return unit_costs(shared, alone, **{"num_steps": 4, "num_updates": 8, "on_gpu": False} | options)


def test_two_sizes_and_two_widths_give_a_role_s_cost():
    found = fitted().update
    assert (found.device, found.fixed_s, found.per_env_s) == (
        "cores",
        pytest.approx(0.2),
        pytest.approx(0.05),
    )
    assert (found.wide_fixed_s, found.wide_per_env_s) == (pytest.approx(0.2), pytest.approx(0.0375))
    assert found.wide_cores == 2


def test_cores_divide_a_role_at_most_by_their_number():
    found = fitted(alone=(reading(size(update_s=0.1), size(update_s=0.2), num_gmis=1, cores=2),)).update
    assert (found.wide_fixed_s, found.wide_per_env_s) == (pytest.approx(0.1), pytest.approx(0.025))
    many = Worker(roles=(), cores=1000)
    assert 0 <= found.seconds(8, many) < 0.001


def test_an_exchange_is_two_messages_and_their_bytes():
    found = fitted()
    # 13 and 22 ms for 8 and 32 rows of 30 bytes: 0.375 ms a row, and 10 ms for two messages.
    assert found.bandwidth == pytest.approx(30 / 0.375e-3)
    assert found.message_s == pytest.approx(5e-3)
    assert found.reduce_s == pytest.approx(0.003)


def test_reductions_and_exchanges_of_four_gmis_are_scaled_to_two():
    four = reading(
        size(update_s=0.6, exchange_s=0.029), size(update_s=1.8, exchange_s=0.056), num_gmis=4, reduce_s=0.003
    )
    found = fitted(shared=(four,))
    # 3 x 24 more rows in 27 ms; four messages in 20 ms. 2 (n - 1) / n: 1.5 for four GMIs, 1 for two.
    assert found.bandwidth == pytest.approx(30 / 0.375e-3)
    assert found.message_s == pytest.approx(5e-3)
    assert found.reduce_s == pytest.approx(0.002)


def test_memory_per_environment_is_what_the_second_size_added():
    found = fitted()
    # 640 bytes for 32 environments; the first size had 8.
    assert (found.env_bytes, found.gmi_bytes) == (20.0, 840.0)


def test_a_gpu_s_small_batch_is_latency_and_its_large_one_fills_it():
    found = fitted(alone=(dataclasses.replace(ALONE, simulates_on_gpu=True),), on_gpu=True)
    assert (found.update.device, found.simulate.device) == ("gpu", "gpu")
    assert (found.update.fixed_s, found.update.per_env_s) == (0.5, pytest.approx(1.4 / 32))
    on_host = fitted(on_gpu=True)
    assert (on_host.simulate.device, on_host.act.device) == ("cores", "gpu")


def test_the_first_round_warms_up_and_the_median_of_the_others_counts():
    slow = reading(size(update_s=9.0), size(update_s=90.0))
    rounds = [slow, *(reading(size(update_s=each), size(update_s=3 * each)) for each in (0.5, 0.7, 0.6))]
    assert fitted(shared=rounds).update.seconds(8, ONE_CORE) == pytest.approx(0.6)


def test_the_spread_of_rollouts_is_the_root_of_the_mean_variance():
    rounds = [
        reading(size(rollout_spread=9.0), size(rollout_spread=9.0)),  # warms up
        reading(size(rollout_spread=0.1), size(rollout_spread=0.1)),
        reading(size(rollout_spread=0.3), size(rollout_spread=0.5)),
    ]
    assert fitted(shared=rounds).rollout_spread == pytest.approx(
        0.3
    )  # (0.01 + 0.01 + 0.09 + 0.25) / 4 = 0.3^2


def test_noise_gives_no_negative_costs():
    backwards = reading(size(update_s=0.6, exchange_s=0.02), size(update_s=0.5, exchange_s=0.01))
    found = fitted(shared=(backwards,))
    assert found.update.per_env_s == 0.0
    assert found.update.fixed_s == pytest.approx(0.6)
    assert found.message_s > 0
    assert math.isfinite(found.bandwidth)


def profiled(spec, num_gmis):
    """The readings of GMI 0 of so many, after three iterations."""
    group, directory = ThreadGroup.on_one_device(num_gmis, timeout_s=30.0), RendezvousActor(num_gmis)

    def member(index):
        identity = GmiIdentity(
            index=index, num_gmis=num_gmis, slice=Slice(node="n", backend="cpu"), roles=(), task="Point"
        )
        communicator = group.communicator(index)
        program = CostProgram(
            spec, make_point, GmiContext(identity, communicator, torch.device("cpu"), directory)
        )
        for _ in range(3):
            program.iterate()
        measured = program.state_dict()["shared"]["measured"]
        program.close()
        return measured

    return unfailed(in_threads([partial(member, index) for index in range(num_gmis)]))[0]


def spec_of(algorithm, network):
    learning = (
        PPOSpec(rollout_length=4, num_epochs=2, num_minibatches=2)
        if algorithm is PPO
        else dataclasses.replace(algorithm.settings(**algorithm.preset), rollout_length=4)
    )
    return RunSpec(
        algorithm=algorithm.name, env=EnvSpec(id="Point"), gmi=GmiSpec(num_envs=8), network=network, learning=learning
    )  # fmt: skip


@pytest.mark.parametrize("algorithm", [PPO, TRPO, APPO], ids=lambda each: each.name)
def test_a_real_profile_knows_the_sizes_and_times_the_phases(algorithm):
    spec = spec_of(algorithm, NetworkSpec(hidden=(8,)))
    found = fitted(profiled(spec, 2), profiled(spec, 1))
    # float32 observations and actions; a float32 reward and two flags
    assert (found.state_bytes, found.action_bytes, found.reward_bytes) == (4 * OBS_DIM, 4 * ACTION_DIM, 6)
    # policy and value 3-8-2 and 3-8-1, two log standard deviations: 32 + 18 + 32 + 9 + 2 = 93
    assert found.model_bytes == 4 * 93
    assert found.num_envs == (8, 32)
    assert min(found.message_s, found.reduce_s, found.bandwidth, found.rollout_spread) > 0
    for role in (found.rollout, found.simulate, found.act, found.update):
        assert role.seconds(8, ONE_CORE) > 0


def test_a_run_that_is_profiled_measures_unit_costs_and_records_them(tmp_path):
    spec = spec_of(PPO, NetworkSpec(hidden=(8,)))
    with profiler.profile(tmp_path / "p", intercept=False):
        readings = profiled(spec, 2)
    (process,) = read_profile(tmp_path / "p").processes
    recorded: Counter = Counter()
    for thread in process.threads:
        for event in thread.events[thread.events["category"] == Category.OPERATION]:
            recorded[process.name_of(int(event["name"]))] += int(event["end"] - event["start"])
    measured = {
        name: sum(getattr(size, f"{name}_s") for each in readings for size in (each.small, each.large))
        for name in ("simulate", "act", "complete")
    } | {
        "exchange": EXCHANGES * sum(each.small.exchange_s + each.large.exchange_s for each in readings),
        "reduce": REDUCTIONS * sum(each.reduce_s for each in readings),
        "learn": sum(each.small.update_s + each.large.update_s for each in readings),
    }
    for name, seconds in measured.items():
        assert 0 < seconds <= recorded[name] / 1e9, name


@pytest.mark.parametrize("shared", [False, True])
def test_a_recurrent_model_is_profiled_by_whole_sequences(shared):
    spec = spec_of(PPO, NetworkSpec(hidden=(8,), core="gru", core_size=4, shared=shared))
    found = fitted(profiled(spec, 2), profiled(spec, 1))
    assert found.update.seconds(8, ONE_CORE) > 0
