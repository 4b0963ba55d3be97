"""A single environment that draws itself, for videos of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium

from rayagi.envs.errors import RenderingError
from rayagi.envs.gymnasium_adapter import make_one


def render_env(env_id: str, kwargs: Mapping[str, Any] | None = None) -> gymnasium.Env[Any, Any]:
    """Gymnasium's own environment with ``render_mode="rgb_array"``; it steps as what rayagi trains on does.

    Observations are flat vectors, as policies get them. One frame is drawn on the spot, so that a machine
    that cannot draw says so before an episode has run.

    Raises:
        RenderingError: the environment has no frames, or this machine cannot draw them.
    """
    env = make_one(env_id, {**(kwargs or {}), "render_mode": "rgb_array"})
    try:
        if env.render_mode != "rgb_array":
            raise RenderingError(env_id, "it offers no rgb_array frames")
        env.reset(seed=0)
        frame = env.render()
    except RenderingError:
        env.close()
        raise
    except Exception as error:  # GL libraries fail with exceptions of their own, from ImportError to ctypes'
        raise RenderingError(env_id, f"{type(error).__name__}: {error}") from error
    if frame is None:
        env.close()
        raise RenderingError(env_id, "it returned no frame")
    return env
