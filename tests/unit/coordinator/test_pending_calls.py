"""Outstanding calls of free-running GMIs: one that does not answer is lost."""

import math
from types import SimpleNamespace

import pytest

from actors import ping
from actors.errors import GmiLostError
from actors.gmi import GmiIdentity
from actors.groups import GmiGroup
from actors.ping import PingMonitor
from actors.protocols import IterationResult
from collectives import limits
from placement.types import Slice
from rayagi.coordinator import pending_calls as module
from rayagi.coordinator.decoupled import DecoupledSession
from rayagi.coordinator.pending_calls import CompletedCall, PendingCalls


@pytest.fixture
def clock(monkeypatch):
    """The time; no call is ever answered."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(module, "_LONGEST_LOOK_S", math.inf)
    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=lambda refs, **options: ([], refs)))
    return clock


def group_with(pings):
    own = GmiIdentity(
        index=0, num_gmis=1, slice=Slice(node="n", backend="cpu"), roles=("agent",), task="Point"
    )
    return GmiGroup([own], [None], None, pings)


@pytest.mark.parametrize(
    ("iteration_s", "num_iterations", "kind", "limit_s"),
    [
        (0.01, 20, "work", 30.0 + 20 * 0.5),  # each may poll for half a second
        (100.0, 1, "work", 30.0 + 100.0),
        (None, 1, "work", 3600.0),
        (None, 1, "restart", 120.0 + 1000.0),
    ],
)
def test_a_gmi_that_takes_much_longer_than_usual_is_lost(clock, iteration_s, num_iterations, kind, limit_s):
    calls = PendingCalls(group_with(PingMonitor(silence_s=30.0)), silence_s=30.0)
    if iteration_s is not None:
        calls.record_results(0, [IterationResult(0, {"iteration_s": iteration_s})])
    calls.add(0, ["ref"], "rollouts", kind, num_iterations)
    clock.now_s = limit_s
    assert calls.wait(1.0) == []
    assert calls.is_busy(0)
    clock.now_s += 0.1
    (lost,) = calls.wait(1.0)
    assert isinstance(lost.failure, GmiLostError)
    assert f"lost during rollouts: it did not answer within {limit_s:.0f} s" in str(lost.failure)
    assert (lost.index, lost.kind, calls.is_busy(0)) == (0, kind, False)


def test_no_gmi_is_late_because_the_driver_was_stopped_with_it(clock, monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_LOOK_S", 10.0)
    calls = PendingCalls(group_with(PingMonitor(silence_s=30.0)), silence_s=30.0)
    calls.record_results(0, [IterationResult(0, {"iteration_s": 1.0})])
    calls.add(0, ["ref"], "rollouts")
    clock.now_s = 3600.0
    assert calls.wait(1.0) == []
    for clock.now_s in range(3600, 3622):
        assert calls.wait(1.0) == []
    clock.now_s += 1.0
    (lost,) = calls.wait(1.0)
    assert isinstance(lost.failure, GmiLostError)


@pytest.mark.parametrize("kind", ["work", "restart"])
def test_a_gmi_whose_process_is_stopped_is_lost_before_its_generous_first_limit(clock, monkeypatch, kind):
    pings = PingMonitor(silence_s=30.0)
    pings.add(0, ("a", 1))
    monkeypatch.setattr(ping, "time", limits.time)
    monkeypatch.setattr(ping, "is_stopped", lambda address: True)
    calls = PendingCalls(group_with(pings), silence_s=30.0)
    calls.add(0, ["ref"], "rollouts", kind)
    for clock.now_s in range(0, 40, 5):
        assert calls.wait(1.0) == []
    clock.now_s = 40
    (lost,) = calls.wait(1.0)
    assert isinstance(lost.failure, GmiLostError)
    assert "lost during rollouts: its process has answered nothing for 30 s" in str(lost.failure)
    assert not calls.is_busy(0)


def test_what_a_learner_answered_before_it_was_restarted_because_of_another_is_dropped():
    """Both calls have ended when the first one's loss restarts both learners."""
    restarted, handled = set(), []

    def handle(completed):
        handled.append(completed.index)
        restarted.update({1, 2})

    session = DecoupledSession.__new__(DecoupledSession)
    ended = [
        CompletedCall(index=1, kind="work", answers=(), failure=RuntimeError("lost")),
        CompletedCall(index=2, kind="work", answers=([], {}), failure=None),
    ]
    session._pending_calls = SimpleNamespace(wait=lambda timeout_s: ended, is_busy=restarted.__contains__)
    session._recovery = SimpleNamespace(find_places=lambda: None)
    session._handle_completed = handle
    session._handle_all_completed()
    assert handled == [1]
