"""State that learners get when they are restarted: policy lags, and steps of the schedules."""

from types import SimpleNamespace

import pytest

from actors.errors import GmiLostError
from actors.protocols import IterationResult
from rayagi.coordinator import recovery as module
from rayagi.coordinator.recovery import Recovery

COUNTS = {"taken": 0, "dropped": 0, "received": {}}
HOSTING = {"simulator": (0,), "trainer": (1, 2)}
WORKERS = [SimpleNamespace(index=index, node_id="a") for index in range(3)]


@pytest.fixture
def restarting(monkeypatch):
    """A recovery whose GMIs are not there, the states that it builds, what collectors have, and messages."""
    built, collectors, messages = {}, [], []
    monkeypatch.setattr(module, "restart", lambda *whose: None)
    monkeypatch.setattr(module, "is_alive", lambda node_id: True)
    monkeypatch.setattr(Recovery, "_states", lambda self, indices: collectors)
    monkeypatch.setattr(Recovery, "_await_process", lambda self, index, state: built.update({index: state}))
    recovery = Recovery(
        spec=SimpleNamespace(learning=SimpleNamespace(rollout_length=10)),
        plan=SimpleNamespace(hosting=HOSTING.get),
        deployment=SimpleNamespace(group=None, reservation=None, workers=WORKERS),
        pending_calls=SimpleNamespace(is_busy=lambda index, kind: False, discard=lambda index: None),
        factory=None,
        log=messages.append,
    )
    return recovery, built, collectors, messages


def test_restarted_learners_count_each_lag_once(restarting):
    recovery, built, _, _ = restarting
    for index, lags in ((1, {0: 4, 1: 1}), (2, {1: 2})):
        local = {"lags": lags, "sample_counts": COUNTS}
        recovery.record_state(index, {"shared": {"iteration": 3}, "local": local})
    recovery.restart_lost(RuntimeError("lost"), 1)
    for index, state in built.items():
        recovery.record_state(index, {"local": {**state["local"], "sample_counts": COUNTS}})
    assert recovery.lags() == {0: 4, 1: 3}


@pytest.mark.parametrize(("newest", "steps"), [(4, 100), (6, 150), (3, 100)])
def test_schedules_go_on_where_the_newest_parameters_are(restarting, newest, steps):
    """A snapshot after 4 updates of 25 steps each; collectors have parameters after as many updates, more, or fewer."""
    recovery, built, collectors, _ = restarting
    shared = {"iteration": 4, "env_steps": 100, "learner": {"model": "old"}}
    recovery.record_state(1, {"shared": shared, "local": {"lags": {}, "sample_counts": COUNTS}})
    counts = {"origin": "a", "sent": 0, "unreleased": 0}
    collectors.append(
        {"shared": {"iteration": newest, "learner": {"model": "new"}}, "local": {"sample_counts": counts}}
    )
    recovery.restart_lost(RuntimeError("lost"), 1)
    assert built[1]["shared"]["env_steps"] == built[2]["shared"]["env_steps"] == steps
    assert shared["env_steps"] == 100


def test_the_message_about_a_loss_does_not_tell_the_user_to_resume(restarting):
    recovery, _, _, messages = restarting
    recovery.restart_lost(GmiLostError(0, "GMI 0/3", "rollouts", "the node ended"), 0)
    assert messages == ["GMI 0/3 was lost during rollouts: the node ended. It is restarted"]


def test_steps_that_a_lost_collector_sent_and_did_not_report_count_once(restarting):
    recovery, _, _, _ = restarting

    def received(rows_of_first, rows_of_second):
        for index, rows in ((1, rows_of_first), (2, rows_of_second)):
            counts = {**COUNTS, "received": {77: (rows, 0), 78: (4, 0)}}
            recovery.record_state(index, {"local": {"lags": {}, "sample_counts": counts}})

    def collector(origin):
        recovery.record_state(0, {"local": {"sample_counts": {"origin": origin, "sent": 0, "unreleased": 0}}})

    collector(77)
    recovery.record_progress(0, [IterationResult(0, {"env_steps": 40.0})])  # 4 rows of 10 steps
    received(4, 2)
    assert recovery.unreported_steps() == 0  # it lives, and reports
    recovery.restart_lost(GmiLostError(0, "GMI 0/3", "rollouts", "killed"), 0)
    assert [recovery.unreported_steps(), recovery.unreported_steps()] == [20, 0]
    received(4, 4)  # what was in flight
    assert recovery.unreported_steps() == 20
    collector(78)
    recovery.record_progress(0, [IterationResult(1, {"env_steps": 40.0})])
    recovery.restart_lost(GmiLostError(0, "GMI 0/3", "rollouts", "killed"), 0)
    assert recovery.unreported_steps() == 40  # 8 rows of 10 steps, of which 4 were reported
    assert not recovery.is_lower_bound


def received(recovery, *rows_of_learners):
    """Reports of learners: rows that came from origin 77."""
    for index, rows in enumerate(rows_of_learners, 1):
        counts = {**COUNTS, "received": {77: (rows, 0)}}
        recovery.record_state(
            index, {"shared": {"iteration": 3}, "local": {"lags": {}, "sample_counts": counts}}
        )


def collecting(recovery, origin, steps):
    recovery.record_state(0, {"local": {"sample_counts": {"origin": origin, "sent": 0, "unreleased": 0}}})
    recovery.record_progress(0, [IterationResult(0, {"env_steps": float(steps)})])


def state_of(origin, sent, unreleased):
    counts = {"origin": origin, "sent": sent, "unreleased": unreleased}
    return {"shared": {"iteration": 3, "learner": {}}, "local": {"sample_counts": counts}}


def test_steps_count_once_if_learners_are_lost_before_the_collector(restarting):
    """9 rows of 10 steps: 5 released to the lost learners, 4 sent again to the new ones."""
    recovery, _, collectors, _ = restarting
    collecting(recovery, 77, 70)
    received(recovery, 3, 2)
    collectors.append(state_of(77, 9, 4))
    recovery.restart_lost(RuntimeError("lost"), 1)
    recovery.restart_lost(GmiLostError(0, "GMI 0/3", "rollouts", "killed"), 0)
    received(recovery, 3, 1)
    assert [recovery.unreported_steps(), recovery.unreported_steps()] == [20, 0]
    assert not recovery.is_lower_bound


def test_steps_count_once_if_learners_are_lost_after_the_collector(restarting):
    """9 rows of 10 steps: 5 reported by the lost learners, and 4 by the new ones."""
    recovery, _, collectors, _ = restarting
    collecting(recovery, 77, 20)
    recovery.restart_lost(GmiLostError(0, "GMI 0/3", "rollouts", "killed"), 0)
    received(recovery, 3, 2)
    assert recovery.unreported_steps() == 30
    collectors.append(state_of(78, 0, 0))
    recovery.restart_lost(RuntimeError("lost"), 1)
    received(recovery, 3, 1)
    assert [recovery.unreported_steps(), recovery.unreported_steps()] == [40, 0]
    assert recovery.is_lower_bound
