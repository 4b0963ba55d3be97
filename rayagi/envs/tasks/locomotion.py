"""Locomotion tasks: Ant and Humanoid of GMI-DRL (ATC'25) Table 4 run to a distant target.

The counterparts are ``ant.py`` and ``humanoid.py`` of IsaacGymEnvs 1.5.1: same sizes, order, scales, reward terms, weights,
terminations and resets, except as listed. The target is 1000 m ahead, at (1000, 0) m. u(q) is a joint's position scaled to
[-1, 1] by its limits.

| observation, in this order | unit | Ant | Humanoid | difference |
|---|---|---|---|---|
| height of the torso | m | 1 | 1 | |
| velocity of the torso, in its frame | m/s | 3 | 3 | |
| angular velocity of the torso, in its frame | rad/s | 3 | 3, x 0.25 | |
| yaw, roll | rad | 2 | 2 | within (-pi, pi]; Ant's there within [0, 2 pi), with a jump at "ahead" |
| direction of the target minus yaw | rad | 1 | 1 | in the ground plane; there from x and z: always nearly -yaw |
| up: z of the torso's z axis | 1 | 1 | 1 | |
| heading: torso's x axis, projected on the ground plane, . unit vector to the target | 1 | 1 | 1 | |
| u(q) of every joint | 1 | 8 | 21 | the robot is symmetric here: two of Ant's ankles have the other sign there |
| speeds of the joints | rad/s | 8, x 0.2 | 21, x 0.1 | |
| torques at the joints: motor, spring and damper | N m | - | 21, x 0.01 | there with limits' forces |
| force, torque of each foot on its leg, in the foot's frame | N, N m | 24, x 0.1 | 12, x 0.01 | there net |
| previous action | 1 | 8 | 21 | |

| reward | Ant | Humanoid |
|---|---|---|
| progress: decrease of the distance to the target, m/s | 1 | 1 |
| alive: not fallen | 0.5 | 2 |
| up > 0.93 | 0.1 | 0.1 |
| heading: min(heading, 0.8) / 0.8 | 0.5 | 0.5 |
| effort: sum of squared actions | -0.005 | -0.01 |
| energy: sum of abs(action x scaled speed) x strength | -0.05 | -0.05 |
| limits: joints at their limits | -0.1 each with u > 0.99 | -0.25 x sum of strength x max(abs(u) - 0.98, 0) / 0.02 |
| fallen, torso below 0.31 m or 0.8 m: replaces all other terms, and terminates | -2 | -1 |

A motor's strength is its gear divided by the largest gear: 1 for all of Ant's. An action is a torque as a fraction of the
gear, N m. Episodes last 1000 steps of 1/60 s. Progress is computed without subtracting distances near 1000 m, which in
float32 would lose half its digits. Self-collision is off here; the reference's Humanoid has it.

Solver: Newton with elliptic cones, at most 20 iterations. Largest difference of a velocity, m/s or rad/s, from a step with
a converged solver, under random actions: Ant 9e-5 on mujoco_cpu and 1e-4 on mujoco_warp, Humanoid 5e-4 and 3e-4
(experiments.tasks.residuals).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from rayagi.envs.errors import ModelError
from rayagi.envs.tasks.rotations import matrix
from rayagi.envs.tasks.task import Memory, Start, State, StepOutcome, Task, TaskFunctions

_TARGET = (1000.0, 0.0)
_TERMS = ("progress", "alive", "up", "heading", "effort", "energy", "limits", "fallen")


@dataclass(frozen=True, kw_only=True)
class Runner(Task):
    """A robot with a free torso that runs."""

    frame_skip: int = 2
    reset_noise: float = 0.2
    """Half width of the uniform noise on the joints' initial positions, rad; half of it on their speeds, rad/s."""

    joints: ClassVar[tuple[str, ...]] = ()
    """Actuated joints, in the order of the actions; their motors have the same names."""
    feet: ClassVar[tuple[str, ...]] = ()
    turn_scale: ClassVar[float] = 1.0
    reward_terms: ClassVar[tuple[str, ...]] = _TERMS
    speed_scale: ClassVar[float]
    force_scale: ClassVar[float]
    alive_reward: ClassVar[float]
    fallen_reward: ClassVar[float]
    least_height: ClassVar[float]
    action_cost: ClassVar[float]
    energy_cost: ClassVar[float] = 0.05


def _parts(joints: tuple[str, ...], feet: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    """``Task.needs`` of a runner."""
    return {"joint": ("root", *joints), "actuator": joints, "sensor": _wrenches(feet)}


def _wrenches(feet: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{foot}_{kind}" for foot in feet for kind in ("force", "torque"))


@dataclass(slots=True)
class _Pose:
    """Quantities that both reward and observation use.

    Attributes:
        place: x and y of the torso, m                            (N, 2)
        distance: from there to the target, m                     (N,)
        frame: rotation matrix of the torso, its axes as columns  (N, 3, 3)
        direction: angle of the target in the ground plane, rad   (N,)
        up, heading: see the module's first table                 (N,)
        joints: u(q)                                              (N, joints)
        speeds: joint velocities x speed_scale                    (N, joints)
    """

    place: Tensor
    distance: Tensor
    frame: Tensor
    direction: Tensor
    up: Tensor
    heading: Tensor
    joints: Tensor
    speeds: Tensor


class RunnerRules(TaskFunctions[Runner]):
    """Functions that Ant and Humanoid share. Memory: ``place`` (N, 2), ``distance`` (N,) before the step, see ``_Pose``."""

    def __init__(
        self, task: Runner, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(task, model, device=device, dtype=dtype)
        root = model.joint("root")
        if root.type[0] != mujoco.mjtJoint.mjJNT_FREE:
            raise ModelError(str(task.path), "its joint root must be a free joint")
        self.torso, self.torso_speed = int(root.qposadr[0]), int(root.dofadr[0])
        self.positions, self.speeds = self.joint(*task.joints)
        self.motors = self.actuator(*task.joints)
        self.feet = self.sensor(*_wrenches(task.feet))
        limits = self.constant([model.joint(name).range.tolist() for name in task.joints])
        self.low, self.high = limits.unbind(-1)
        self.middle, self.half = (self.high + self.low) / 2, (self.high - self.low) / 2
        gears = self.constant([float(model.actuator(name).gear[0]) for name in task.joints])
        self.strength = gears / gears.max()
        self.qpos0 = self.constant(model.qpos0)
        self.target = self.constant(_TARGET)

    def start(self, draws: Tensor) -> Start:
        """Upright and at rest, with uniform noise on the joints' positions (clamped to their limits) and speeds."""
        noise = (2.0 * draws - 1.0) * self.task.reset_noise  # U(-reset_noise, reset_noise)
        position_noise, speed_noise = noise.chunk(2, -1)
        qpos = self.qpos0.repeat(len(draws), 1)
        qpos[:, self.positions] = torch.clamp(qpos[:, self.positions] + position_noise, self.low, self.high)
        qvel = draws.new_zeros((len(draws), self.model.nv))
        qvel[:, self.speeds] = 0.5 * speed_noise
        place = qpos[:, self.torso : self.torso + 2].clone()
        distance = torch.linalg.vector_norm(self.target - place, dim=-1)
        return Start(qpos, qvel, {"place": place, "distance": distance})

    def control(self, state: State) -> tuple[Tensor, Memory]:
        """Torques, as fractions of the motors' gears."""
        return self.scatter_controls(self.motors, state.actions), {}

    def pose(self, state: State) -> _Pose:
        """Pose of the torso and of the joints."""
        qpos, qvel = state.fields["qpos"], state.fields["qvel"]
        place = qpos[:, self.torso : self.torso + 2].clone()
        to_target = self.target - place
        distance = torch.linalg.vector_norm(to_target, dim=-1)
        frame = matrix(qpos[:, self.torso + 3 : self.torso + 7])
        return _Pose(
            place=place,
            distance=distance,
            frame=frame,
            direction=torch.atan2(to_target[:, 1], to_target[:, 0]),
            up=frame[:, 2, 2],  # cosine between the torso's z axis and the world's
            heading=(frame[:, :2, 0] * to_target).sum(-1) / distance,
            joints=(qpos[:, self.positions] - self.middle) / self.half,  # u(q)
            speeds=self.task.speed_scale * qvel[:, self.speeds],
        )

    def observe(self, state: State) -> Tensor:
        """Observations: the module's first table, row by row."""
        pose, task, at = self.memoize(state, self.pose), self.task, self.torso_speed
        qpos, qvel, frame = state.fields["qpos"], state.fields["qvel"], pose.frame
        yaw = torch.atan2(frame[:, 1, 0], frame[:, 0, 0])
        roll = torch.atan2(frame[:, 2, 1], frame[:, 2, 2])
        velocity = (frame * qvel[:, at : at + 3].unsqueeze(-1)).sum(1)  # R^T v: world frame to torso frame
        posture = torch.stack((yaw, roll, pose.direction - yaw, pose.up, pose.heading), -1)
        parts = (
            qpos[:, self.torso + 2 : self.torso + 3],
            velocity,
            task.turn_scale * qvel[:, at + 3 : at + 6],
            posture,
            pose.joints,
            pose.speeds,
            *self.torques(state),
            task.force_scale * state.fields["sensordata"][:, self.feet],
            state.actions,
        )
        return torch.cat(parts, -1)

    def torques(self, state: State) -> tuple[Tensor, ...]:
        """Observed joint torques, scaled; none by default."""
        return ()

    @abstractmethod
    def limit_cost(self, joints: Tensor) -> Tensor:
        """Cost (N,) of joints, u(q), at their limits."""

    def reward_and_done(self, state: State) -> StepOutcome:
        """Rewards: the module's second table, row by row."""
        pose, task, place = self.memoize(state, self.pose), self.task, state.memory["place"]
        # progress = (d - e) / dt with d, e the distances to target g from positions p (before) and q (now).
        # d^2 - e^2 = |g - p|^2 - |g - q|^2 = (q - p) . (2 g - q - p), and d - e = (d^2 - e^2) / (d + e).
        nearer = ((pose.place - place) * (2.0 * self.target - pose.place - place)).sum(-1)
        progress = nearer / ((state.memory["distance"] + pose.distance) * self.dt)
        # up: 0.1 [up > 0.93].  heading: 0.5 min(heading, 0.8) / 0.8
        up, heading = 0.1 * (pose.up > 0.93).to(self.dtype), (0.5 / 0.8) * pose.heading.clamp(max=0.8)
        # effort: action_cost sum a^2.  energy: energy_cost sum |a x scaled speed| strength
        effort = task.action_cost * state.actions.square().sum(-1)
        energy = task.energy_cost * ((state.actions * pose.speeds).abs() * self.strength).sum(-1)
        limits = self.limit_cost(pose.joints)
        rewards = progress + task.alive_reward + (up + heading) - effort - energy - limits
        # A fallen robot terminates, and fallen_reward replaces all terms.
        fallen = state.fields["qpos"][:, self.torso + 2] < task.least_height
        memory = {"place": pose.place, "distance": pose.distance}
        raw_terms = {
            "progress": progress,
            "up": up,
            "heading": heading,
            "effort": -effort,
            "energy": -energy,
            "limits": -limits,
        }
        terms = {name: value.masked_fill(fallen, 0.0) for name, value in raw_terms.items()}
        terms |= {"alive": task.alive_reward * ~fallen, "fallen": task.fallen_reward * fallen}
        return StepOutcome(rewards.masked_fill(fallen, task.fallen_reward), fallen, memory, terms)


_LEGS = ("front_left", "front_right", "back_left", "back_right")
_ANT_JOINTS = tuple(f"{leg}_{joint}" for leg in _LEGS for joint in ("hip", "ankle"))
_ANT_FEET = tuple(f"{leg}_foot" for leg in _LEGS)


@dataclass(frozen=True, kw_only=True)
class Ant(Runner):
    """A ball with four legs of two joints each. It starts at 0.5 m: at 0.44 m a bent leg would penetrate the floor."""

    description: ClassVar[str] = "a four-legged robot runs to a far target"
    model_file: ClassVar[str] = "models/ant.xml"
    action_dim: ClassVar[int] = 8
    obs_dim: ClassVar[int] = 60
    fields: ClassVar[tuple[str, ...]] = ("sensordata",)
    num_start_draws: ClassVar[int] = 16
    joints: ClassVar[tuple[str, ...]] = _ANT_JOINTS
    feet: ClassVar[tuple[str, ...]] = _ANT_FEET
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = _parts(_ANT_JOINTS, _ANT_FEET)
    speed_scale: ClassVar[float] = 0.2
    force_scale: ClassVar[float] = 0.1
    alive_reward: ClassVar[float] = 0.5
    fallen_reward: ClassVar[float] = -2.0
    least_height: ClassVar[float] = 0.31
    action_cost: ClassVar[float] = 0.005

    def rules(self, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype) -> AntRules:
        """Bound to a model."""
        return AntRules(self, model, device=device, dtype=dtype)


class AntRules(RunnerRules):
    """Ant's functions."""

    def limit_cost(self, joints: Tensor) -> Tensor:
        """0.1 per joint with u > 0.99."""
        return 0.1 * (joints > 0.99).sum(-1, dtype=joints.dtype)


_SIDES = ("right", "left")
_LEG = ("hip_x", "hip_z", "hip_y", "knee", "ankle_y", "ankle_x")
_ARM = ("shoulder_1", "shoulder_2", "elbow")
_HUMANOID_JOINTS = (
    *("abdomen_z", "abdomen_y", "abdomen_x"),
    *(f"{side}_{joint}" for side in _SIDES for joint in _LEG),
    *(f"{side}_{joint}" for side in _SIDES for joint in _ARM),
)
_HUMANOID_FEET = tuple(f"{side}_foot" for side in _SIDES)


@dataclass(frozen=True, kw_only=True)
class Humanoid(Runner):
    """A humanoid robot of 21 motors, 1.5 m tall."""

    description: ClassVar[str] = "a two-legged robot with 21 motors runs to a far target"
    model_file: ClassVar[str] = "models/humanoid.xml"
    action_dim: ClassVar[int] = 21
    obs_dim: ClassVar[int] = 108
    fields: ClassVar[tuple[str, ...]] = ("sensordata", "qfrc_actuator", "qfrc_passive")
    num_start_draws: ClassVar[int] = 42
    joints: ClassVar[tuple[str, ...]] = _HUMANOID_JOINTS
    feet: ClassVar[tuple[str, ...]] = _HUMANOID_FEET
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = _parts(_HUMANOID_JOINTS, _HUMANOID_FEET)
    turn_scale: ClassVar[float] = 0.25
    speed_scale: ClassVar[float] = 0.1
    force_scale: ClassVar[float] = 0.01
    alive_reward: ClassVar[float] = 2.0
    fallen_reward: ClassVar[float] = -1.0
    least_height: ClassVar[float] = 0.8
    action_cost: ClassVar[float] = 0.01

    def rules(self, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype) -> HumanoidRules:
        """Bound to a model."""
        return HumanoidRules(self, model, device=device, dtype=dtype)


class HumanoidRules(RunnerRules):
    """Humanoid's functions."""

    def torques(self, state: State) -> tuple[Tensor, ...]:
        """Torques of motors (qfrc_actuator), springs and dampers (qfrc_passive)."""
        fields, columns = state.fields, self.speeds
        total = fields["qfrc_actuator"][:, columns] + fields["qfrc_passive"][:, columns]
        return (self.task.force_scale * total,)

    def limit_cost(self, joints: Tensor) -> Tensor:
        """(0.25 / 0.02) sum strength x max(|u| - 0.98, 0): 0.25 at the limit of the strongest joint."""
        beyond = (joints.abs() - 0.98).clamp(min=0.0)
        return (0.25 / 0.02) * (beyond * self.strength).sum(-1)
