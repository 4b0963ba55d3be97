"""What RLlib's PPO logs of a run besides its results, over a fake session."""

import logging

import pytest

from actors.protocols import IterationResult
from placement.search import TrialMeasurement
from placement.types import Machine, Node
from rayagi.config.spec import GmiSpec, RunSpec
from rayagi.coordinator.health_monitor import WINDOW
from rayagi.coordinator.search_store import SearchStore
from rayagi.planning import plan_of
from rayagi.rllib_watch import RunWatch

MACHINE = Machine(nodes=(Node(name="a", cores=(0, 1), memory_total_bytes=2**32),), origin="test")
SPEC = RunSpec(gmi=GmiSpec(num_gmis=2, num_envs=8, replan=True))
ROW = {"env_steps_total": 100.0, "train_s": 1.0, "episodes_total": 0.0}


class Session:
    def __init__(self, *own_s):
        self.plan = plan_of(SPEC, MACHINE)
        self.collected = tuple((iteration(max(own_s), max(own_s) - own),) for own in own_s)

    def health(self):
        return []


def iteration(took_s, waited_s):
    return IterationResult(
        iteration=1,
        metrics={"env_steps": 50.0, "iteration_s": took_s, "sync_s": waited_s, "resident_bytes": 1e8},
    )


def trained(watch, iterations):
    for number in range(1, iterations + 1):
        watch.iterated(IterationResult(number, {"env_steps": 100.0}), ROW, iteration=number, wall_s=0.5)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_predicted_and_measured_stand_beside_each_other_at_the_end():
    store = SearchStore(SPEC, MACHINE)
    for round_, speed in ((1, 110.0), (2, 110.0)):
        store.save_outcome(2, 8, TrialMeasurement(steps_per_s=speed, memory_bytes=1), round_)
    watch = RunWatch(SPEC, Session(1.0, 1.0), run="a run")
    assert watch.summary() == ""
    trained(watch, 3)
    # 300 steps in 1.5 s; two GMIs of 110 were predicted.
    assert watch.summary() == (
        f"{SPEC.env.id}: 200 steps/s in all; predicted 220 steps/s (220 - 220 in 80 of 100 runs) by 2 measurements of "
        "2 x 8 environments; measured 200, error +10.0 %, outside of the interval"
    )


def test_a_slow_gmi_is_reported_with_what_to_build_and_nothing_is_done(caplog):
    watch = RunWatch(SPEC, Session(1.0, 3.0), run="a run")
    with caplog.at_level(logging.WARNING, logger="rayagi.rllib_watch"):
        trained(watch, WINDOW + 5)
    (line,) = caplog.messages
    assert f"Iteration {WINDOW}: GMI 1 runs at 17 steps/s of its own work, the others at 50" in line
    assert line.endswith(
        "To continue without GMI 1 cpu[1], build the next one with .gmi(num_envs=8, left_out=[1])."
    )
    assert "no prediction: this plan was not measured here" in watch.summary()
