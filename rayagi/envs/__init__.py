"""Batched environments: rayagi's own engines, and any other Gymnasium environment through an adapter."""

from rayagi.envs import opengl  # noqa: F401 - first: it has to precede the import of MuJoCo
from rayagi.envs.errors import (
    EnvError,
    EnvironmentFailedError,
    EnvironmentOptionError,
    RenderingError,
    SimulationError,
    UnknownEnvironmentError,
    UnsupportedSpaceError,
)
from rayagi.envs.registry import EnvListing, default_hidden, env_info, list_envs, make_env_factory, named_env
from rayagi.envs.rendering import has_pictures, render_env

__all__ = [
    "EnvError",
    "EnvListing",
    "EnvironmentFailedError",
    "EnvironmentOptionError",
    "RenderingError",
    "SimulationError",
    "UnknownEnvironmentError",
    "UnsupportedSpaceError",
    "default_hidden",
    "env_info",
    "has_pictures",
    "list_envs",
    "make_env_factory",
    "named_env",
    "render_env",
]
