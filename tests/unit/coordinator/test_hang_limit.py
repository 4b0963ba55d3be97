"""How long a session waits for iterations: much longer than they took, and not for hours."""

import pytest

from actors.errors import GmiSilentError
from actors.protocols import IterationResult
from rayagi.config.spec import GmiSpec, RunSpec
from rayagi.coordinator.session import Session

HANG_S = 100.0


class Scripted(Session):
    """GMIs whose iterations take what they are said to take; ``limits_s`` are those of the calls."""

    def __init__(self, hang_timeout_s=HANG_S):
        super().__init__(RunSpec(gmi=GmiSpec(hang_timeout_s=hang_timeout_s)))
        self.limits_s = []

    def _answers(self, refs, asked, limit_s, of=None):
        self.limits_s.append(limit_s)
        return refs

    def runs(self, *durations_s, **metrics):
        """A request of two GMIs, of which the second takes as long as given."""
        made = [
            [
                IterationResult(0, {"env_steps": 1.0, "iteration_s": share * own_s, **metrics})
                for own_s in durations_s
            ]
            for share in (0.5, 1.0)
        ]
        self._pending.append((len(durations_s), made))
        self.collect()
        return self.limits_s[-1]


def test_a_first_iteration_which_may_compile_has_an_hour_and_later_ones_five_times_the_slowest():
    session = Scripted()
    assert session.runs(60.0) == 3600.0
    assert session.runs(*[0.01] * 100) == HANG_S + 5 * 100 * 60.0  # a hundred of those
    assert session.runs(*[0.01] * 100) == HANG_S + 5 * 60.0
    assert session.runs(0.01) == HANG_S + 5 * 60.0


def test_steady_iterations_of_minutes_have_five_times_as_long():
    session = Scripted()
    session.runs(300.0)
    assert session.runs(300.0, 300.0) == HANG_S + 5 * 2 * 300.0
    assert session.runs(100.0, 100.0) == HANG_S + 5 * 2 * 300.0
    assert session.runs(100.0, 100.0) == HANG_S + 5 * 300.0


def test_iterations_that_only_fill_a_replay_say_nothing_of_those_that_learn():
    session = Scripted()
    session.runs(0.001, gradient_steps=0.0)
    assert session.runs(7.0, gradient_steps=1.0) == 3600.0
    assert session.runs(7.0, gradient_steps=1.0) == HANG_S + 5 * 7.0


def test_a_limit_above_an_hour_holds_for_the_first_iteration_too():
    assert Scripted(hang_timeout_s=7200.0).runs(1.0) == 7200.0


def test_what_queues_behind_iterations_has_their_time_and_an_hour():
    session = Scripted()
    session.runs(1.0)
    assert session._limit_s() == 3600.0
    session._pending.append((10, []))
    assert session._limit_s() == 3600.0 + HANG_S + 5 * 10 * 1.0


@pytest.mark.parametrize(("timeout_s", "notes"), [(None, ["gmi.hang_timeout_s"]), (3.0, [])])
def test_the_error_names_the_setting_unless_the_caller_has_set_the_limit(timeout_s, notes):
    session = Scripted()

    def hangs(*request):
        raise GmiSilentError("GMI 0/1", "1 training iteration", 160.0, "e.py:7 in step")

    session._answers = hangs
    session._pending.append((1, []))
    with pytest.raises(GmiSilentError, match=r"its program was at e\.py:7 in step") as caught:
        session.collect(timeout_s)
    found = getattr(caught.value, "__notes__", [])
    assert len(found) == len(notes)
    assert all(name in note for name, note in zip(notes, found, strict=True))
