"""Holds an Isaac simulator for rayagi, which is in another process: started as a script, by another Python.

Isaac Gym wants Python 3.8, and to be imported before torch; Isaac Lab wants the Python and the torch of its Isaac Sim; both
hold one simulation per process. So nothing of rayagi is imported here, this file keeps to Python 3.8, and what only the
other Python has is imported in functions. Lines of JSON go both ways, arrays through shared memory::

    -> {"engine", "task", "num_envs", "seed", "memory", "replies"}       the last two: file descriptors
    <- {"obs_dim", "action_dim", "low", "high", "max_episode_steps"}, or {"missing": package}, or {"failed": reason}
    -> {"do": "reset", "seed": s} or {"do": "step"}                       until the end of input
    <- {}, or {"failed": reason}

Tensors stay on the simulator's device until they are copied into the shared memory. [unverified on GPU]
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import random
import sys
import traceback
from typing import Any

DEVICE = "cuda:0"
"""The first that the process sees: its GMI's."""


def num_bytes(num_envs: int, obs_dim: int, action_dim: int) -> int:
    """Of the shared memory."""
    return 4 * num_envs * (2 * obs_dim + action_dim + 1) + 2 * num_envs


def views(memory: Any, num_envs: int, obs_dim: int, action_dim: int) -> dict[str, Any]:
    """The shared memory as numpy arrays: actions, obs, final_obs, rewards float32; terminated, truncated uint8."""
    import numpy as np

    fields = (
        ("actions", "float32", (num_envs, action_dim)),
        ("obs", "float32", (num_envs, obs_dim)),
        ("final_obs", "float32", (num_envs, obs_dim)),
        ("rewards", "float32", (num_envs,)),
        ("terminated", "uint8", (num_envs,)),
        ("truncated", "uint8", (num_envs,)),
    )
    arrays, offset = {}, 0
    for name, dtype, shape in fields:
        array = np.frombuffer(memory, dtype, count=int(np.prod(shape)), offset=offset).reshape(shape)
        arrays[name], offset = array, offset + array.nbytes
    return arrays


class GymTask:
    """A task of IsaacGymEnvs 1.5.1, by its VecTask interface.

    VecTask marks an environment that ended in ``reset_buf`` and lets the task reset it in the next step: what ``step``
    returns is the episode's true last observation, and the new episode's first one comes a step later.
    """

    packages = ("isaacgym", "isaacgymenvs")

    def __init__(self, task: str, num_envs: int, seed: int) -> None:
        import isaacgym  # noqa: F401  (it refuses to come after torch)
        import isaacgymenvs
        import torch

        self._torch = torch
        self._seed(seed)
        self._env = isaacgymenvs.make(
            seed=seed,
            task=task,
            num_envs=num_envs,
            sim_device=DEVICE,
            rl_device=DEVICE,
            graphics_device_id=0,
            headless=True,
            multi_gpu=False,
            virtual_screen_capture=False,
            force_render=False,
        )
        self._env.reset()
        self.obs_dim, self.action_dim = int(self._env.num_obs), int(self._env.num_acts)
        self.low = self._env.action_space.low.tolist()
        self.high = self._env.action_space.high.tolist()
        self.max_episode_steps = int(self._env.max_episode_length)

    def _seed(self, seed: int) -> None:
        import numpy as np

        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  (what the tasks draw from)
        self._torch.manual_seed(seed)

    def reset(self, seed: int) -> Any:
        """New episodes everywhere, in one step without actions. Returns the observations."""
        self._seed(seed)
        self._env.reset_buf[:] = 1
        obs, _, ended, _ = self._env.step(self._env.zero_actions())
        if bool(ended.all()):
            raise RuntimeError("the task does not reset environments by itself, as those of AMP do not")
        return obs["obs"]

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Observations, rewards, terminated, truncated, and the true last observations."""
        given = self._torch.as_tensor(actions).to(self._env.rl_device)
        obs, rewards, ended, extras = self._env.step(given)
        ended, timed_out = ended != 0, extras["time_outs"] != 0
        return obs["obs"], rewards, ended & ~timed_out, ended & timed_out, obs["obs"]


class LabTask:
    """A task of Isaac Lab 2.x: DirectRLEnv or ManagerBasedRLEnv, which have the same interface.

    Both reset an environment that ended in the same step: what ``step`` returns is the new episode's first observation, and
    the old one's last is lost.
    """

    packages = ("isaaclab", "isaaclab_tasks")

    def __init__(self, task: str, num_envs: int, seed: int) -> None:
        from isaaclab.app import AppLauncher

        self._app = AppLauncher(headless=True, device=DEVICE).app  # before anything else of Isaac Lab
        import gymnasium
        import isaaclab_tasks  # noqa: F401  (registers the tasks)
        import torch
        from isaaclab_tasks.utils import parse_env_cfg

        self._torch = torch
        config = parse_env_cfg(task, device=DEVICE, num_envs=num_envs)
        config.seed = seed
        self._env: Any = gymnasium.make(task, cfg=config).unwrapped
        self._finite_horizon = bool(getattr(config, "is_finite_horizon", False))
        seen, done = self._env.single_observation_space["policy"], self._env.single_action_space
        for name, space in (("observations", seen), ("actions", done)):
            if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
                raise ValueError(f"its {name} are {space}, and rayagi takes one flat Box")
        self.obs_dim, self.action_dim = seen.shape[0], done.shape[0]
        self.low, self.high = done.low.tolist(), done.high.tolist()
        self.max_episode_steps = int(self._env.max_episode_length)

    def reset(self, seed: int) -> Any:
        """New episodes everywhere. Returns the observations."""
        obs, _ = self._env.reset(seed=seed)
        return obs["policy"]

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, None]:
        """Observations, rewards, terminated, truncated, and no last observations."""
        given = self._torch.as_tensor(actions).to(self._env.device)
        obs, rewards, terminated, timed_out, _ = self._env.step(given)
        if self._finite_horizon:  # the time limit is part of the task: nothing comes after it
            terminated = terminated | timed_out
        return obs["policy"], rewards, terminated, timed_out, None


TASKS: dict[str, Any] = {"isaacgym": GymTask, "isaaclab": LabTask}


class Host:
    """Answers what rayagi asks."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._task: Any = None
        self._replies = os.fdopen(job["replies"], "w")
        self._arrays: dict[str, Any] = {}

    def run(self) -> int:
        """Make the task, then do what is asked until the end of input. Returns the exit code."""
        missing = [name for name in TASKS[self._job["engine"]].packages if not importlib.util.find_spec(name)]
        if missing:
            return self._tell({"missing": missing[0]})
        try:
            self._make()
            for line in iter(sys.stdin.readline, ""):
                request = json.loads(line)
                self._reset(request["seed"]) if request["do"] == "reset" else self._step()
                self._tell({})
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = (str(error).strip().splitlines() or ["no reason given"])[0]
            where = f"{os.path.basename(place.filename)}, line {place.lineno}"
            return self._tell({"failed": f"{type(error).__name__}: {text} ({where})"})
        return 0

    def _tell(self, reply: dict[str, Any]) -> int:
        self._replies.write(json.dumps(reply) + "\n")
        self._replies.flush()
        return 1

    def _make(self) -> None:
        job = self._job
        task = self._task = TASKS[job["engine"]](job["task"], job["num_envs"], job["seed"])
        self._tell(
            {
                "obs_dim": task.obs_dim,
                "action_dim": task.action_dim,
                "low": task.low,
                "high": task.high,
                "max_episode_steps": task.max_episode_steps,
            }
        )

    def _reset(self, seed: int) -> None:
        if not self._arrays:  # the other side has given the memory its size by now
            sizes = (self._job["num_envs"], self._task.obs_dim, self._task.action_dim)
            self._arrays = views(mmap.mmap(self._job["memory"], num_bytes(*sizes)), *sizes)
        self._put("obs", self._task.reset(seed))

    def _step(self) -> None:
        obs, rewards, terminated, truncated, final_obs = self._task.step(self._arrays["actions"])
        if final_obs is None:  # the last that there is: what was acted on
            self._arrays["final_obs"][:] = self._arrays["obs"]
        else:
            self._put("final_obs", final_obs)
        self._put("obs", obs)
        self._put("rewards", rewards)
        self._put("terminated", terminated)
        self._put("truncated", truncated)

    def _put(self, name: str, tensor: Any) -> None:
        self._arrays[name][:] = tensor.detach().cpu().numpy()


if __name__ == "__main__":
    code = Host(json.loads(sys.stdin.readline())).run()
    sys.stderr.flush()
    os._exit(code)  # simulators may hang in taking themselves apart
