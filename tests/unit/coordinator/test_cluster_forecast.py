"""Forecasts computed by hand, and invariants for any cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import PlanError
from placement.templates import UnitCosts
from rayagi.coordinator.cluster_forecast import best_forecast, cluster_of, forecast, sizes_up_to, table

COSTS = UnitCosts(
    simulate_s=1.0, act_s=0.1, train_s=0.3,
    simulator_share=0.5, agent_share=0.5, trainer_share=0.5, resource="compute",
    state_bytes=100.0, action_bytes=20.0, reward_bytes=6.0, model_bytes=1e6,
    bandwidth=1e9, alpha=0.5, beta=0.5, num_steps=10, num_envs=100,
)  # fmt: skip


def test_one_gmi_on_one_gpu_with_its_cores():
    # 14 cores simulate in 1 / 14 s; networks between 0.4 s and nothing; nobody to reduce with; 1000 steps.
    found = forecast(COSTS, cluster_of(1, 1, "H100"), 1, updates=32, measured_sms=None)
    assert found.reduce_s == {"host": 0.0, "links": 0.0, "network": 0.0}
    assert found.low_steps_per_s == pytest.approx(1000 / (1 / 14 + 0.4))
    assert found.high_steps_per_s == pytest.approx(14000)
    assert found.binding == "simulation on the cores"


def test_reduction_by_link():
    # 16 nodes x 8 GPUs x 2 GMIs, 10 updates of 1 MB: host 2 * 1e6 / (2 * 1e9) = 1 ms; links 2 * 7 / 8 * 1e6 / 450e9;
    # network 2 * 15 / 16 * 1e6 / 50e9 = 37.5 us and 30 hops of 10 us.
    found = forecast(COSTS, cluster_of(16, 8, "H100"), 2, updates=10, measured_sms=None)
    assert found.reduce_s["host"] == pytest.approx(10e-3)
    assert found.reduce_s["links"] == pytest.approx(10 * 1.75e6 / 450e9)
    assert found.reduce_s["network"] == pytest.approx(10 * (37.5e-6 + 300e-6))


def test_a_measured_gpu_gives_one_number_scaled_by_its_sms():
    # 54 of 108 SMs' worth each with two GMIs: 0.4 * 66 * 2 / 132 = 0.4
    found = forecast(COSTS, cluster_of(1, 1, "H100"), 2, updates=1, measured_sms=66)
    assert found.networks_s == pytest.approx(0.4)
    assert found.low_steps_per_s == found.high_steps_per_s


def test_slow_reduction_binds():
    slow = UnitCosts(**{name: getattr(COSTS, name) for name in COSTS.__slots__} | {"bandwidth": 1e6})
    assert (
        forecast(slow, cluster_of(1, 1, "H100"), 2, updates=32, measured_sms=None).binding
        == "reduction through the host"
    )
    assert best_forecast(slow, cluster_of(1, 1, "H100"), updates=32, measured_sms=None).gmis_per_gpu == 1


def test_sizes_double_up_to_the_cluster():
    assert [each.nodes for each in sizes_up_to(cluster_of(12, 8, "A100-40"))] == [1, 2, 4, 8, 12]
    assert [each.nodes for each in sizes_up_to(cluster_of(1, 8, "A100-40"))] == [1]


def test_what_cannot_be_forecast_is_said():
    with pytest.raises(PlanError, match="V100, A100-40"):
        cluster_of(1, 1, "H1000")
    with pytest.raises(PlanError, match="1024"):
        cluster_of(129, 8, "H100")


@given(nodes=st.integers(1, 128), gpus=st.integers(1, 8), updates=st.integers(1, 64))
def test_more_nodes_are_faster_and_never_better_than_linear(nodes, gpus, updates):
    found = [
        best_forecast(COSTS, cluster, updates=updates, measured_sms=None)
        for cluster in sizes_up_to(cluster_of(nodes, gpus, "H100"))
    ]
    for each in found:
        assert 0 < each.low_steps_per_s <= each.high_steps_per_s
        assert each.low_steps_per_s <= found[0].low_steps_per_s * each.cluster.nodes * (1 + 1e-9)
    assert len(table(found).splitlines()) == len(found) + 1
