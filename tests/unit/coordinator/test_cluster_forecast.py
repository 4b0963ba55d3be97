"""Forecasts computed by hand, and invariants for any cluster."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import PlanError
from rayagi.coordinator.cluster_forecast import (
    CONTEXT_BYTES,
    cluster_of,
    forecast,
    forecasts,
    most_gmis_per_gpu,
    refuse_gpu_engine,
    sizes_up_to,
    table,
)
from rayagi.coordinator.throughput_model import RoleCost, UnitCosts
from tests.unit.coordinator.test_throughput_model import on_cores

COSTS = UnitCosts(
    rollout=on_cores(0.0, 1.1e-3), simulate=on_cores(0.0, 1e-3), act=on_cores(0.01, 0.0), update=on_cores(0.3, 0.0),
    complete=on_cores(0.0, 0.0),
    message_s=1e-4, bandwidth=1e9, reduce_s=1e-3, step_spread=0.0, rollout_spread=0.0,
    state_bytes=100.0, action_bytes=20.0, reward_bytes=6.0, model_bytes=1e6, gmi_bytes=1e9, env_bytes=1e6,
    num_steps=10, num_updates=10, num_envs=(100, 400),
)  # fmt: skip
GPU = dataclasses.replace(
    COSTS,
    act=RoleCost(device="gpu", fixed_s=0.01, per_env_s=1e-5),
    update=RoleCost(device="gpu", fixed_s=0.3, per_env_s=2e-3),
)


def test_one_gmi_on_one_gpu_with_its_cores():
    # A GMI's cores are divided once: 100 environments x 10 steps x 1 ms on 14 cores; networks on them, or for nothing.
    found = forecast(COSTS, cluster_of(1, 1, "H100"), 1, 100, measured_sms=None)
    assert found.low_steps_per_s == pytest.approx(1000 / (1.1 / 14 + 0.3))
    assert found.high_steps_per_s == pytest.approx(14000)
    assert found.bound_by == "simulate"
    # Two GMIs with 7 cores each simulate twice as many environments, in twice the time: cores limit them together.
    two = forecast(COSTS, cluster_of(1, 1, "H100"), 2, 100, measured_sms=None)
    assert two.high_steps_per_s == pytest.approx(2000 / (1 / 7 + 0.01))


def test_a_reduction_has_bytes_and_hops_by_link():
    # 16 nodes x 8 GPUs x 2 GMIs, 10 reductions of 1 MB: 1 ms between two GMIs as measured; links 2 * 7 / 8 * 1e6 / 450e9
    # and 14 hops of 10 us; network 2 * 15 / 16 * 1e6 / 50e9 = 37.5 us and 30 hops.
    found = forecast(COSTS, cluster_of(16, 8, "H100"), 2, 100, measured_sms=None)
    assert found.parts_s["reduction in the host"] == pytest.approx(10e-3)
    assert found.parts_s["GPU links"] == pytest.approx(10 * (1.75e6 / 450e9 + 140e-6))
    assert found.parts_s["network"] == pytest.approx(10 * (37.5e-6 + 300e-6))


def test_gmis_fill_a_measured_gpu_until_it_saturates():
    """300 ms of a small update, and 2 ms per environment once the GPU is full, on 132 SMs as measured."""
    cluster = cluster_of(1, 1, "H100")
    updates = [forecast(GPU, cluster, cut, 100, measured_sms=132).parts_s["update"] for cut in (1, 2, 4)]
    # 100 x 2 ms = 200 ms of the whole GPU, 400 of a half, 800 of a quarter.
    assert updates == pytest.approx([0.3, 0.4, 0.8])
    found = forecast(GPU, cluster, 2, 100, measured_sms=66)
    # Measured on half as many SMs, the same work takes half the time here.
    assert found.parts_s["update"] == pytest.approx(0.3)
    assert found.low_steps_per_s == found.high_steps_per_s


def test_memory_limits_the_environments_and_the_gmis():
    # 1 GB and 1 MB for each of 30,000 environments, and a context: 31.5 GB of a V100's 34.4
    cluster = cluster_of(1, 1, "V100", 64)
    assert most_gmis_per_gpu(GPU, cluster, 30_000, measured_sms=80) == 1
    assert most_gmis_per_gpu(GPU, cluster, 10_000, measured_sms=80) == 2
    with pytest.raises(PlanError, match="Use fewer environments"):
        most_gmis_per_gpu(GPU, cluster, 40_000, measured_sms=80)
    # Without a GPU measured, only what the networks certainly hold; then the cores limit.
    assert most_gmis_per_gpu(COSTS, cluster, 100, measured_sms=None) == 10
    assert most_gmis_per_gpu(COSTS, cluster_of(1, 2, "V100", 6), 100, measured_sms=None) == 3
    assert CONTEXT_BYTES > 0


def test_an_engine_on_the_gpu_is_not_forecast_from_cores():
    with pytest.raises(PlanError, match="its speed there is not known"):
        refuse_gpu_engine("Ant", "mujoco_warp")
    refuse_gpu_engine("Ant", "mujoco_cpu")


def test_sizes_double_up_to_the_cluster_and_then_gmis_are_added():
    assert [each.nodes for each in sizes_up_to(cluster_of(12, 8, "A100-40"))] == [1, 2, 4, 8, 12]
    assert [each.nodes for each in sizes_up_to(cluster_of(1, 8, "A100-40"))] == [1]
    found = forecasts(COSTS, cluster_of(4, 1, "A100-40", 3), 100, measured_sms=None)
    assert [(each.cluster.nodes, each.gmis_per_gpu) for each in found] == [
        (1, 1),
        (2, 1),
        (4, 1),
        (4, 2),
        (4, 3),
    ]
    assert len(table(found).splitlines()) == len(found) + 1


def test_what_cannot_be_forecast_is_said():
    with pytest.raises(PlanError, match="V100, A100-40"):
        cluster_of(1, 1, "H1000")
    with pytest.raises(PlanError, match="1024"):
        cluster_of(129, 8, "H100")


@given(nodes=st.integers(1, 128), gpus=st.integers(1, 8), cut=st.integers(1, 4))
def test_more_nodes_are_faster_and_never_better_than_linear(nodes, gpus, cut):
    found = [
        forecast(COSTS, cluster, cut, 100, measured_sms=None)
        for cluster in sizes_up_to(cluster_of(nodes, gpus, "H100"))
    ]
    for each in found:
        assert 0 < each.low_steps_per_s <= each.high_steps_per_s
        assert each.low_steps_per_s <= found[0].low_steps_per_s * each.cluster.nodes * (1 + 1e-9)
