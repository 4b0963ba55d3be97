"""What a process imports is part of the design: it decides start-up time and memory."""

import functools
import subprocess
import sys

import pytest


@functools.cache
def modules_after(statement):
    """Names of the modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


def test_what_runs_inside_a_gmi_never_imports_rllib():
    # RLlib costs 128 MB a process and a second and a half.
    loaded = modules_after(
        "import actors.gmi, actors.groups, rayagi.algorithms.program, rayagi.coordinator, rayagi.cli.main"
    )
    assert "rayagi.algorithms.ppo" in loaded
    assert "ray.rllib" not in loaded
    assert "ray.tune" not in loaded


@pytest.mark.parametrize("heavy", ["ray", "torch", "mujoco", "matplotlib", "gymnasium"])
def test_help_is_instant_because_nothing_heavy_is_imported(heavy):
    assert heavy not in modules_after("import rayagi, rayagi.cli.parser")


@pytest.mark.parametrize("heavy", ["ray", "torch", "pyarrow"])
def test_replay_stores_need_neither_ray_nor_torch(heavy):
    assert heavy not in modules_after("import actors.replay")


@pytest.mark.parametrize("heavy", ["numpy", "pyarrow", "ray", "torch", "rayagi.algorithms"])
def test_the_profiler_starts_in_any_process_without_anything_heavy(heavy):
    assert heavy not in modules_after("from rayagi import profiler; import rayagi.profiler.injection")
