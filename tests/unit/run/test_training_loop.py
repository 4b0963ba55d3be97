import math

import pytest
from fake_training_session import STEPS, FakeSession

from actors.protocols import EvaluationResult
from placement.errors import SliceLostError
from rayagi.run.checkpoints import CheckpointStore
from rayagi.run.errors import NonFiniteResultError
from rayagi.run.interrupt import Interrupt
from rayagi.run.limits import Limits, Position
from rayagi.run.measures import evaluation_row, first_non_finite
from rayagi.run.training_loop import Interval, LoopSettings, TrainingLoop


class Rows:
    def __init__(self):
        self.rows, self.evaluations, self.checkpoints, self.histograms = [], [], [], []

    def iterated(self, rows, position):
        self.rows += rows

    def evaluated(self, row, *, best):
        self.evaluations.append((row, best))

    def counted(self, histograms, row):
        self.histograms.append((row["iteration"], histograms))

    def saved(self, checkpoint):
        self.checkpoints.append(checkpoint)

    def rewound(self, position):
        self.rows = [row for row in self.rows if row["iteration"] <= position.iteration]


def make_loop(tmp_path, session, *, interrupt=None, recorder=None, health_monitor=None, **settings):
    settings.setdefault("checkpoint_every", Interval())
    return TrainingLoop(
        session,
        CheckpointStore(tmp_path / "checkpoints"),
        [recorder or Rows()],
        LoopSettings(seed=0, **settings),
        interrupt=interrupt or Interrupt(),
        health_monitor=health_monitor,
        clock=session.clock,
    )


def test_iterations_are_asked_for_about_a_second_at_a_time(tmp_path):
    session = FakeSession(iteration_s=0.1)
    make_loop(tmp_path, session, limits=Limits(iterations=35)).run()
    assert session.requests[0] == 1
    assert set(session.requests[1:-1]) <= {9, 10}
    assert sum(session.requests) == 35


def test_histograms_go_to_recorders_with_the_row_of_their_iteration(tmp_path):
    session, recorder = FakeSession(), Rows()
    session.histograms = {2: {"replay_age": [0, 1]}, 5: {"replay_age": [2, 0]}}
    make_loop(tmp_path, session, recorder=recorder, limits=Limits(iterations=6)).run()
    assert recorder.histograms == list(session.histograms.items())


def test_evaluations_begin_where_training_never_does(tmp_path):
    """Training draws its starts from the run's seed."""
    session = FakeSession(iteration_s=0.1)
    make_loop(
        tmp_path, session, limits=Limits(iterations=4), evaluation_interval=2, evaluation_episodes=3
    ).run()
    assert session.evaluation_seeds == [1_000_003, 1_000_003]


def test_a_slow_iteration_is_asked_for_alone(tmp_path):
    session = FakeSession(iteration_s=3.0)
    make_loop(tmp_path, session, limits=Limits(iterations=3)).run()
    assert session.requests == [1, 1, 1]


def test_counted_limits_are_not_passed_but_for_the_iteration_that_reaches_them(tmp_path):
    session = FakeSession()
    outcome = make_loop(tmp_path, session, limits=Limits(env_steps=10 * STEPS + 1)).run()
    assert outcome.position.iteration == 11
    assert outcome.position.env_steps == 11 * STEPS
    assert outcome.stop.limit == "env_steps"


def test_a_time_limit_ends_the_run_within_an_iteration(tmp_path):
    session = FakeSession(iteration_s=0.1)
    outcome = make_loop(tmp_path, session, limits=Limits(time_s=3.05)).run()
    assert outcome.stop.limit == "time_s"
    assert 3.05 <= outcome.position.train_s < 3.05 + 0.2


def test_evaluations_come_at_exact_multiples_and_at_the_end(tmp_path):
    session, rows = FakeSession(), Rows()
    make_loop(tmp_path, session, recorder=rows, limits=Limits(iterations=25), evaluation_interval=10).run()
    assert session.evaluated_at == [10, 20, 25]
    assert [row["evaluation_return_mean"] for row, _ in rows.evaluations] == [100.0, 200.0, 250.0]


def test_the_row_of_an_evaluation_by_hand():
    position = Position(
        iteration=7, env_steps=448, train_s=2.5, evaluation_return=None, training_return=None, training_episodes=0
    )  # fmt: skip
    # Mean 14 / 4; deviations -2.5, -1.5, 0.5, 3.5 from it, whose mean square is 21 / 4.
    assert evaluation_row(EvaluationResult([2.0, 1.0, 4.0, 7.0], [10, 20, 20, 40]), position) == {
        "iteration": 7,
        "env_steps_total": 448,
        "train_s": 2.5,
        "evaluation_return_mean": 3.5,
        "evaluation_return_std": pytest.approx(math.sqrt(21 / 4)),
        "evaluation_return_min": 1.0,
        "evaluation_return_max": 7.0,
        "evaluation_length_mean": 22.5,
        "evaluation_episodes": 4,
    }


def test_the_stop_return_is_the_evaluations_where_it_is_on(tmp_path):
    session = FakeSession()
    limits = Limits(stop_return=150.0, iterations=1000)
    outcome = make_loop(tmp_path, session, limits=limits, evaluation_interval=10).run()
    assert outcome.position.iteration == 20
    assert "evaluation return 200.0" in outcome.stop.reason


def test_the_stop_return_is_the_mean_of_the_training_episodes_without_evaluation(tmp_path):
    session = FakeSession(iteration_s=2.0)
    # Returns are 1, 2, ..., i: their mean passes 5 at i = 9, but is one of a hundred episodes from i = 100 only.
    outcome = make_loop(tmp_path, session, limits=Limits(stop_return=5.0)).run()
    assert outcome.position.iteration == 100
    assert "training return 50.5" in outcome.stop.reason


def test_the_best_training_return_is_one_of_a_hundred_episodes(tmp_path):
    session = FakeSession()
    settings = {"limits": Limits(iterations=120), "checkpoint_every": Interval(iterations=30)}
    outcome = make_loop(tmp_path, session, **settings).run()
    best = CheckpointStore(tmp_path / "checkpoints").pointer("best")
    # Checkpoints at 30, 60 and 90 come before the hundredth episode.
    assert (best["checkpoint"], best["value"]) == ("iteration_000120", sum(range(21, 121)) / 100)
    assert outcome.best_return == best["value"]


def test_returns_with_and_without_exploration_are_not_compared_on_a_resume(tmp_path):
    evaluated = make_loop(tmp_path, FakeSession(), limits=Limits(iterations=110), evaluation_interval=10)
    assert evaluated.run().best_return == 1100.0
    store = CheckpointStore(tmp_path / "checkpoints")
    alike = make_loop(tmp_path, FakeSession(), limits=Limits(iterations=111), evaluation_interval=200)
    alike.restore(store.load())
    assert alike.run().best_return == 1110.0
    trained = make_loop(tmp_path, FakeSession(), limits=Limits(iterations=112))
    trained.restore(store.load())
    # The mean training return of iterations 13 to 112 is the best of its kind, though evaluations gave 1110.
    assert trained.run().best_return == 62.5
    assert store.pointer("best")["checkpoint"] == "iteration_000112"


def test_the_window_holds_the_last_hundred_episodes(tmp_path):
    session, rows = FakeSession(), Rows()
    make_loop(tmp_path, session, recorder=rows, limits=Limits(iterations=150)).run()
    assert rows.rows[-1]["episode_return_mean"] == pytest.approx(sum(range(51, 151)) / 100)
    assert [row["iteration"] for row in rows.rows] == list(range(1, 151))


def test_wall_time_and_speed_of_rows_add_up(tmp_path):
    session, rows = FakeSession(iteration_s=0.1), Rows()
    make_loop(tmp_path, session, recorder=rows, limits=Limits(iterations=30)).run()
    assert [row["train_s"] for row in rows.rows] == pytest.approx([0.1 * i for i in range(1, 31)])
    assert {round(row["steps_per_second"], 6) for row in rows.rows} == {round(STEPS / 0.1, 6)}


def test_checkpoints_come_by_iterations(tmp_path):
    session, rows = FakeSession(), Rows()
    settings = {"limits": Limits(iterations=25), "checkpoint_every": Interval(iterations=10)}
    make_loop(tmp_path, session, recorder=rows, **settings).run()
    assert rows.checkpoints == ["iteration_000010", "iteration_000020", "iteration_000025"]


def test_a_checkpoint_s_schedules_are_at_the_run_s_steps(tmp_path):
    """Learners have not learned from rollouts in flight, which are not restored."""

    class Learning(FakeSession):
        def state_dict(self):
            state = super().state_dict()
            state["shared"]["env_steps"] = (self.iteration - 1) * STEPS
            return state

    loop = make_loop(tmp_path, Learning(), limits=Limits(iterations=3))
    loop.run()
    assert loop._checkpoints.load().state["shared"]["env_steps"] == 3 * STEPS


def test_checkpoints_come_by_time(tmp_path):
    session, rows = FakeSession(iteration_s=0.5), Rows()
    settings = {"limits": Limits(iterations=20), "checkpoint_every": Interval(time_s=4.0)}
    make_loop(tmp_path, session, recorder=rows, **settings).run()
    assert len(rows.checkpoints) == 3
    assert rows.checkpoints[-1] == "iteration_000020"


def test_the_best_evaluation_is_kept_though_later_ones_are_worse(tmp_path):
    session = FakeSession()
    session.evaluate_value = lambda iteration: {10: 5.0, 20: 9.0}.get(iteration, 1.0)
    outcome = make_loop(tmp_path, session, limits=Limits(iterations=60), evaluation_interval=10).run()
    store = CheckpointStore(tmp_path / "checkpoints")
    assert outcome.best_return == 9.0
    assert store.pointer("best")["checkpoint"] == "iteration_000020"
    assert store.load("best").state["shared"]["iteration"] == 20
    assert store.load("last").state["shared"]["iteration"] == 60


def test_an_interrupt_finishes_the_request_in_flight_and_saves(tmp_path):
    interrupt = Interrupt()
    session = FakeSession(events={25: lambda: setattr(interrupt, "requested", True)})
    outcome = make_loop(tmp_path, session, interrupt=interrupt, limits=Limits(iterations=1000)).run()
    assert outcome.stop is None
    assert outcome.position.iteration >= 25
    assert session.in_flight is None
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.load().state["shared"]["iteration"] == outcome.position.iteration


@pytest.mark.parametrize("quantity", ["policy_loss", "value_loss", "grad_norm"])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_quantity(tmp_path, quantity):
    session = FakeSession(events={12: {quantity: math.nan}})
    settings = {"limits": Limits(iterations=100), "checkpoint_every": Interval(iterations=5)}
    with pytest.raises(
        NonFiniteResultError, match=rf"{quantity} became nan at iteration 12 \(768 environment"
    ):
        make_loop(tmp_path, session, **settings).run()
    assert CheckpointStore(tmp_path / "checkpoints").names()[-1] == "iteration_000010"


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    session = FakeSession()
    session.events = {7: lambda: session.weights.fill_(math.inf)}
    settings = {"limits": Limits(iterations=100), "checkpoint_every": Interval(iterations=5)}
    with pytest.raises(NonFiniteResultError, match=r"learner\.weights became inf at iteration 10"):
        make_loop(tmp_path, session, **settings).run()
    assert CheckpointStore(tmp_path / "checkpoints").names() == ["iteration_000005"]


def test_a_resumed_run_continues_from_its_position(tmp_path):
    whole, first, second = Rows(), Rows(), Rows()
    make_loop(tmp_path / "whole", FakeSession(), recorder=whole, limits=Limits(iterations=40)).run()
    make_loop(tmp_path / "parts", FakeSession(), recorder=first, limits=Limits(iterations=15)).run()

    loop = make_loop(tmp_path / "parts", FakeSession(), recorder=second, limits=Limits(iterations=40))
    loop.restore(CheckpointStore(tmp_path / "parts" / "checkpoints").load())
    loop.run()
    counted = (
        *("iteration", "env_steps_total", "episodes_total", "episode_return_mean", "episode_length_mean"),
        "reward_up",
    )
    assert whole.rows[-1]["reward_up"] == 2.0 * whole.rows[-1]["episode_return_mean"] == 41.0
    together = [[row[name] for name in counted] for row in first.rows + second.rows]
    assert together == [[row[name] for name in counted] for row in whole.rows]
    assert second.rows[0]["train_s"] == pytest.approx(1.6)


class _HealthMonitor:
    """Requests another session after some iterations."""

    def __init__(self, session, at):
        self.session, self.at, self.checked, self.log = session, at, [], []
        self.replan_pending = False

    def check_health(self, position):
        self.checked.append(position.iteration)
        self.replan_pending |= position.iteration == self.at

    def on_checkpoint(self):
        self.log.append("saved")

    def replan(self, state):
        assert self.session.in_flight is None
        self.log.append(f"replanned at {state['shared']['iteration']}")
        self.replan_pending = False
        other = FakeSession(self.session.clock)
        other.load_state_dict(state)
        return other

    def recover(self, lost, state):
        self.log.append(f"recovered from {'nothing' if state is None else state['shared']['iteration']}")
        other = FakeSession(self.session.clock, iteration_s=self.session.iteration_s)
        if state is not None:
            other.load_state_dict(state)
        return other


LOST = SliceLostError(("GMI 0 mps[GPU-1 x1.00]",), "its daemon is gone")


@pytest.mark.parametrize(("lost_at", "goes_on_from"), [(8, "5"), (3, "nothing")])
def test_a_lost_share_takes_the_run_back_to_its_last_checkpoint(tmp_path, lost_at, goes_on_from):
    session, rows = FakeSession(iteration_s=1.0, events={lost_at: LOST}), Rows()
    health_monitor = _HealthMonitor(session, at=100)
    settings = {"limits": Limits(iterations=12), "checkpoint_every": Interval(iterations=5)}
    outcome = make_loop(tmp_path, session, recorder=rows, health_monitor=health_monitor, **settings).run()
    assert [line for line in health_monitor.log if line != "saved"] == [f"recovered from {goes_on_from}"]
    assert outcome.position.iteration == 12
    assert outcome.position.env_steps == 12 * STEPS
    # Each iteration once, with the figures of an undisturbed run.
    assert [row["iteration"] for row in rows.rows] == list(range(1, 13))
    assert [row["train_s"] for row in rows.rows] == pytest.approx(list(range(1, 13)))
    assert rows.rows[-1]["episode_return_mean"] == sum(range(1, 13)) / 12


def test_without_a_health_monitor_a_lost_share_ends_the_run(tmp_path):
    session = FakeSession(events={2: LOST})
    with pytest.raises(SliceLostError, match="its daemon is gone"):
        make_loop(tmp_path, session, limits=Limits(iterations=4)).run()


def test_another_session_continues_after_the_next_checkpoint_and_no_sooner(tmp_path):
    session, rows = FakeSession(iteration_s=1.0), Rows()
    health_monitor = _HealthMonitor(session, at=3)
    settings = {"limits": Limits(iterations=12), "checkpoint_every": Interval(iterations=5)}
    outcome = make_loop(tmp_path, session, recorder=rows, health_monitor=health_monitor, **settings).run()
    assert health_monitor.checked[:6] == [1, 2, 3, 4, 5, 6]
    assert health_monitor.log == ["saved", "replanned at 5", "saved", "saved"]
    assert session.iteration == 5  # the other session ran the rest
    assert outcome.position.iteration == 12
    assert [row["iteration"] for row in rows.rows] == list(range(1, 13))


def test_a_run_that_ends_is_not_replanned(tmp_path):
    session = FakeSession(iteration_s=1.0)
    health_monitor = _HealthMonitor(session, at=5)
    settings = {"limits": Limits(iterations=5), "checkpoint_every": Interval(iterations=5)}
    make_loop(tmp_path, session, health_monitor=health_monitor, **settings).run()
    assert health_monitor.log == ["saved"]


def test_first_non_finite_names_the_tensor():
    import torch

    assert first_non_finite({"a": [torch.ones(2)], "b": {"c": 1}}) is None
    name, value = first_non_finite({"a": [torch.ones(2), torch.tensor([1.0, -math.inf])]})
    assert (name, value) == ("a.1", -math.inf)


def test_networks_that_a_run_begins_with_are_its_first_checkpoint(tmp_path):
    session, rows = FakeSession(), Rows()
    loop = make_loop(tmp_path, session, recorder=rows, limits=Limits(iterations=2))
    weights = session.weights + 7.0
    loop.begin_with({"iteration": 0, "learner": {"weights": weights}})
    assert session.weights.equal(weights)
    saved = CheckpointStore(tmp_path / "checkpoints").load("last")
    assert (saved.name, saved.counters["env_steps"]) == ("iteration_000000", 0)
    assert saved.state["shared"]["learner"]["weights"].equal(weights)
    assert loop.run().position.iteration == 2
    assert rows.checkpoints == ["iteration_000000", "iteration_000002"]


def test_a_run_that_begins_with_networks_of_another_has_its_whole_time(tmp_path):
    session = FakeSession(iteration_s=1.0)
    session.clock.now = 1e6  # the host has been up for days
    loop = make_loop(tmp_path, session, limits=Limits(time_s=10.0))
    loop.begin_with({"iteration": 0, "learner": {"weights": session.weights}})
    outcome = loop.run()
    assert outcome.position.iteration > 5
    assert 10.0 <= outcome.position.train_s < 20.0
