"""Environments that are closed: while they step, by the thread that steps or another one, twice, or before a step."""

import threading

import pytest
import torch

from rayagi.envs import make_env_factory
from rayagi.envs.errors import ClosedEnvError
from rayagi.envs.lifetime import ClosableEnv, while_open

IDS = [
    "CartPole-v1",
    "HalfCheetah-v5",
    "Ant-v5",
    "rayagi/BallBalance-v0",
    "rayagi/ShadowHand-v0",
    "fused/Pendulum-v1",
]
"""Gymnasium's Python, MuJoCo's batch, worlds with contact forces, two tasks and a fused simulator."""


def made(env_id):
    env = make_env_factory(env_id)(num_envs=3, first_env_index=0, seed=0, num_threads=2)
    env.reset()
    return env


def actions_of(env):
    action = env.info.action
    return torch.zeros(3, dtype=torch.int64) if action.is_discrete else torch.zeros(3, action.dim)


class ClosingActions(torch.Tensor):
    """Actions at whose first use, in the midst of a step, ``close`` is called."""

    def detach(self):
        self.close()
        return super().detach().as_subclass(torch.Tensor)


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("call", [lambda close: close(), in_thread], ids=["same thread", "another thread"])
def test_a_step_in_progress_ends_before_the_environments_are_released(env_id, call):
    env, other = made(env_id), made(env_id)
    actions = actions_of(env).as_subclass(ClosingActions)
    actions.close = lambda: call(env.close)
    result, wanted = env.step(actions), other.step(actions_of(other))
    torch.testing.assert_close(result.obs, wanted.obs, rtol=0, atol=0)
    torch.testing.assert_close(result.rewards, wanted.rewards, rtol=0, atol=0)
    with pytest.raises(ClosedEnvError):
        env.step(actions_of(env))
    other.close()


@pytest.mark.parametrize("env_id", IDS)
def test_what_follows_a_close_is_one_sentence(env_id):
    env = made(env_id)
    state = env.state_dict()
    env.close()
    env.close()
    reason = f"^{env.info.env_id}: these environments are closed; make new ones to reset and step them$"
    for call in (
        env.reset,
        lambda: env.step(actions_of(env)),
        env.state_dict,
        lambda: env.load_state_dict(state),
    ):
        with pytest.raises(ClosedEnvError, match=reason):
            call()


@pytest.mark.parametrize("env_id", ["Ant-v5", "fused/Pendulum-v1"])
def test_a_rollout_of_closed_environments_is_refused(env_id):
    env = made(env_id)
    env.close()
    with pytest.raises(ClosedEnvError):
        env.collect_rollout(None, None, 0, torch.zeros(3))


class Nested(ClosableEnv):
    """Counts its releases; ``outer`` closes it before an inner call."""

    def __init__(self):
        super().__init__()
        self.released = 0

    @while_open
    def outer(self, error):
        self.close()
        self.inner()
        assert self.released == 0
        if error is not None:
            raise error
        return "result"

    @while_open
    def inner(self):
        pass

    def _release(self):
        self.released += 1


def test_the_outermost_call_releases_once():
    env = Nested()
    assert env.outer(None) == "result"
    env.close()
    assert env.released == 1


def test_a_call_that_ends_with_an_error_releases():
    env = Nested()
    with pytest.raises(SystemExit):
        env.outer(SystemExit())
    assert env.released == 1
