"""A T-maze: the sign at the start says where the goal is, and is gone when the agent has to choose (Bakker 2002)."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

AHEAD, LEFT, RIGHT = range(3)


class TMaze(gymnasium.Env[NDArray[np.float32], np.int64]):
    """A corridor of ``length`` cells with a junction at its end.

    Observation: (sign, at the junction). The sign is -1 or 1 in the first cell, and 0 after it. Each step costs 0.1 if it
    does not bring the agent nearer to the junction. There, left and right end the episode with 1 if the sign said so, else
    with -1. Without memory no policy has a mean return above 0; the best one with memory has 1.
    """

    def __init__(self, length: int = 10) -> None:
        self.length = length
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start in the first cell with a new sign."""
        super().reset(seed=seed)
        self._sign = 1 if self.np_random.random() < 0.5 else -1
        self._cell = self._steps = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move; an episode is cut after four times the corridor's length."""
        self._steps += 1
        reward, terminated = 0.0, False
        if action == AHEAD and self._cell < self.length:
            self._cell += 1
        elif action != AHEAD and self._cell == self.length:
            chosen = -1 if action == LEFT else 1
            reward, terminated = (1.0 if chosen == self._sign else -1.0), True
        else:
            reward = -0.1
        return self._observation(), reward, terminated, self._steps >= 4 * self.length, {}

    def _observation(self) -> NDArray[np.float32]:
        return np.array([self._sign if self._cell == 0 else 0, self._cell == self.length], np.float32)


gymnasium.register("TMaze-v0", entry_point="experiments.learning.tmaze:TMaze")
