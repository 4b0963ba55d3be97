"""Reach a target, seen as an image that MuJoCo renders (``PixelReach-v0``) or as a vector (``StateReach-v0``).

``rayagi train experiments.pixels.env:PixelReach-v0`` imports this module, which registers both.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

SIZE = 84
"""Height and width of the image, pixels."""
EPISODE_STEPS = 20
TARGET_RADIUS_M = 0.12
_SUBSTEPS = 10
"""Simulation steps of 0.01 s for one step of the environment."""
_START = 0.9
"""Ball and target start within this distance of the centre in x and y, m."""


class Reach(gymnasium.Env[NDArray[Any], NDArray[np.float32]]):
    """Drives a ball over a plane to a target. A still image shows all but the ball's velocity, which settles within a step.

    Observation: (84, 84, 3) uint8 from above, ball green, target red; or position, velocity and target of the ball, (6,).
    Action: velocity in x and y as a share of 1.5 m/s, (2,). Reward: minus the distance to the target after the step, m.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - Gymnasium's own form

    def __init__(self, *, pixels: bool = True, render_mode: str | None = None) -> None:
        """``pixels``: whether observations are images."""
        self.render_mode, self._pixels = render_mode, pixels
        self._model = _model()
        self._data = mujoco.MjData(self._model)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = (
            spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
            if pixels
            else spaces.Box(-np.inf, np.inf, (6,), np.float32)
        )

    @property
    def offset(self) -> NDArray[np.float64]:
        """From the ball to the target, (2,) m."""
        return self._data.mocap_pos[0, :2] - self._data.qpos

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Place the ball at rest and the target, both at random."""
        super().reset(seed=seed)
        mujoco.mj_resetData(self._model, self._data)
        self._data.qpos[:] = self.np_random.uniform(-_START, _START, 2)
        self._data.mocap_pos[0, :2] = self.np_random.uniform(-_START, _START, 2)
        mujoco.mj_forward(self._model, self._data)
        return self._observe(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """0.1 s with this velocity."""
        self._data.ctrl[:] = self._model.actuator_ctrlrange[:, 1] * action
        mujoco.mj_step(self._model, self._data, _SUBSTEPS)
        mujoco.mj_kinematics(self._model, self._data)  # the image shows the state after the last step
        return self._observe(), -float(np.linalg.norm(self.offset)), False, False, {}

    def _observe(self) -> NDArray[Any]:
        if self._pixels:
            return self.render()
        state = (self._data.qpos, self._data.qvel, self._data.mocap_pos[0, :2])
        return np.concatenate(state).astype(np.float32)

    def render(self) -> NDArray[np.uint8]:
        """The image of the current state, (84, 84, 3)."""
        renderer = _renderer()
        renderer.update_scene(self._data, camera="above")
        return renderer.render()


@cache
def _model() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(str(Path(__file__).with_name("reach.xml")))


@cache
def _renderer() -> mujoco.Renderer:
    """One for all environments of a process: its OpenGL context takes 18 MB and 25 ms."""
    return mujoco.Renderer(_model(), SIZE, SIZE)


gymnasium.register("PixelReach-v0", Reach, max_episode_steps=EPISODE_STEPS)
gymnasium.register("StateReach-v0", Reach, max_episode_steps=EPISODE_STEPS, kwargs={"pixels": False})
