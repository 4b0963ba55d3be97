"""OpenGL without a display. MuJoCo reads MUJOCO_GL when it is imported, which is before a user's module is."""

from __future__ import annotations

import ctypes
import os
import sys


def default_to_egl() -> None:
    """Set MUJOCO_GL to egl, unless it is set, there is a display, or this is not Linux.

    Otherwise MuJoCo and Gymnasium try GLFW first, which reports success although it cannot open a window.
    """
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform == "linux" and not has_display and not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = "egl"


def _has_egl() -> bool:
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        return False
    return True


if _has_egl():  # without the library, the import of MuJoCo itself may fail
    default_to_egl()
