"""An environment whose reward is a number that it shows beside others."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Hint(gymnasium.Env):
    """Rewards the hint in each step; the action changes nothing."""

    observation_space = spaces.Dict(
        {"hint": spaces.Box(-1.0, 1.0, (1,), np.float32), "seen": spaces.Box(-1.0, 1.0, (2,), np.float32)}
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._show(), {}

    def _show(self) -> Any:
        self._hint = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return {"hint": self._hint, "seen": self.np_random.uniform(-1, 1, 2).astype(np.float32)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        reward = float(self._hint[0])
        return self._show(), reward, self._steps == 8, False, {}


gymnasium.register("Hint-v0", Hint)
