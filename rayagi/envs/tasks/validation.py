"""Validation of a user's task before a run: its declaration, its model, and one step of three worlds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayagi.envs.errors import EnvError, TaskError, failure_text
from rayagi.envs.mujoco_cpu.batched_sim import CpuBatchedSim
from rayagi.envs.tasks.task import Memory, Start, State, StepOutcome, Task, TaskFunctions

_N = 3
"""Worlds of the validation: unlikely to equal another dimension of the model, so that swapped dimensions are detected."""

Result = TypeVar("Result")


def validate_task(env_id: str, task: Task) -> tuple[TaskFunctions[Any], Mapping[str, Tensor]]:
    """Bind a task to its model and step three worlds once, on torch. Returns its functions and the worlds' fields.

    Raises:
        ModelError: there is no model file, MuJoCo refuses it, or a name of ``needs`` is missing.
        TaskError: a method is missing, raises, or returns another type or shape than declared.
    """
    name = type(task).__name__
    for attribute in ("obs_dim", "action_dim"):
        size = getattr(task, attribute)
        if not isinstance(size, int) or size < 1:
            raise TaskError(env_id, f"{name}.{attribute} is {size!r}; it must be a positive integer")
    limit = task.max_episode_steps
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        reason = f"{name}.max_episode_steps is {limit!r}; it must be a positive integer, or None for no limit"
        raise TaskError(env_id, reason)
    if not task.xml_file and not task.model_file:
        raise TaskError(env_id, f"{name}.model_file is empty; it must name an MJCF file beside the module")
    if not all(str(term).isidentifier() for term in task.reward_terms) or isinstance(task.reward_terms, str):
        raise TaskError(env_id, f"{name}.reward_terms is {task.reward_terms!r}; it must be a tuple of names")
    validation = _TaskValidation(env_id, task)
    validation.step_once()
    return validation.rules, validation.worlds.fields


class _TaskValidation:
    """One step of a task's worlds; each result is checked before it is used."""

    def __init__(self, env_id: str, task: Task) -> None:
        self.env_id, self.task = env_id, task
        self.model = task.load()
        rules = self.call(task.rules, "rules", self.model, device=torch.device("cpu"), dtype=torch.float64)
        self.check(
            isinstance(rules, TaskFunctions),
            f"{type(task).__name__}.rules returns a {type(rules).__name__}, not TaskFunctions",
        )
        self.rules = rules
        try:
            self.worlds = CpuBatchedSim(self.model, _N, 1, task.fields)
        except ValueError as error:
            raise TaskError(env_id, f"{type(task).__name__}.fields: {error}") from error
        self.memory: Memory = {}

    def step_once(self) -> None:
        """Call start, control, physics, reward_and_done and observe."""
        task, rules, model = self.task, self.rules, self.model
        generator = torch.Generator().manual_seed(0)
        draws = torch.rand((_N, task.num_start_draws), generator=generator, dtype=torch.float64)
        start = self.call(rules.start, "start", draws)
        self.kind("start", start, Start)
        self.shape("start's qpos", start.qpos, (_N, model.nq))
        self.shape("start's qvel", start.qvel, (_N, model.nv))
        self.remember("start", start.memory, start.memory)
        self.worlds.restart(torch.arange(_N), start.qpos, start.qvel)

        actions = torch.zeros((_N, task.action_dim), dtype=torch.float64)
        draws = torch.rand((_N, task.num_step_draws), generator=generator, dtype=torch.float64)
        state = State(self.worlds.fields, self.memory, actions, draws)
        controlled = self.call(rules.control, "control", state)
        self.check(
            isinstance(controlled, tuple) and len(controlled) == 2,
            f"{self.where}.control returns a {type(controlled).__name__}; it must return (controls, memory)",
        )
        controls, changed = controlled
        self.shape("control's controls", controls, (_N, model.nu))
        self.remember("control", changed, self.memory)
        self.worlds.step(controls.to(torch.float64), task.frame_skip)

        state = State(self.worlds.fields, self.memory, actions, draws)
        outcome = self.call(rules.reward_and_done, "reward_and_done", state)
        self.kind("reward_and_done", outcome, StepOutcome)
        self.shape("reward_and_done's rewards", outcome.rewards, (_N,))
        self.shape("reward_and_done's terminated", outcome.terminated, (_N,), torch.bool)
        self.remember("reward_and_done", outcome.memory, self.memory)
        self.check(
            {*outcome.terms} == {*task.reward_terms},
            f"{self.where}.reward_and_done has the reward terms {', '.join(outcome.terms) or 'none'}; "
            f"{type(task).__name__}.reward_terms has {', '.join(task.reward_terms) or 'none'}",
        )
        for key, values in outcome.terms.items():
            self.shape(f"reward_and_done's term {key!r}", values, (_N,), values.dtype)
        self.shape("observe's result", self.call(rules.observe, "observe", state), (_N, task.obs_dim))

    @property
    def where(self) -> str:
        return type(self.rules).__name__

    def call(self, function: Callable[..., Result], name: str, *args: Any, **kwargs: Any) -> Result:
        """Call the user's code; an exception becomes a TaskError with file and line."""
        try:
            return function(*args, **kwargs)
        except EnvError:
            raise
        except Exception as error:
            raise TaskError(self.env_id, f"{name}, {failure_text(error)}") from error

    def check(self, holds: bool, reason: str) -> None:
        """Raise TaskError unless it holds."""
        if not holds:
            raise TaskError(self.env_id, reason)

    def kind(self, name: str, given: object, wanted: type) -> None:
        """Check the type of a function's result."""
        self.check(
            isinstance(given, wanted),
            f"{self.where}.{name} returns a {type(given).__name__}; it must return {wanted.__name__}(...)",
        )

    def shape(
        self, name: str, given: object, wanted: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> None:
        """Check a tensor's shape and dtype; messages write N for the number of worlds."""
        self.check(
            isinstance(given, Tensor),
            f"{self.where}: {name} is a {type(given).__name__}; it must be a tensor",
        )
        assert isinstance(given, Tensor)
        self.check(
            tuple(given.shape) == wanted,
            f"{self.where}: {name} has the shape {_text(tuple(given.shape))}; it must be {_text(wanted)}, N worlds first",
        )
        right = given.dtype == dtype if dtype else given.is_floating_point()
        self.check(right, f"{self.where}: {name} is {given.dtype}; it must be {dtype or 'of floating point'}")

    def remember(self, name: str, changed: Mapping[str, Tensor], known: Memory) -> None:
        """Update the memory; a step may only change tensors that ``start`` sets, and keeps their shapes."""
        self.check(isinstance(changed, dict), f"{self.where}.{name}: its memory is not a dictionary")
        for key, values in changed.items():
            self.check(
                key in known, f"{self.where}.{name} changes the memory {key!r}, which start does not set"
            )
            self.check(
                isinstance(values, Tensor) and values.shape[:1] == (_N,) and values.shape == known[key].shape,
                f"{self.where}.{name}: the memory {key!r} must have the shape that start gives it, N worlds first",
            )
        self.memory = {**self.memory, **changed}


def _text(shape: tuple[int, ...]) -> str:
    """A shape with N in place of the number of worlds."""
    sizes = [str(size) for size in shape]
    if shape[:1] == (_N,):
        sizes[0] = "N"
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
