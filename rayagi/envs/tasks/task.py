"""What a task is: a model, and pure functions over tensors that hold for any number of worlds, on any engine and device."""

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
"""Of the tasks of GMI-DRL Table 4."""

Columns = slice | Tensor
"""Columns of a field: a slice where they lie one after the other, which needs no copy, else their indices."""
Memory = dict[str, Tensor]
"""A task's own tensors by name, (N, ...) each: what it must remember between steps."""


@dataclass(slots=True)
class State:
    """What a task's functions see of N worlds: tensors on the engine's device, of its real type.

    Attributes:
        fields: qpos (N, nq), qvel (N, nv) and the fields that the task names, (N, ...). As MuJoCo leaves them after its
            last substep: what derives from the state (sensors, xpos) describes the state before that substep.
        memory: the task's own tensors
        actions: what the policy did last, clipped to [-1, 1]; zero in a new episode   (N, action_dim)
        draws: uniform numbers in [0, 1) of this step                                  (N, num_step_draws)
        seen: what ``TaskFunctions.memoize`` has worked out
    """

    fields: Mapping[str, Tensor]
    memory: Memory
    actions: Tensor
    draws: Tensor
    memo: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Start:
    """How M episodes begin: qpos (M, nq), qvel (M, nv), and every tensor of the memory, (M, ...)."""

    qpos: Tensor
    qvel: Tensor
    memory: Memory = field(default_factory=dict)


@dataclass(slots=True)
class StepOutcome:
    """What a step led to.

    Attributes:
        rewards: of the step                                                                     (N,)
        terminated: whether the task ended                                                       (N,) bool
        memory: the memory's tensors that change, whole
        terms: what the rewards are made of, for people to read, by ``Task.reward_terms``; (N,) each
    """

    rewards: Tensor
    terminated: Tensor
    memory: Memory = field(default_factory=dict)
    terms: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task and its options; small, and picklable, so that it travels to any process. ``rules`` binds it to a device."""

    xml_file: str = ""
    """Another model: a file of the user's, with the parts that the task names in ``needs``. Empty: the task's own."""
    frame_skip: int = 1
    """Substeps of physics for one action."""
    randomize: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Quantities that differ between worlds, and the ranges of their factors: see ``randomisation.QUANTITIES``."""

    description: ClassVar[str] = ""
    model_file: ClassVar[str] = ""
    """The task's own model: a path from the folder of the module that says it."""
    max_episode_steps: ClassVar[int] = 1000
    action_dim: ClassVar[int] = 0
    obs_dim: ClassVar[int] = 0
    fields: ClassVar[tuple[str, ...]] = ()
    """MjData fields that it reads beside qpos and qvel."""
    num_start_draws: ClassVar[int] = 0
    """Uniform numbers that a start takes."""
    num_step_draws: ClassVar[int] = 0
    """Uniform numbers that a step takes, such as for a new goal."""
    reward_terms: ClassVar[tuple[str, ...]] = ()
    """Names of ``StepOutcome.terms``. Their sums over each episode are logged; learning takes the rewards alone."""
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """What the model must hold, by kind (actuator, sensor, body, joint, site, geom) and name."""

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
            ModelError: there is no such file, MuJoCo refuses it, or a part is missing.
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
_FORMER_NAMES = {"outcome": "reward_and_done"}


class TaskFunctions(ABC, Generic[TaskT]):
    """A task's functions, bound to a model and a device. Pure: the same arguments give the same results, nothing is kept,
    nothing waits for the device (no ``item``, no ``nonzero``, no indexing by a mask), so that a GPU can capture them. On a
    CPU they are compiled where ``compiled/tensors.py`` knows all that they do, and else run on torch.
    """

    def __init__(
        self, task: TaskT, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.task, self.model, self.device, self.dtype = task, model, device, dtype
        self.dt = float(model.opt.timestep * task.frame_skip)
        """Seconds between two actions."""

    def constant(self, values: Any) -> Tensor:
        """Numbers as a tensor of this device and real type."""
        return torch.as_tensor(values, dtype=self.dtype, device=self.device)

    def sensor(self, *names: str) -> Columns:
        """Where the named sensors' values are in ``sensordata``, one after the other."""
        sensors = [self.model.sensor(name) for name in names]
        return self._columns([(int(sensor.adr[0]), int(sensor.dim[0])) for sensor in sensors])

    def joint(self, *names: str) -> tuple[Columns, Columns]:
        """Where the named joints, of one degree of freedom each, are in ``qpos`` and in ``qvel``."""
        joints = [self.model.joint(name) for name in names]
        positions = [(int(joint.qposadr[0]), 1) for joint in joints]
        return self._columns(positions), self._columns([(int(joint.dofadr[0]), 1) for joint in joints])

    def actuator(self, *names: str) -> Columns:
        """Where the named actuators are among the controls."""
        return self._columns([(int(self.model.actuator(name).id), 1) for name in names])

    def _columns(self, runs: Sequence[tuple[int, int]]) -> Columns:
        """Columns from (first, number) each."""
        places = [first + k for first, number in runs for k in range(number)]
        if places == list(range(places[0], places[0] + len(places))):
            return slice(places[0], places[0] + len(places))
        return torch.tensor(places, device=self.device)

    def scatter_controls(self, columns: Columns, values: Tensor) -> Tensor:
        """Controls (N, nu): ``values`` (N, size) in these columns, zero in others that a user's model may have."""
        if isinstance(columns, slice) and columns == slice(0, self.model.nu):
            return values
        controls = values.new_zeros((len(values), self.model.nu))
        controls[:, columns] = values
        return controls

    def memoize(self, state: State, what: Callable[[State], Memoized]) -> Memoized:
        """``what(state)``, worked out once for outcome and observation; it must not read the memory."""
        if what.__name__ not in state.memo:
            state.memo[what.__name__] = what(state)
        return cast("Memoized", state.memo[what.__name__])

    told = scatter_controls
    once = memoize

    def __init_subclass__(cls) -> None:
        """A method under the name that it had before counts as well."""
        super().__init_subclass__()
        for old, new in _FORMER_NAMES.items():
            if old in vars(cls) and new not in vars(cls):
                setattr(cls, new, vars(cls)[old])

    @abstractmethod
    def start(self, draws: Tensor) -> Start:
        """Random starts of M episodes from uniform numbers, (M, num_start_draws)."""

    @abstractmethod
    def control(self, state: State) -> tuple[Tensor, Memory]:
        """What the actuators are told, (N, nu), and the memory's tensors that change.

        ``state.actions`` are the new ones. Of the fields only qpos and qvel may be read: a resumed run has no others yet.
        """

    @abstractmethod
    def reward_and_done(self, state: State) -> StepOutcome:
        """Rewards and ends of the step that led here."""

    @abstractmethod
    def observe(self, state: State) -> Tensor:
        """What the policy sees, (N, obs_dim). ``state.memory`` is as ``reward_and_done`` or ``start`` left it."""
