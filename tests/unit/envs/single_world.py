"""One world stepped by a plain MuJoCo loop, for comparison with a task's environments: shared by the tests of tasks."""

from __future__ import annotations

from pathlib import Path

import mujoco
import torch

from rayagi.envs import make_env_factory
from rayagi.envs.tasks.task import State, Task, TaskFunctions
from rayagi.envs.tasks.vec_env import TaskVecEnv


def make_envs(
    task_id: str, num_envs: int, *, first: int = 0, seed: int = 3, threads: int = 1, **kwargs
) -> TaskVecEnv:
    factory = make_env_factory(task_id, engine="mujoco_cpu", kwargs=kwargs)
    env = factory(num_envs=num_envs, first_env_index=first, seed=seed, num_threads=threads)
    assert isinstance(env, TaskVecEnv)
    return env


def copy_of(model: mujoco.MjModel, env: TaskVecEnv, world: int) -> mujoco.MjData:
    """MuJoCo's own data in the state of one of the environments."""
    data = mujoco.MjData(model)
    state = env.state_dict()["worlds"]
    for name in ("qpos", "qvel", "qacc_warmstart"):
        getattr(data, name)[:] = state[name][world]
    return data


def reward_of(rules: TaskFunctions, env: TaskVecEnv) -> torch.Tensor:
    """Rewards of the last step in float64, except of environments that were reset."""
    saved = env.state_dict()
    nothing = torch.zeros((env.num_envs, 0), dtype=torch.float64)
    return rules.reward_and_done(State(env.fields, saved["memory"], saved["actions"], nothing)).rewards


def random_actions(num_envs: int, dim: int, seed: int) -> torch.Tensor:
    """Uniform in [-1.5, 1.5]: some must be clipped."""
    return 3.0 * torch.rand((num_envs, dim), generator=torch.Generator().manual_seed(seed)) - 1.5


def without(tmp_path: Path, task: type[Task], line: str) -> str:
    """The task's model less the lines that hold ``line``, as a file of a user's."""
    lines = task().path.read_text().splitlines()
    kept = [text for text in lines if line not in text]
    assert len(kept) < len(lines)
    path = tmp_path / "model.xml"
    path.write_text("\n".join(kept))
    return str(path)
