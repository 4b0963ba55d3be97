"""Environments that draw with MuJoCo's own renderer find OpenGL without a display, though rayagi imports it first."""

import ctypes
import os
import sys

import pytest

from rayagi.envs.opengl import default_to_egl
from tests.programs import run_python

VARIABLES = ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY")


@pytest.mark.skipif(sys.platform != "linux", reason="EGL is the default on Linux only")
@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, "egl"),
        ({"MUJOCO_GL": ""}, "egl"),
        ({"MUJOCO_GL": "osmesa"}, "osmesa"),
        ({"DISPLAY": ":0"}, None),
        ({"WAYLAND_DISPLAY": "wayland-0"}, None),
    ],
)
def test_egl_is_the_default_without_a_display(monkeypatch, given, chosen):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    default_to_egl()
    assert os.environ.get("MUJOCO_GL") == chosen


def test_an_environment_of_a_user_s_module_draws():
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        pytest.skip("this machine has no EGL")
    draw = (
        "from rayagi.envs import make_env_factory\n"
        "make = make_env_factory('experiments.pixels.env:PixelReach-v0')\n"
        "print(make(num_envs=2, first_env_index=0, seed=0, num_threads=1).reset().amax(1).tolist())"
    )
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = run_python(draw, env=clean, check=False)
    assert done.stdout.strip() == "[255, 255]", done.stderr
