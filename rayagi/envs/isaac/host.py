"""Simulator process: runs an Isaac simulator for rayagi, as a script under another Python.

Isaac Gym needs Python 3.8 and must be imported before torch. Isaac Lab needs the Python and torch of its Isaac Sim. Both
support one simulation per process. So this file imports nothing of rayagi, uses Python 3.8 syntax, and imports the
simulators' packages inside functions. Commands and replies are lines of JSON; arrays are in shared memory::

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
"""The first visible GPU: the GMI's slice."""


def num_bytes(num_envs: int, obs_dim: int, action_dim: int) -> int:
    """Size of the shared memory."""
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
    """A task of IsaacGymEnvs 1.5.1, through its VecTask interface.

    VecTask marks an ended environment in ``reset_buf``, and the task resets it in the next step. So ``step`` returns the
    episode's last observation; the new episode's first one comes a step later.
    """

    packages = ("isaacgym", "isaacgymenvs")

    def __init__(self, task: str, num_envs: int, seed: int) -> None:
        import isaacgym  # noqa: F401  (must be imported before torch)
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
        np.random.seed(seed)  # noqa: NPY002  (the generator that the tasks use)
        self._torch.manual_seed(seed)

    def reset(self, seed: int) -> Any:
        """Start new episodes in every environment, by one step with zero actions. Returns the observations."""
        self._seed(seed)
        self._env.reset_buf[:] = 1
        obs, _, ended, _ = self._env.step(self._env.zero_actions())
        if bool(ended.all()):
            raise RuntimeError("the task does not reset environments by itself, as those of AMP do not")
        return obs["obs"]

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Observations, rewards, terminated, truncated, final observations."""
        given = self._torch.as_tensor(actions).to(self._env.rl_device)
        obs, rewards, ended, extras = self._env.step(given)
        ended, timed_out = ended != 0, extras["time_outs"] != 0
        return obs["obs"], rewards, ended & ~timed_out, ended & timed_out, obs["obs"]


class LabTask:
    """A task of Isaac Lab 2.x: DirectRLEnv or ManagerBasedRLEnv, which have the same interface.

    Both reset an ended environment in the same step: ``step`` returns the new episode's first observation, and the last
    observation of the ended one is lost.
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
        obs_space, action_space = (
            self._env.single_observation_space["policy"],
            self._env.single_action_space,
        )
        for name, space in (("observations", obs_space), ("actions", action_space)):
            if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
                raise ValueError(f"its {name} are {space}, and rayagi takes one flat Box")
        self.obs_dim, self.action_dim = obs_space.shape[0], action_space.shape[0]
        self.low, self.high = action_space.low.tolist(), action_space.high.tolist()
        self.max_episode_steps = int(self._env.max_episode_length)

    def reset(self, seed: int) -> Any:
        """Start new episodes in every environment. Returns the observations."""
        obs, _ = self._env.reset(seed=seed)
        return obs["policy"]

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, None]:
        """Observations, rewards, terminated, truncated, and None for the final observations."""
        given = self._torch.as_tensor(actions).to(self._env.device)
        obs, rewards, terminated, timed_out, _ = self._env.step(given)
        if self._finite_horizon:  # the time limit is part of the task: no bootstrapping
            terminated = terminated | timed_out
        return obs["policy"], rewards, terminated, timed_out, None


TASKS: dict[str, Any] = {"isaacgym": GymTask, "isaaclab": LabTask}


class Host:
    """Executes rayagi's requests."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._task: Any = None
        self._replies = os.fdopen(job["replies"], "w")
        self._arrays: dict[str, Any] = {}

    def run(self) -> int:
        """Construct the task, then serve requests until the end of input. Returns the exit code."""
        missing = [name for name in TASKS[self._job["engine"]].packages if not importlib.util.find_spec(name)]
        if missing:
            return self._reply({"missing": missing[0]})
        try:
            self._make()
            for line in iter(sys.stdin.readline, ""):
                request = json.loads(line)
                self._reset(request["seed"]) if request["do"] == "reset" else self._step()
                self._reply({})
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = (str(error).strip().splitlines() or ["no reason given"])[0]
            where = f"{os.path.basename(place.filename)}, line {place.lineno}"
            return self._reply({"failed": f"{type(error).__name__}: {text} ({where})"})
        return 0

    def _reply(self, reply: dict[str, Any]) -> int:
        self._replies.write(json.dumps(reply) + "\n")
        self._replies.flush()
        return 1

    def _make(self) -> None:
        job = self._job
        task = self._task = TASKS[job["engine"]](job["task"], job["num_envs"], job["seed"])
        self._reply(
            {
                "obs_dim": task.obs_dim,
                "action_dim": task.action_dim,
                "low": task.low,
                "high": task.high,
                "max_episode_steps": task.max_episode_steps,
            }
        )

    def _reset(self, seed: int) -> None:
        if not self._arrays:  # rayagi has sized the shared memory by now
            sizes = (self._job["num_envs"], self._task.obs_dim, self._task.action_dim)
            self._arrays = views(mmap.mmap(self._job["memory"], num_bytes(*sizes)), *sizes)
        self._put("obs", self._task.reset(seed))

    def _step(self) -> None:
        obs, rewards, terminated, truncated, final_obs = self._task.step(self._arrays["actions"])
        if final_obs is None:  # lost in the simulator: the previous observation instead
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
    os._exit(code)  # simulators may hang at interpreter shutdown
