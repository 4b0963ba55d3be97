"""Base class of fused simulators: a few scalar functions of one environment, from which every backend is generated.

The functions are called with Python floats, torch tensors over environments, or traced expressions. So they use arithmetic,
comparisons, ``&``, ``|``, ``~`` and ``ops``, and never branch on a value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from actors.protocols import ActionSpec

Scalar = Any
"""A real or a truth value of one environment: a number, a tensor over environments, or an expression."""


@dataclass(frozen=True, slots=True)
class Discrete:
    """One of ``count`` choices. ``step`` gets its index as a real: 0.0, 1.0, ..."""

    count: int


@dataclass(frozen=True, slots=True)
class Box:
    """One real per dimension. ``step`` gets a tuple, clipped to the box."""

    low: tuple[float, ...]
    high: tuple[float, ...]


class Simulator(ABC):
    """Base class. Options are constructor arguments, kept as attributes; the functions are pure."""

    description: ClassVar[str] = ""
    """Description for ``rayagi envs``, in a few words."""
    state: ClassVar[tuple[str, ...]]
    """Names of the state's reals."""
    actions: Discrete | Box
    max_episode_steps: int | None = None
    """Time limit: after this many steps an episode is truncated."""
    num_draws: ClassVar[int]
    """Uniform random numbers that ``start`` takes."""

    @abstractmethod
    def start(self, draws: Sequence[Scalar]) -> Sequence[Scalar]:
        """Initial state of an episode from uniform random numbers in [0, 1)."""

    @abstractmethod
    def step(self, s: Any, action: Any) -> tuple[Sequence[Scalar], Scalar, Scalar]:
        """Next state, reward, terminated. ``s`` has the state's names, in order: ``s.x``, or ``x, y = s``."""

    def observe(self, s: Any) -> Sequence[Scalar]:
        """Observation of a state; by default the state itself."""
        return tuple(s)

    @property
    def name(self) -> str:
        """Name in error messages and generated code."""
        return type(self).__name__


@cache
def _state_type(names: tuple[str, ...]) -> Any:
    return namedtuple("State", names)


def named(simulator: Simulator, values: Sequence[Scalar]) -> Any:
    """The state's reals as a named tuple."""
    return _state_type(tuple(simulator.state))(*values)


def action_spec(simulator: Simulator) -> ActionSpec:
    """The simulator's actions as an ActionSpec."""
    actions = simulator.actions
    if isinstance(actions, Discrete):
        return ActionSpec(kind="discrete", dim=1, num_choices=actions.count)
    return ActionSpec(kind="continuous", dim=len(actions.low), low=actions.low, high=actions.high)


def action_dim(simulator: Simulator) -> int:
    """Number of reals of one action."""
    return 1 if isinstance(simulator.actions, Discrete) else len(simulator.actions.low)


def between(draw: Scalar, low: float, high: float) -> Scalar:
    """A uniform number in [0, 1) scaled to [low, high)."""
    return low + (high - low) * draw
