"""A task's functions with worlds of mujoco_cpu, in float64 and without auto-reset: stepped by the tests of tasks."""

from __future__ import annotations

from dataclasses import replace

import mujoco
import numpy as np
import torch
from torch import Tensor

from rayagi.envs.mujoco_cpu.batched_sim import CpuBatchedSim
from rayagi.envs.tasks.task import Memory, State, Task, TaskFunctions

CPU = torch.device("cpu")


def bound(task: Task) -> TaskFunctions:
    """The task's rules on the CPU."""
    return task.rules(task.load(), device=CPU, dtype=torch.float64)


def sensor_row(model: mujoco.MjModel, **values: list[float]) -> Tensor:
    """sensordata of one world, zero but for the sensors named, (nsensordata,)."""
    row = torch.zeros(model.nsensordata, dtype=torch.float64)
    for name, numbers in values.items():
        start = int(model.sensor(name).adr[0])
        row[start : start + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    return row


class TaskWorlds:
    """N worlds of a task, begun from random numbers of its own."""

    def __init__(self, task: Task, num_worlds: int, seed: int) -> None:
        self.task, self.rules = task, bound(task)
        self.worlds = CpuBatchedSim(self.rules.model, num_worlds, 1, task.fields)
        self.generator = torch.Generator().manual_seed(seed)
        begun = self.rules.start(self.draws(task.num_start_draws))
        self.worlds.restart(torch.arange(num_worlds), begun.qpos, begun.qvel)
        self.memory: Memory = begun.memory
        self.actions = torch.zeros((num_worlds, task.action_dim), dtype=torch.float64)

    def draws(self, count: int) -> Tensor:
        """Uniform numbers, (N, count)."""
        return torch.rand((self.worlds.num_worlds, count), generator=self.generator, dtype=torch.float64)

    def random_actions(self) -> Tensor:
        """Actions in [-1, 1]."""
        return 2.0 * self.draws(self.task.action_dim) - 1.0

    def observe(self) -> Tensor:
        """(N, obs_dim)."""
        return self.rules.observe(self.state(self.draws(0)))

    def state(self, draws: Tensor) -> State:
        """Input of the task's functions."""
        return State(self.worlds.fields, self.memory, self.actions, draws)

    def step(self, actions: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Observations, rewards, terminations. Terminated worlds continue."""
        state = self.state(self.draws(self.task.num_step_draws) if draws is None else draws)
        self.actions = actions
        controls, changed = self.rules.control(replace(state, actions=actions))
        self.memory = self.memory | changed
        assert self.worlds.step(controls, self.task.frame_skip) is None
        outcome = self.rules.reward_and_done(self.state(state.draws))
        self.memory = self.memory | outcome.memory
        return self.rules.observe(self.state(state.draws)), outcome.rewards, outcome.terminated

    def data(self, world: int) -> mujoco.MjData:
        """A world as MuJoCo's own data, which goes on as it does."""
        data = mujoco.MjData(self.rules.model)
        for name, values in self.worlds.state_dict().items():
            field = getattr(data, name)
            if np.ndim(field):
                field[:] = values[world]
            else:
                setattr(data, name, float(values[world].item()))
        return data
