"""Rendering: a single environment with rgb_array frames, for videos of a policy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator
from numpy.typing import NDArray

from rayagi.envs.errors import EnvError, RenderingError, failure_text
from rayagi.envs.opengl import default_to_egl

_GL_BACKENDS = ("egl", "glfw", "osmesa")
_GL_ADVICE = (
    "MuJoCo draws with OpenGL; on a machine without a display, install EGL or OSMesa and set MUJOCO_GL=egl or "
    "MUJOCO_GL=osmesa"
)


def has_pictures(env_id: str) -> bool:
    """Whether this kind of environment has frames at all; ``render_env`` also checks the machine."""
    # Imported here: it loads torch, which listing environments does not need.
    from rayagi.envs.fused.provider import FusedProvider
    from rayagi.envs.tasks.provider import OwnTaskProvider

    if FusedProvider.find(env_id) is not None:
        return False
    spec = gymnasium.registry.get(env_id.rpartition(":")[2])
    if spec is None:  # rayagi's own, or a simulator's, as EnvPool's, which gives no frames
        return ":" in env_id or OwnTaskProvider.find(env_id) is not None
    if spec.entry_point is None:
        return True
    point = spec.entry_point
    made_by = load_env_creator(point) if isinstance(point, str) else point
    # A function says nothing about what it makes.
    return not hasattr(made_by, "metadata") or "rgb_array" in made_by.metadata.get("render_modes", ())


def render_env(env_id: str, kwargs: Mapping[str, Any] | None = None) -> gymnasium.Env[Any, Any]:
    """One environment with ``render_mode="rgb_array"``, rayagi's own or Gymnasium's, with the dynamics used in training.

    Observations are flat vectors, as policies get them. One frame is rendered at once, so that a machine that cannot render
    fails before an episode has run. Without a display, MUJOCO_GL becomes egl unless set.

    Raises:
        RenderingError: the environment has no frames, or this machine cannot render them.
        EnvError: the environment cannot be constructed.
    """
    # Imported here: they load torch.
    from rayagi.envs.gymnasium_adapter import make_one
    from rayagi.envs.tasks.provider import OwnTaskProvider
    from rayagi.envs.tasks.rendered import RenderedTask

    if not has_pictures(env_id):
        raise RenderingError(
            env_id, "it offers no rgb_array frames (a Gymnasium class declares them in its metadata)"
        )
    _choose_gl(env_id)
    options = dict(kwargs or {})
    env = (
        RenderedTask(env_id, options)
        if OwnTaskProvider.find(env_id) is not None
        else make_one(env_id, {**options, "render_mode": "rgb_array"})
    )
    advice = _GL_ADVICE if hasattr(env.unwrapped, "mujoco_renderer") else ""
    try:
        if env.unwrapped.render_mode != "rgb_array":
            raise RenderingError(env_id, "it offers no rgb_array frames")
        env.reset(seed=0)
        picture(env_id, env, advice)
    except EnvError:
        env.close()
        raise
    except Exception as error:  # of a task's functions
        env.close()
        raise RenderingError(env_id, failure_text(error), advice) from error
    return env


def picture(env_id: str, env: gymnasium.Env[Any, Any], advice: str = "") -> NDArray[Any]:
    """The frame of the state that an environment is in, (height, width, 3). ``advice``: of the error.

    Raises:
        RenderingError: it returned none, or raised an exception.
    """
    try:
        frame = env.render()
    except Exception as error:  # OpenGL libraries raise various exceptions, from ImportError to ctypes'
        raise RenderingError(env_id, failure_text(error), advice) from error
    if not isinstance(frame, np.ndarray) or frame.ndim not in (2, 3):
        what = "no frame" if frame is None else f"a {type(frame).__name__} of shape {np.shape(frame)}"
        raise RenderingError(env_id, f"it returned {what}, where rgb_array is (height, width, 3)", advice)
    return frame


def _choose_gl(env_id: str) -> None:
    chosen = os.environ.get("MUJOCO_GL")
    if chosen and chosen.lower() not in _GL_BACKENDS:
        raise RenderingError(
            env_id, f"MUJOCO_GL is {chosen!r}, not one of {', '.join(_GL_BACKENDS)}", _GL_ADVICE
        )
    default_to_egl()
