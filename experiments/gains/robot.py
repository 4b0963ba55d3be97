"""A robot behind a wire: each step waits for its answer, without work for a core."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

ANSWER_S = 0.0005
LENGTH = 200

Floats = NDArray[np.float32]


class Robot(gymnasium.Env[Floats, Floats]):
    """A point that is to be held at 0: position += action / 10, reward -position^2, 200 steps."""

    observation_space = spaces.Box(-10.0, 10.0, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        """Start between -1 and 1."""
        super().reset(seed=seed)
        self._at, self._steps = self.np_random.uniform(-1, 1), 0
        return self._observation(), {}

    def step(self, action: Floats) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        """Move, and wait for the answer."""
        time.sleep(ANSWER_S)
        self._at = float(np.clip(self._at + 0.1 * float(action[0]), -10, 10))
        self._steps += 1
        return self._observation(), -(self._at**2), False, self._steps >= LENGTH, {}

    def _observation(self) -> Floats:
        return np.array([self._at], np.float32)


gymnasium.register("Robot-v0", entry_point="experiments.gains.robot:Robot")
