"""The resource-performance model against the papers' own arithmetic and against numbers computed by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.templates import (
    ASYNCHRONOUS,
    SERVING,
    SYNCHRONOUS,
    TEMPLATES,
    UnitCosts,
    choose,
    communication_bytes,
    dominant_resource,
    estimate,
    explain,
    instance_resource,
    unit_costs_from_dict,
)

SERVE = {template.name: template for template in SERVING}
TRAIN = {template.name: template for template in SYNCHRONOUS}


def costs(**changes) -> UnitCosts:
    """GMI-DRL §3.1.1: R_s = 10 R_a = 5 R_t, T_s = 6 T_a = 3 T_t, alpha 0.2, beta 0.3."""
    base = UnitCosts(
        simulate_s=6.0, act_s=1.0, train_s=2.0,
        simulator_share=0.5, agent_share=0.05, trainer_share=0.1, resource="compute",
        state_bytes=100.0, action_bytes=20.0, reward_bytes=4.0, model_bytes=1000.0,
        bandwidth=1.0, alpha=0.2, beta=0.3, num_steps=1, num_envs=1,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_serving_comes_out_as_the_paper_says():
    # COM / BW = 2 (T_s + T_a) = 14 s with COM = 2 * 100 + 20 + 4 = 224
    measured = costs(bandwidth=224 / 14)
    apart, together = estimate(SERVE["mp_dp"], measured), estimate(SERVE["dp_only"], measured)
    # R: (6 * 0.5 + 1 * 0.2 * 0.05) / 7 = 3.01 / 7 = 0.43 against 0.5
    assert apart.resource == pytest.approx(0.43)
    assert together.resource == pytest.approx(0.5)
    assert together.resource / apart.resource - 1 == pytest.approx(0.163, abs=5e-4)
    # 3 times shorter at 0.86 of the instances
    assert together.steps_per_s / apart.steps_per_s == pytest.approx(2.58, abs=5e-3)
    assert (apart.limit, together.limit) == ("communication", "compute")


def test_training_comes_out_as_the_paper_says():
    # COM / BW = 7 (T_s + T_a + T_t) = 63 s with COM = 100 + 20 + 4 + 1000 = 1124 on one GMI
    measured = costs(bandwidth=1124 / 63)
    apart, together = estimate(TRAIN["ea_t"], measured), estimate(TRAIN["dp_only"], measured)
    assert together.resource / apart.resource - 1 == pytest.approx(0.466, abs=5e-4)
    assert together.steps_per_s / apart.steps_per_s == pytest.approx(5.46, abs=5e-3)
    assert choose(measured)[0].template.name == "dp_only"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # m N = 3 * 2 = 6 steps; trainers among four GMIs: 2 * 3 * 1000 / 4 = 1500
        ("dp_only", 1500),
        ("ea_t", 6 * 124 + 1000 + 1500),
        ("e_at", 6 * 224 + 1500),
        ("dp_mp", 6 * 224 + 6 * 124 + 1000 + 1500),
    ],
)
def test_bytes_of_a_synchronous_iteration(name, expected):
    assert communication_bytes(TRAIN[name], costs(num_steps=3, num_envs=2), num_gmis=4) == expected


def test_dp_mp_serving_gives_every_simulator_a_whole_agent():
    # by time: 6 s at 0.5 of a device, then 1 s at 0.05
    assert instance_resource(SERVE["dp_mp"], costs()) == pytest.approx(3.05 / 7)


def test_decoupled_holds_both_sides_and_waits_for_the_slower():
    (decoupled,) = ASYNCHRONOUS
    found = estimate(decoupled, costs(bandwidth=1e9))
    assert found.resource == pytest.approx(0.5 + 0.3 * 0.1)
    assert found.compute_s == 7.0
    slow = estimate(decoupled, costs(bandwidth=1124 / 70))  # moving takes 70 s, ten times as long as serving
    assert slow.limit == "communication"
    assert slow.steps_per_s == pytest.approx(found.steps_per_s / 10)


def test_a_fast_link_and_a_small_agent_make_sharing_win():
    # Without communication only R counts: 1 instance of dp_only, or 9 / 6.14 of the ones that share.
    first, *others = choose(costs(bandwidth=1e12))
    assert first.template.name in ("dp_mp", "e_at", "ea_t")
    assert others[-1].template.name == "dp_only"


def test_the_dominant_resource_is_the_larger_share():
    assert dominant_resource(compute_share=0.5, memory_share=0.4) == "compute"
    assert dominant_resource(compute_share=0.5, memory_share=0.5) == "compute"
    assert dominant_resource(compute_share=0.1, memory_share=0.4) == "memory"


def test_the_explanation_is_in_numbers():
    measured = costs(bandwidth=1124 / 63)
    text = explain(choose(measured), measured)
    assert "dp_only over ea_t: 5.46x = 0.68 (instances that fit) x 8.00 (time of an iteration)." in text


def test_unit_costs_survive_json_and_refuse_nonsense():
    data = dataclasses.asdict(costs())
    assert unit_costs_from_dict(data) == costs()
    with pytest.raises(ValueError, match="beta = 0"):
        unit_costs_from_dict(data | {"beta": 0})
    with pytest.raises(ValueError, match="alpha"):
        unit_costs_from_dict({name: value for name, value in data.items() if name != "alpha"})


positive = st.floats(min_value=1e-3, max_value=1e3)


@given(
    mode=st.sampled_from(sorted(TEMPLATES)),
    devices=st.integers(1, 1024),
    gmis=st.integers(1, 64),
    bandwidth=positive,
)
def test_the_choice_is_the_fastest_and_devices_scale_it(mode, devices, gmis, bandwidth):
    measured = costs(bandwidth=bandwidth)
    found = choose(measured, mode, num_devices=devices, num_gmis=gmis)
    speeds = [each.steps_per_s for each in found]
    assert speeds == sorted(speeds, reverse=True)
    one = estimate(found[0].template, measured, num_gmis=gmis)
    assert speeds[0] == pytest.approx(devices * one.steps_per_s)
