"""An environment whose policy has to do what it is shown, with any of Gymnasium's spaces on either side."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

CHOICES = (3, 2, 4)
ACTIONS: dict[str, spaces.Space] = {
    "discrete": spaces.Discrete(3, start=5),
    "multi_discrete": spaces.MultiDiscrete(CHOICES),
    "multi_discrete_from_two": spaces.MultiDiscrete(CHOICES, start=[2, 2, 2]),
    "multi_binary": spaces.MultiBinary(3),
    "integer_box": spaces.Box(np.array([-1, 0, 2]), np.array([1, 1, 5]), dtype=np.int32),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
}
OBSERVATIONS = ("box", "discrete", "multi_discrete", "multi_binary", "dict", "tuple")


class Echo(gymnasium.Env):
    """Shows what to do in each of 16 steps. The reward is the share of choices that match, or 1 less the squared error."""

    def __init__(self, obs: str = "box", action: str = "multi_discrete") -> None:
        self.action_space = ACTIONS[action]
        self._kind = obs
        shown = _as_vector(self.action_space, self.action_space.sample()).shape
        self.observation_space = {
            "box": spaces.Box(-10.0, 10.0, shown, np.float32),
            "discrete": spaces.Discrete(5),
            "multi_discrete": spaces.MultiDiscrete([11] * shown[0]),
            "multi_binary": spaces.MultiBinary(shown[0]),
            "dict": spaces.Dict(
                {
                    "noise": spaces.Box(-1.0, 1.0, (2, 2), np.float32),
                    "shown": spaces.Box(-10.0, 10.0, shown, np.float32),
                }
            ),
            "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(-10.0, 10.0, shown, np.float32))),
        }[obs]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.action_space.seed(seed)
        self.taken: list[Any] = []
        return self._show(), {}

    def _show(self) -> Any:
        self._wanted = self.action_space.sample()
        shown = _as_vector(self.action_space, self._wanted).astype(np.float32)
        return {
            "box": lambda: shown,
            "discrete": lambda: np.int64(len(self.taken) % 5),
            "multi_discrete": lambda: np.clip(shown + 5, 0, 10).astype(np.int64),
            "multi_binary": lambda: (shown > 0).astype(np.int8),
            "dict": lambda: {
                "noise": self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32),
                "shown": shown,
            },
            "tuple": lambda: (np.int64(len(self.taken) % 3), shown),
        }[self._kind]()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), (action, self.action_space)
        self.taken.append(action)
        wanted, done = _as_vector(self.action_space, self._wanted), _as_vector(self.action_space, action)
        real = np.issubdtype(self.action_space.dtype, np.floating)
        reward = 1 - float(np.square(wanted - done).mean()) if real else float((wanted == done).mean())
        return self._show(), reward, False, len(self.taken) == 16, {}


def _as_vector(space: spaces.Space, action: Any) -> np.ndarray:
    return np.atleast_1d(np.asarray(action))


class Bars(gymnasium.Env):
    """A bar of light in one of four quarters of an image; the action that names the quarter is rewarded by 1."""

    def __init__(self, kind: str = "last", size: int = 36, dtype: str = "uint8") -> None:
        shape = {
            "last": (size, size, 3),
            "first": (2, size, size),
            "gray": (size, size),
            "dict": (size, size, 1),
        }[kind]
        self._image, self._kind = spaces.Box(0, 255, shape, np.dtype(dtype).type), kind
        self.observation_space = (
            spaces.Dict({"camera": self._image, "speed": spaces.Box(-9.0, 9.0, (2,), np.float32)})
            if kind == "dict"
            else self._image
        )
        self.action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._show(), {}

    def _show(self) -> Any:
        self._quarter = int(self.np_random.integers(4))
        image = np.zeros(self._image.shape, self._image.dtype)
        size = image.shape[1]
        columns = slice(self._quarter * size // 4, (self._quarter + 1) * size // 4)
        image[(slice(None), slice(None), columns) if self._kind == "first" else (slice(None), columns)] = 255
        return {"camera": image, "speed": np.full(2, 7.0, np.float32)} if self._kind == "dict" else image

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self._quarter)
        self._step += 1
        return self._show(), reward, False, self._step == 16, {}


class Same(gymnasium.ObservationWrapper):
    """Returns observations as they are."""

    def observation(self, observation: Any) -> Any:
        return observation


def stacked(frames: int = 4, hidden: bool = False, **kwargs: Any) -> gymnasium.Env:
    """Bars with this many frames in an observation. hidden: a wrapper that may change them is around the stack."""
    env = gymnasium.wrappers.FrameStackObservation(Bars(**kwargs), frames)
    return Same(env) if hidden else env


gymnasium.register("Echo-v0", Echo)
gymnasium.register("Stacked-v0", stacked)
gymnasium.register("Bars-v0", Bars)
