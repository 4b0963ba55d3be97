"""Which engines run tasks, and how their worlds are made."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco

from rayagi.envs.families import Place
from rayagi.envs.mujoco_cpu.worlds import CpuWorlds
from rayagi.envs.tasks.worlds import Worlds

ENGINES: tuple[str, ...] = ("mujoco_cpu",)


def make_worlds(engine: str, model: mujoco.MjModel, names: Sequence[str], place: Place) -> Worlds:
    """Worlds of a model, with the fields ``names`` beside qpos and qvel."""
    assert engine in ENGINES
    return CpuWorlds(model, place.num_envs, place.num_threads, names)
