"""Environments in a process that was forked after they were made."""

import os
import signal
from functools import partial

import pytest
import torch

from rayagi.envs import make_env_factory
from rayagi.envs.fused.backends import EnvConfig
from rayagi.envs.fused.c.backend import CBackend
from rayagi.envs.fused.simulators import Pendulum

LIMIT_S = 60
"""After which a child that does not return counts as waiting without end."""


def in_child(act):
    """What ``act`` raises in a forked child; "" if it returns."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        try:
            act()
        except Exception as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0, "the child did not return"
    return text


def stepped(env_id, num_threads):
    """A function that steps an environment made here."""
    env = make_env_factory(env_id)(num_envs=4, first_env_index=0, seed=0, num_threads=num_threads)
    env.reset()
    return partial(env.step, torch.zeros(4, env.info.action.dim))


def fused(num_threads):
    return CBackend(EnvConfig(Pendulum(), num_envs=4, first_env_index=0, seed=0), num_threads).start


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(stepped, "HalfCheetah-v5"), id="batch"),
        pytest.param(partial(stepped, "Ant-v5"), id="contact forces"),
        pytest.param(partial(stepped, "rayagi/BallBalance-v0"), id="task"),
        pytest.param(fused, id="fused"),
    ],
)
def test_threads_of_another_process_are_not_waited_for(make):
    step = make(2)
    expected = f"ForkedEnvError: this environment was made in process {os.getpid()}, and the threads"
    assert in_child(step).startswith(expected)
    step()
    assert in_child(make(1)) == ""
