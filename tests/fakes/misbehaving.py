"""Environments whose processes come to grief on their first step, for what has to survive them."""

import os
import signal
import threading

import gymnasium
import numpy as np


class Misbehaving(gymnasium.Env):
    """Does ``how`` on its first step."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, how):
        self._how = how

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        if self._how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "hangs":
            threading.Event().wait()
        if self._how == "no memory":
            raise MemoryError("no 8 GiB left")
        return np.zeros(3, np.float32), 0.0, False, False, {}


gymnasium.register("Misbehaving-v0", Misbehaving, max_episode_steps=10)
