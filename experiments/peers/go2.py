"""UniLab's task Go2JoystickFlat as a task of rayagi: a quadruped follows velocity commands.

Its scene, its physics (two substeps of 10 ms), its 49 observations, its 12 actions, its terms of the reward and its end. Not
here: gains of the drives that differ by an episode, and the critic's velocity of the base beside the policy's observations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from rayagi.envs.tasks import Start, StepOutcome, Task, TaskFunctions
from rayagi.envs.tasks.task import Memory, State

LEGS = ("FL", "FR", "RL", "RR")
PARTS = tuple(f"{leg}_{part}" for leg in LEGS for part in ("hip", "thigh", "calf"))
STANDING = (0.0, 0.8, -1.5) * 2 + (0.0, 1.0, -1.5) * 2
"""Joint positions of its keyframe, rad."""
HALF_TURNS = (0.0, 0.5, 0.5, 0.0)
"""Phases of the legs in a trot, turns."""
GAIT_HZ, STANCE, SIGMA = 2.0, 0.6, 0.5


@dataclass(frozen=True, kw_only=True)
class Go2(Task):
    """A quadruped follows a velocity command, a new one in every episode."""

    frame_skip: int = 2

    description: ClassVar[str] = "a quadruped follows velocity commands"
    max_episode_steps: ClassVar[int] = 1000
    action_dim: ClassVar[int] = 12
    obs_dim: ClassVar[int] = 49
    fields: ClassVar[tuple[str, ...]] = ("sensordata",)
    num_start_draws: ClassVar[int] = 12
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "joint": tuple(f"{part}_joint" for part in PARTS),
        "actuator": PARTS,
    }

    def load(self) -> mujoco.MjModel:
        """With substeps of 10 ms, which UniLab sets."""
        model = super().load()
        model.opt.timestep = 0.01
        return model

    def rules(self, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype) -> Go2Rules:
        """Bound to a model."""
        return Go2Rules(self, model, device=device, dtype=dtype)


class Go2Rules(TaskFunctions[Go2]):
    """Memory: ``command``, velocities ahead and to the left, m/s, and turn, rad/s, (N, 3); ``time``, s, (N, 1); ``before``,
    the previous actions, (N, 12).
    """

    def __init__(self, task: Go2, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(task, model, device=device, dtype=dtype)
        self.joints, self.speeds = self.joint(*(f"{part}_joint" for part in PARTS))
        self.drives = self.actuator(*PARTS)
        self.gyro, self.up, self.velocity = map(self.sensor, ("gyro", "upvector", "local_linvel"))
        self.contacts = self.sensor(*(f"{leg}_foot_contact" for leg in LEGS))
        heights = [model.sensor(f"{leg}_pos").adr[0] + 2 for leg in LEGS]
        self.heights = torch.tensor([int(height) for height in heights], device=device)
        self.standing, self.qpos0 = self.constant(STANDING), self.constant(model.key_qpos[0])
        self.half_turns = self.constant(HALF_TURNS)
        self.least, self.width = self.constant([-0.6, -0.4, -0.8]), self.constant([1.6, 0.8, 1.6])

    def start(self, draws: Tensor) -> Start:
        """Standing, somewhere, turned, with velocities of up to 0.5 m/s and rad/s."""
        qpos = self.qpos0.repeat(len(draws), 1)
        qpos[:, :2] = draws[:, :2] - 0.5
        yaw = math.pi * (draws[:, 2] - 0.5)  # half of the angle
        qpos[:, 3], qpos[:, 6] = torch.cos(yaw), torch.sin(yaw)
        qvel = draws.new_zeros((len(draws), self.model.nv))
        qvel[:, :6] = draws[:, 3:9] - 0.5
        memory = {
            "command": self.least + self.width * draws[:, 9:12],
            "time": draws.new_zeros((len(draws), 1)),
            "before": draws.new_zeros((len(draws), 12)),
        }
        return Start(qpos, qvel, memory)

    def control(self, state: State) -> tuple[Tensor, Memory]:
        """Target joint positions: the keyframe's + 0.25 a."""
        targets = self.standing + 0.25 * state.actions
        return self.scatter_controls(self.drives, targets), {"time": state.memory["time"] + self.dt}

    def _phases(self, state: State) -> Tensor:
        """Of each leg, in [0, 1): below STANCE it should stand."""
        turns = GAIT_HZ * state.memory["time"] + self.half_turns
        return turns - torch.floor(turns)

    def observe(self, state: State) -> Tensor:
        """Gyroscope, gravity, joints, previous actions, command, phases."""
        qpos, qvel, sensed = state.fields["qpos"], state.fields["qvel"], state.fields["sensordata"]
        parts = (
            sensed[:, self.gyro],
            -sensed[:, self.up],
            qpos[:, self.joints] - self.standing,
            qvel[:, self.speeds],
            state.actions,
            state.memory["command"],
            torch.cos(2 * math.pi * self._phases(state)),
        )
        return torch.cat(parts, -1)

    def reward_and_done(self, state: State) -> StepOutcome:
        """UniLab's terms by its weights, times the seconds of a step; the end is an inclination of 60 degrees."""
        qpos, sensed, command = state.fields["qpos"], state.fields["sensordata"], state.memory["command"]
        velocity, turn, phases = sensed[:, self.velocity], sensed[:, self.gyro], self._phases(state)
        stands, swings = phases < STANCE, phases >= STANCE
        touches = sensed[:, self.contacts] > 0.1
        lift = (sensed[:, self.heights] - 0.1).square()
        weighted = (
            (1.0, torch.exp(-(command[:, :2] - velocity[:, :2]).square().sum(-1) / SIGMA)),
            (0.2, torch.exp(-(command[:, 2] - turn[:, 2]).square() / SIGMA)),
            (-5.0, velocity[:, 2].square()),
            (-0.1, turn[:, :2].square().sum(-1)),
            (-100.0, (qpos[:, 2] - 0.3).square()),
            (-0.005, (state.actions - state.memory["before"]).square().sum(-1)),
            (-0.1, (qpos[:, self.joints] - self.standing).abs().sum(-1)),
            (0.24, (touches == stands).to(velocity.dtype).sum(-1)),
            (4.0, (torch.exp(-lift / 0.01) * swings).sum(-1)),
        )
        reward = self.dt * sum(weight * term for weight, term in weighted)
        fallen = sensed[:, self.up][:, 2] < 0.5
        return StepOutcome(reward, fallen, {"before": state.actions})
