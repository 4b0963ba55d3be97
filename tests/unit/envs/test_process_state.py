"""Code of an environment that changes what the whole process has one of."""

import signal
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rayagi.envs import env_info, make_env_factory
from rayagi.envs.providers import user_module

pytestmark = pytest.mark.usefixtures("default_signals")


class Greedy(gymnasium.Env):
    """Ignores the signals that end a run, silences the process, and sets an alarm."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, self.handle)
        sys.stdout = sys.stderr = None
        signal.setitimer(signal.ITIMER_REAL, 1000.0)

    def handle(self, number, frame):
        pass


gymnasium.register("Greedy-v0", entry_point=Greedy)
ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)


@pytest.fixture
def as_before():
    """pytest-timeout has an alarm of its own."""
    handlers = {number: signal.getsignal(number) for number in ALL}
    timer = signal.getitimer(signal.ITIMER_REAL)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("pending_s", [0.0, 500.0])
def test_an_environment_that_is_made_for_its_sizes_changes_nothing(pending_s):
    signal.setitimer(signal.ITIMER_REAL, pending_s)
    handlers, streams = [signal.getsignal(number) for number in ALL], (sys.stdout, sys.stderr)
    assert env_info("Greedy-v0", "gymnasium").obs_dim == 1
    assert [signal.getsignal(number) for number in ALL] == handlers
    assert (sys.stdout, sys.stderr) == streams
    left_s = signal.getitimer(signal.ITIMER_REAL)[0]
    assert left_s <= pending_s
    assert (left_s > 0) == (pending_s > 0)


@pytest.mark.usefixtures("as_before")
def test_an_environment_that_is_used_keeps_handlers_of_its_own_and_none_of_what_ends_a_run():
    handlers, streams = [signal.getsignal(number) for number in ALL[:3]], (sys.stdout, sys.stderr)
    env = make_env_factory("Greedy-v0")(num_envs=1, first_env_index=0, seed=0, num_threads=1)
    assert [signal.getsignal(number) for number in ALL[:3]] == handlers
    assert (sys.stdout, sys.stderr) == streams
    assert signal.getsignal(signal.SIGUSR1) == env._envs.envs[0].unwrapped.handle
    env.close()


@pytest.mark.usefixtures("as_before")
def test_a_module_that_ignores_signals_when_it_is_imported_ends_like_others(tmp_path, monkeypatch):
    text = "import signal, sys\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nsys.stdout = None\n"
    (tmp_path / "ignoring_signals.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    handler, stream = signal.getsignal(signal.SIGINT), sys.stdout
    assert user_module("ignoring_signals:Env-v0") is not None
    assert signal.getsignal(signal.SIGINT) is handler
    assert sys.stdout is stream
