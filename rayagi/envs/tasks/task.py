"""Base classes of a task: an MJCF model, and pure functions over tensors whose first dimension is the world.

The same functions run for any number of worlds, on any engine and device.
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import mujoco
import torch
from torch import Tensor

from rayagi.envs.errors import ModelError

MODELS = Path(__file__).parent / "models"
"""Folder of the models of GMI-DRL Table 4's tasks."""

Columns = slice | Tensor
"""Columns of a field: a slice where they are contiguous (indexing makes a view), else their indices (a copy)."""
Memory = dict[str, Tensor]
"""A task's own state between steps: tensors by name, (N, ...) each."""


@dataclass(slots=True)
class State:
    """Input of a task's functions for N worlds: tensors on the engine's device, of its real type.

    Attributes:
        fields: qpos (N, nq), qvel (N, nv) and the fields that the task names, (N, ...). As MuJoCo leaves them after its
            last substep: derived quantities (sensors, xpos) describe the state before that substep.
        memory: the task's own tensors
        actions: the policy's latest actions, clipped to [-1, 1]; zero in a new episode   (N, action_dim)
        draws: uniform random numbers in [0, 1) of this step                              (N, num_step_draws)
        memo: results cached by ``TaskFunctions.memoize``
    """

    fields: Mapping[str, Tensor]
    memory: Memory
    actions: Tensor
    draws: Tensor
    memo: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Start:
    """Initial state of M episodes: qpos (M, nq), qvel (M, nv), and every tensor of the memory, (M, ...)."""

    qpos: Tensor
    qvel: Tensor
    memory: Memory = field(default_factory=dict)


@dataclass(slots=True)
class StepOutcome:
    """Rewards and terminations of a step.

    Attributes:
        rewards: of the step                                                                     (N,)
        terminated: whether the task ended                                                       (N,) bool
        memory: new values of the memory tensors that change, for all N worlds
        terms: reward terms by the names of ``Task.reward_terms``, logged only                   (N,) each
    """

    rewards: Tensor
    terminated: Tensor
    memory: Memory = field(default_factory=dict)
    terms: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task's declaration and options. Picklable. ``rules`` binds it to a model and a device."""

    xml_file: str = ""
    """Path of an MJCF file to use instead of the task's own; it must have the parts that ``needs`` names."""
    frame_skip: int = 1
    """Physics substeps per action."""
    randomize: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Domain randomisation: ranges of the factors by quantity, see ``randomisation.QUANTITIES``."""

    description: ClassVar[str] = ""
    model_file: ClassVar[str] = ""
    """The task's own model: a path relative to the folder of the module that declares it."""
    max_episode_steps: ClassVar[int | None] = 1000
    """Steps after which an episode is truncated; None: no limit."""
    action_dim: ClassVar[int] = 0
    obs_dim: ClassVar[int] = 0
    fields: ClassVar[tuple[str, ...]] = ()
    """MjData fields that the task reads besides qpos and qvel."""
    num_start_draws: ClassVar[int] = 0
    """Uniform random numbers that ``TaskFunctions.start`` takes per world."""
    num_step_draws: ClassVar[int] = 0
    """Uniform random numbers that a step takes per world, such as for a new goal."""
    reward_terms: ClassVar[tuple[str, ...]] = ()
    """Names of ``StepOutcome.terms``. Their sums over each episode are logged; learning uses the rewards alone."""
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Names that the model must define, by kind (actuator, sensor, body, joint, site, geom)."""

    @property
    def path(self) -> Path:
        """The model's file."""
        if self.xml_file:
            return Path(os.path.expanduser(self.xml_file))
        owner = next(cls for cls in type(self).__mro__ if "model_file" in vars(cls))
        return Path(inspect.getfile(owner)).parent / self.model_file

    def load(self) -> mujoco.MjModel:
        """Compile the model.

        Raises:
            ModelError: there is no such file, MuJoCo refuses it, or a name of ``needs`` is missing.
        """
        path = self.path
        if not path.is_file():
            raise ModelError(str(path), "there is no such file")
        try:
            model = mujoco.MjModel.from_xml_path(str(path))
        except ValueError as error:
            raise ModelError(str(path), str(error)) from error
        for kind, names in self.needs.items():
            here = {getattr(model, kind)(i).name for i in range(_count(model, kind))}
            missing = [name for name in names if name not in here]
            if missing:
                raise ModelError(
                    str(path), f"it lacks the {kind} {', '.join(missing)} (it has {', '.join(sorted(here))})"
                )
        return model

    @abstractmethod
    def rules(self, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype) -> TaskFunctions[Any]:
        """The task's functions for this model, on this device."""


_COUNTS = {
    "actuator": "nu",
    "sensor": "nsensor",
    "body": "nbody",
    "joint": "njnt",
    "site": "nsite",
    "geom": "ngeom",
}


def _count(model: mujoco.MjModel, kind: str) -> int:
    return int(getattr(model, _COUNTS[kind]))


TaskT = TypeVar("TaskT", bound=Task)
Memoized = TypeVar("Memoized")


class TaskFunctions(ABC, Generic[TaskT]):
    """A task's functions, bound to a model and a device.

    They are pure: the result depends on the arguments and on constants alone, and no attribute changes. They do not
    synchronise with the device (no ``item``, no ``nonzero``, no indexing by a mask), so that a CUDA graph can capture
    them. On a CPU they are compiled to C if ``compiled/tensors.py`` supports every operation; otherwise torch runs them.
    """

    def __init__(
        self, task: TaskT, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.task, self.model, self.device, self.dtype = task, model, device, dtype
        self.dt = float(model.opt.timestep * task.frame_skip)
        """Seconds between two actions."""

    def constant(self, values: Any) -> Tensor:
        """Numbers as a tensor on this device, of this real type."""
        return torch.as_tensor(values, dtype=self.dtype, device=self.device)

    def sensor(self, *names: str) -> Columns:
        """Columns of the named sensors' values in ``sensordata``, in the order of the names."""
        sensors = [self.model.sensor(name) for name in names]
        return self._columns([(int(sensor.adr[0]), int(sensor.dim[0])) for sensor in sensors])

    def joint(self, *names: str) -> tuple[Columns, Columns]:
        """Columns of the named joints in ``qpos`` and in ``qvel``; each joint has one degree of freedom."""
        joints = [self.model.joint(name) for name in names]
        positions = [(int(joint.qposadr[0]), 1) for joint in joints]
        return self._columns(positions), self._columns([(int(joint.dofadr[0]), 1) for joint in joints])

    def actuator(self, *names: str) -> Columns:
        """Columns of the named actuators in ``ctrl``."""
        return self._columns([(int(self.model.actuator(name).id), 1) for name in names])

    def _columns(self, runs: Sequence[tuple[int, int]]) -> Columns:
        """Columns of ranges (first, number): a slice if together they are contiguous."""
        indices = [first + k for first, number in runs for k in range(number)]
        if indices == list(range(indices[0], indices[0] + len(indices))):
            return slice(indices[0], indices[0] + len(indices))
        return torch.tensor(indices, device=self.device)

    def scatter_controls(self, columns: Columns, values: Tensor) -> Tensor:
        """Controls (N, nu): ``values`` (N, size) in these columns, zero for a user's model's further actuators."""
        if isinstance(columns, slice) and columns == slice(0, self.model.nu):
            return values
        controls = values.new_zeros((len(values), self.model.nu))
        controls[:, columns] = values
        return controls

    def memoize(self, state: State, what: Callable[[State], Memoized]) -> Memoized:
        """``what(state)``, computed once per step for reward and observation; it must not read the memory."""
        if what.__name__ not in state.memo:
            state.memo[what.__name__] = what(state)
        return cast("Memoized", state.memo[what.__name__])

    @abstractmethod
    def start(self, draws: Tensor) -> Start:
        """Initial states of M episodes from uniform random numbers, (M, num_start_draws)."""

    @abstractmethod
    def control(self, state: State) -> tuple[Tensor, Memory]:
        """Actuator controls (N, nu), and new values of the memory tensors that change.

        ``state.actions`` are the new actions. Only the fields qpos and qvel may be read: after resuming from a
        checkpoint, derived fields are not computed yet.
        """

    @abstractmethod
    def reward_and_done(self, state: State) -> StepOutcome:
        """Rewards and terminations of the step that led to ``state``."""

    @abstractmethod
    def observe(self, state: State) -> Tensor:
        """Observations (N, obs_dim). ``state.memory`` is as ``reward_and_done`` or ``start`` left it."""
