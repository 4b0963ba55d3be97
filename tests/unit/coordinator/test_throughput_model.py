"""The throughput model: phases by hand for every template, and the papers' own results in rank."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import pytest

from placement.inventory import load_machine
from placement.plan import make_plan
from rayagi.coordinator.throughput_model import (
    ModelledPlan,
    RoleCost,
    UnitCosts,
    Worker,
    layout_of,
    predict,
    slowest,
    unit_costs_from_dict,
)

ALL = ("simulator", "agent", "trainer")


def on_cores(fixed_s: float, per_env_s: float, parallel: float = 1.0) -> RoleCost:
    """Two cores divide this part of ``per_env_s``."""
    return RoleCost(
        device="cores", fixed_s=fixed_s, per_env_s=per_env_s,
        wide_fixed_s=fixed_s, wide_per_env_s=per_env_s * (1 - parallel / 2), wide_cores=2,
    )  # fmt: skip


COSTS = UnitCosts(
    rollout=on_cores(0.0, 0.01), simulate=on_cores(0.0, 0.01), act=on_cores(0.1, 0.0), update=on_cores(1.0, 0.05, 0.5),
    complete=on_cores(0.0, 0.0),
    message_s=0.02, bandwidth=1e9, reduce_s=0.1, step_spread=0.0, rollout_spread=0.0,
    state_bytes=100.0, action_bytes=20.0, reward_bytes=6.0, model_bytes=1e6, gmi_bytes=1e9, env_bytes=1e6,
    num_steps=10, num_updates=4, num_envs=(16, 64),
)  # fmt: skip
"""A step of 20 environments takes 0.2 s on a core, acting 0.1 s, an update of 20 2 s on a core and 1.75 s on two."""


def planned(template: str, num_gmis: int, *, serving: bool = False) -> ModelledPlan:
    machine = load_machine("tests/data/machines/cpu2.json")
    return layout_of(make_plan(machine, template=template, serving=serving, num_gmis=num_gmis, num_envs=20))


def test_a_batch_takes_a_fixed_time_and_a_part_that_cores_divide():
    role = on_cores(1.0, 0.05, 0.5)
    # 1 + 20 x 0.05 (1 - 0.5 + 0.5 / cores): 2 and 1.75 as measured on one and two, 1.625 on four.
    assert role.seconds(20, Worker(roles=ALL, cores=1)) == pytest.approx(2.0)
    assert role.seconds(20, Worker(roles=ALL, cores=2)) == pytest.approx(1.75)
    assert role.seconds(20, Worker(roles=ALL, cores=4)) == pytest.approx(1.625)
    one_core = RoleCost(device="cores", fixed_s=1.0, per_env_s=0.05)
    assert one_core.seconds(20, Worker(roles=ALL, cores=4)) == 2.0


def test_threads_may_cost_more_than_they_gain():
    role = RoleCost(
        device="cores", fixed_s=0.1, per_env_s=0.01, wide_fixed_s=0.4, wide_per_env_s=0.005, wide_cores=2
    )
    one, two = (Worker(roles=ALL, cores=cores) for cores in (1, 2))
    assert [role.seconds(10, each) for each in (one, two)] == pytest.approx([0.2, 0.45])
    assert [role.seconds(100, each) for each in (one, two)] == pytest.approx([1.1, 0.9])


def test_collectors_of_other_trainers_complete_their_rollouts():
    costs = dataclasses.replace(COSTS, complete=on_cores(0.5, 0.0))
    for template, num_gmis, more in (
        ("ea_t", 3, 0.5),
        ("dp_mp", 4, 0.5),
        ("e_at", 3, 0.0),
        ("dp_only", 2, 0.0),
    ):
        with_it, without = (predict(each, planned(template, num_gmis)) for each in (costs, COSTS))
        assert sum(with_it.parts_s.values()) - sum(without.parts_s.values()) == pytest.approx(more)


def test_a_gpu_slice_saturates():
    role = RoleCost(device="gpu", fixed_s=1.0, per_env_s=0.01)
    whole, half = (Worker(roles=ALL, cores=1, gpu_share=share) for share in (1.0, 0.5))
    # 100 environments fill the GPU, and 50 a half: until then the time does not depend on them.
    assert [role.seconds(count, whole) for count in (10, 100, 200)] == [1.0, 1.0, 2.0]
    assert [role.seconds(count, half) for count in (10, 50, 100)] == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("template", "num_gmis", "parts"),
    [
        # Two threads: a step of 0.1 s, and an update of 1.75 s; nobody to reduce with.
        ("dp_only", 1, {"simulate": 1.0, "update": 1.75, "reduce": 0.0}),
        # A core each; four reductions of 0.1 s.
        ("dp_only", 2, {"simulate": 2.0, "update": 2.0, "reduce": 0.4}),
        # The trainer updates 40 environments on both cores: 1 + 40 x 0.05 x 0.75. Experience: 4 messages of 0.02 s, and
        # 10 x 40 x 126 bytes and two models at 1e9 bytes/s.
        ("ea_t", 3, {"simulate": 2.0, "act": 1.0, "update": 2.5, "reduce": 0.0, "exchange": 0.0820504}),
        # Three messages a step: two of actions, and the last simulator's answer; 40 x 226 bytes.
        ("e_at", 3, {"simulate": 2.0, "act": 1.0, "update": 2.5, "reduce": 0.0, "exchange": 0.6000904}),
        # That, and the experience of one agent.
        (
            "dp_mp",
            4,
            {"simulate": 2.0, "act": 1.0, "update": 2.5, "reduce": 0.0, "exchange": 0.6000904 + 0.0410504},
        ),
    ],
)
def test_the_phases_of_synchronous_templates_add_up(template, num_gmis, parts):
    found = predict(COSTS, planned(template, num_gmis))
    assert found.parts_s == pytest.approx(parts)
    steps = 10 * 20 * (1 if (template, num_gmis) == ("dp_only", 1) else 2)
    assert found.steps_per_s == pytest.approx(steps / sum(parts.values()))


@pytest.mark.parametrize(
    ("template", "num_gmis", "steps_per_s"),
    [
        ("dp_only", 2, 2 * 20 / 0.3),
        # One pair on a core each: two messages a step, and 20 x 226 bytes.
        ("dp_mp", 2, 20 / (0.3 + 0.04 + 4.52e-6)),
        # Two simulators, one agent: three messages.
        ("mp_dp", 3, 40 / (0.3 + 0.06 + 9.04e-6)),
    ],
)
def test_serving_by_hand(template, num_gmis, steps_per_s):
    assert predict(COSTS, planned(template, num_gmis, serving=True)).steps_per_s == pytest.approx(steps_per_s)


def test_decoupled_phases_overlap_until_the_cores_are_full():
    # A core each: the collector's 3 s and 0.0210252 s of experience hide the update of 2 s.
    apart = predict(COSTS, planned("decoupled", 2))
    assert apart.steps_per_s == pytest.approx(200 / (3.0 + 0.0410252))
    # Two collectors and a trainer with a thread each on two cores: (2 x 3.0820504 + 3) / 2 = 4.58 s for 400 steps.
    shared = predict(COSTS, planned("decoupled", 3))
    assert shared.bound_by == "work on shared cores"
    assert shared.steps_per_s == pytest.approx(400 / ((2 * 3.0820504 + 3.0) / 2))


def test_the_slowest_simulator_is_waited_for():
    # Blom: Phi^-1((2 - 0.375) / 2.25) = Phi^-1(0.7222) = 0.589
    assert slowest(1.0, 0.1, 2) == pytest.approx(1.0589, abs=1e-4)
    assert slowest(1.0, 0.1, 1) == 1.0
    uneven = dataclasses.replace(COSTS, step_spread=0.1, rollout_spread=0.05)
    # Every step of e_at, against a rollout of dp_only as a whole.
    assert predict(uneven, planned("e_at", 3)).parts_s["simulate"] == pytest.approx(2.1178, abs=1e-3)
    assert predict(uneven, planned("dp_only", 2)).parts_s["simulate"] == pytest.approx(2.0589, abs=1e-3)


def test_unit_costs_survive_json():
    assert unit_costs_from_dict(json.loads(json.dumps(dataclasses.asdict(COSTS)))) == COSTS


# The papers' points. GMI-DRL (ATC'25) §3.1.1: T_s = 6 T_a = 3 T_t and R_s = 10 R_a = 5 R_t; its text gives no R_s, so it is
# half of a GPU here, as two GMIs per GPU were about twice as fast. COM / BW is 2 (T_s + T_a) in serving and 7 (T_s + T_a +
# T_t) in training; communication takes 16 % of an iteration of GMIs (§3.1.2). One environment stands for a whole batch.
def of_paper(seconds: float, share: float) -> RoleCost:
    return RoleCost(device="gpu", fixed_s=seconds, per_env_s=seconds * share)


PAPER = dataclasses.replace(
    COSTS,
    rollout=of_paper(7.0, (6 * 0.5 + 0.05) / 7), simulate=of_paper(6.0, 0.5), act=of_paper(1.0, 0.05),
    update=of_paper(2.0, 0.1), message_s=0.0, state_bytes=1.0, action_bytes=0.0,
    reward_bytes=0.0, model_bytes=0.0, num_steps=1, num_updates=1,
)  # fmt: skip
GPUS = (1, 2, 4, 8)


def on_gpus(
    template, worker_types, gpus, per_gpu, costs=PAPER, *, serving=False, cores=16.0, iteration_s=9.0
):
    """The prediction for ``per_gpu`` GMIs of each type on each GPU; one process per GPU communicates at no cost."""
    workers = tuple(
        Worker(roles=roles, cores=cores / per_gpu, num_envs="simulator" in roles, gpu_share=1 / per_gpu)
        for roles, number in worker_types
        for _ in range(round(number * gpus * per_gpu))
    )
    reduce_s = 0.0 if per_gpu == 1 else 0.16 / 0.84 * iteration_s
    layout = ModelledPlan(template=template, workers=workers, cores=1000, serving=serving, reduce_s=reduce_s)
    return predict(costs, layout)


def gain(*given, **options):
    """Two GMIs on each GPU over one process on it."""
    return on_gpus(*given, 2, **options).steps_per_s / on_gpus(*given, 1, **options).steps_per_s


SERVING_GMI, TRAINING_GMI = [(("simulator", "agent"), 1)], [(ALL, 1)]


@pytest.mark.parametrize(("worker_types", "serving"), [(SERVING_GMI, True), (TRAINING_GMI, False)])
def test_figure_9_in_rank(worker_types, serving):
    """GMI-DRL is faster than one process per GPU on every number of GPUs, and both grow with it."""
    found = {
        (gpus, per_gpu): on_gpus("dp_only", worker_types, gpus, per_gpu, serving=serving).steps_per_s
        for gpus in GPUS
        for per_gpu in (1, 2)
    }
    for gpus in GPUS:
        assert found[gpus, 2] > found[gpus, 1]
    for fewer, more in pairwise(GPUS):
        assert found[more, 1] > found[fewer, 1]
        assert found[more, 2] > found[fewer, 2]


@pytest.mark.parametrize("gpus", [2, 4])
def test_figures_9_to_11_in_rank(gpus):
    """Mean gains: serving 2.08 > A3C's acting 1.88 > synchronous training 1.69, A3C's training 1.65 > Ray, at most 1.62."""
    serving = gain("dp_only", SERVING_GMI, gpus, serving=True)
    training = gain("dp_only", TRAINING_GMI, gpus)
    # Figure 10: half of the GPUs serve, half train. Experience is part of the 16 %.
    halves = [(("simulator", "agent"), 0.5), (("trainer",), 0.5)]
    moving = dataclasses.replace(PAPER, bandwidth=1 / (0.16 / 0.84 * 7 * 2 / gpus))
    one, two = (on_gpus("decoupled", halves, gpus, cut, moving, iteration_s=2.0).parts_s for cut in (1, 2))
    collected, trained = 2 * one["collect"] / two["collect"], 2 * one["update"] / two["update"]
    # Figure 11: physics on the host's cores in both, so GMIs only gain in the networks.
    physics = on_cores(0.0, 16 * 6.0)
    host = dataclasses.replace(PAPER, simulate=physics)
    ray = gain("dp_only", TRAINING_GMI, gpus, costs=host)
    assert serving > 1.05 * collected
    assert collected > training
    assert min(training, trained) > 1.05 * ray > 1.05
    assert abs(training / trained - 1) < 0.1  # in the paper they differ by 2 %
    assert (serving, training) == (pytest.approx(2.08, rel=0.1), pytest.approx(1.69, rel=0.1))


def test_figure_12_in_rank():
    """DP-only is faster than templates with separate roles, and by more in training (287.5 %) than in serving (110 %)."""
    slow_steps = dataclasses.replace(PAPER, bandwidth=2 / 14.0)  # COM = 2 S takes 14 s
    shared = [(("simulator",), 2 / 3), (("agent",), 1 / 3)]
    together = on_gpus("dp_only", SERVING_GMI, 1, 2, slow_steps, serving=True)
    serving = together.steps_per_s / on_gpus("mp_dp", shared, 1, 3, slow_steps, serving=True).steps_per_s
    slow_rollouts = dataclasses.replace(PAPER, bandwidth=1 / 63.0)  # COM = S takes 63 s
    apart = [(("simulator", "agent"), 2 / 3), (("trainer",), 1 / 3)]
    together = on_gpus("dp_only", TRAINING_GMI, 1, 2, slow_rollouts)
    training = together.steps_per_s / on_gpus("ea_t", apart, 1, 3, slow_rollouts).steps_per_s
    assert training > serving > 1


def test_gmis_gain_until_the_gpu_is_full():
    """What the old model could not show: two GMIs fill what one leaves idle, and ten gain no more."""
    speeds = [on_gpus("dp_only", SERVING_GMI, 1, cut, serving=True).steps_per_s for cut in (1, 2, 4, 10)]
    # 7 / 7; 2 in 6 + 1; 4 in 12 + 1; 10 in 30 + 1
    assert speeds == pytest.approx([1 / 7, 2 / 7, 4 / 13, 10 / 31])


def test_trainers_of_separate_roles_divide_the_environments():
    """Each of two has 20 of 40: 1 + 20 * 0.05 = 2 s."""
    simulator, trainer = (
        Worker(roles=("simulator",), cores=1, num_envs=20),
        Worker(roles=("agent", "trainer"), cores=1),
    )
    apart = ModelledPlan(template="e_at", workers=(simulator, simulator, trainer, trainer), cores=4)
    assert predict(COSTS, apart).parts_s["update"] == pytest.approx(2.0)
