"""One world of a task as a Gymnasium environment with rgb_array frames, for videos of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer
from numpy.typing import NDArray

from rayagi.envs.providers import VecEnvArgs
from rayagi.envs.tasks.provider import OwnTaskProvider, make_task, options_of
from rayagi.envs.tasks.vec_env import TaskVecEnv

_ENGINE = "mujoco_cpu"
_WIDTH, _HEIGHT = 640, 480
"""Pixels of a frame: MuJoCo's usual framebuffer."""


class RenderedTask(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """Steps exactly as the batched environments do. Frames show the model's first camera, else MuJoCo's free camera.

    Raises:
        EnvError: as the construction of the batched environments.
    """

    def __init__(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        self._env_id, self._kwargs = env_id, dict(kwargs)
        self._env = self._begun(0)
        task = make_task(env_id, options_of(env_id, kwargs)[1])
        model = task.load()
        self._data = mujoco.MjData(model)
        self._model = model
        buffer = model.vis.global_  # a model may ask for a smaller one, beyond which pixels are arbitrary
        buffer.offwidth, buffer.offheight = max(buffer.offwidth, _WIDTH), max(buffer.offheight, _HEIGHT)
        self.mujoco_renderer = MujocoRenderer(
            model, self._data, width=_WIDTH, height=_HEIGHT, camera_id=0 if model.ncam else -1
        )
        self.render_mode = "rgb_array"
        fps = max(1, round(1.0 / (model.opt.timestep * task.frame_skip)))
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": fps}
        info = self._env.info
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (info.obs_dim,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (info.action.dim,), np.float32)

    def _begun(self, seed: int) -> TaskVecEnv:
        return OwnTaskProvider().make(self._env_id, _ENGINE, self._kwargs, VecEnvArgs(1, 0, seed, 1))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode: the first one of ``seed`` if given, else the next one."""
        if seed is not None:
            self._env.close()
            self._env = self._begun(seed)
        return self._env.reset()[0].numpy(), {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """One step. An episode that ended is reset automatically; its final observation is returned.

        ``info`` holds ``reward_NAME`` for each of the task's reward terms, as in Gymnasium's MuJoCo tasks.
        """
        step = self._env.step(torch.as_tensor(action, dtype=torch.float32).unsqueeze(0))
        obs = step.final_obs if len(step.final_ids) else step.obs
        terms = [] if step.reward_terms is None else step.reward_terms[0].tolist()
        info = {
            f"reward_{name}": value for name, value in zip(self._env.info.reward_terms, terms, strict=True)
        }
        return obs[0].numpy(), float(step.rewards), bool(step.terminated), bool(step.truncated), info

    def render(self) -> NDArray[np.uint8]:
        """A frame of the current state, (height, width, 3)."""
        for name in ("qpos", "qvel"):
            getattr(self._data, name)[:] = self._env.fields[name][0].numpy()
        mujoco.mj_forward(self._model, self._data)
        frame: NDArray[np.uint8] = self.mujoco_renderer.render("rgb_array")
        return frame

    def close(self) -> None:
        """Release the world and the rendering context."""
        self._env.close()
        viewer = self.mujoco_renderer.viewer
        if viewer is not None:  # freed later, it would take the objects of the context that is then current
            viewer.make_context_current()
            viewer.con.free()
        self.mujoco_renderer.close()
