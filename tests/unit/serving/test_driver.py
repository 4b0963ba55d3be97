"""The serving loop with scripted GMIs and their fake clock."""

import os
import signal
import threading

import pytest

from rayagi.run.errors import DiskError
from rayagi.run.interrupt import Interrupt
from rayagi.serving import driver
from rayagi.serving.driver import ServingLimits, ServingLoop
from rayagi.serving.program import ServingResult


class FakeGmis:
    """Two GMIs of four environments each; a step of all takes 10 ms."""

    def __init__(self, *, fails_at=None):
        self.now, self.asked, self.finished, self.fails_at = 0.0, [], False, fails_at
        self.after = lambda: None

    def run(self, request, *args, timeout_s):
        if request == "finish":
            self.finished = True
            return [None, None]
        (steps,) = args
        self.asked.append(steps)
        if len(self.asked) == self.fails_at:
            raise DiskError("data", "No space left on device")
        self.after()
        self.now += 0.01 * steps
        results = [ServingResult(env_steps=4 * steps, wall_s=0.01 * steps) for _ in range(2)]
        for result in results:
            result.step.add(0.01)
            result.episode_returns, result.episode_lengths = [1.0, 3.0], [5, 5]
        return results


def loop(gmis, limits, *, interrupt=None, log=lambda text: None):
    return ServingLoop(
        gmis,
        limits,
        total_envs=8,
        interrupt=interrupt or Interrupt(),
        log=log,
        clock=lambda: gmis.now,
    )


def test_steps_are_counted_over_all_environments_and_not_exceeded_by_more_than_a_step():
    gmis = FakeGmis()
    served = loop(gmis, ServingLimits(env_steps=2003)).serve()
    # 2003 / 8 = 250.4: 251 steps of all environments; the first 8 show that a second takes 100.
    assert gmis.asked == [8, 100, 100, 43]
    assert served.total.env_steps == 2008
    assert served.stop == "2,008 environment steps done"
    assert served.steps_per_s == pytest.approx(800)
    assert gmis.finished


def test_time_and_episodes_end_it_too():
    gmis = FakeGmis()
    served = loop(gmis, ServingLimits(time_s=1.5)).serve()
    assert gmis.now == pytest.approx(1.5, abs=0.011)
    assert served.stop == "2 s of serving done"
    gmis = FakeGmis()
    served = loop(gmis, ServingLimits(episodes=9)).serve()
    assert len(gmis.asked) == 3  # four episodes a request
    assert (served.episodes, served.return_mean()) == (12, 2.0)


def test_ctrl_c_ends_after_the_request_with_everything_written():
    gmis, interrupt = FakeGmis(), Interrupt()
    gmis.after = lambda: setattr(interrupt, "requested", len(gmis.asked) >= 3)
    served = loop(gmis, ServingLimits(env_steps=10**9), interrupt=interrupt).serve()
    assert len(gmis.asked) == 3
    assert served.stop == ""
    assert gmis.finished


def test_sigterm_while_an_environment_hangs_ends_it_soon_and_keeps_what_was_served(monkeypatch):
    def hang_in_the_third():
        if len(gmis.asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)

    gmis = FakeGmis()
    gmis.after = hang_in_the_third
    monkeypatch.setattr(driver, "END_LIMIT_S", -1.7)  # and twice the second that the request before took
    with Interrupt() as interrupt:
        serving = loop(gmis, ServingLimits(env_steps=10**9), interrupt=interrupt)
        with pytest.raises(KeyboardInterrupt, match=r"^SIGTERM, and no answer of the GMIs"):
            serving.serve()
    assert serving.served.total.env_steps == 8 * 108


def test_a_full_disk_raises_its_own_error():
    gmis = FakeGmis(fails_at=3)
    with pytest.raises(DiskError, match="No space left on device"):
        loop(gmis, ServingLimits(env_steps=10**9)).serve()


def test_progress_is_logged_every_few_seconds():
    lines = []
    loop(FakeGmis(), ServingLimits(time_s=12.0), log=lines.append).serve()
    assert len(lines) == 2
    assert "800 steps/s" in lines[0]
    assert "step p50 10 ms" in lines[0]


def test_limits_as_text():
    assert ServingLimits(env_steps=20_000, episodes=5, time_s=90).text() == (
        "1 min 30 s or 20k environment steps or 5 episodes"
    )
