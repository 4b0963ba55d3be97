"""What a simulator is: a few functions of scalars, from which every form of it is made.

The functions see one environment. Their numbers are reals; they may be torch tensors over environments, Python floats, or
traced expressions, so they are written with arithmetic, comparisons, ``&``, ``|``, ``~`` and ``ops``, and never branch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

from actors.protocols import ActionSpec

Scalar = Any
"""A real (or the outcome of a comparison) of one environment, in whatever form the function is run."""

ENGINE = "fused"


@dataclass(frozen=True, slots=True)
class Discrete:
    """One of ``count`` choices. ``step`` sees its number as a real: 0.0, 1.0, ..."""

    count: int


@dataclass(frozen=True, slots=True)
class Box:
    """One real per dimension. ``step`` sees a tuple, clipped to the box."""

    low: tuple[float, ...]
    high: tuple[float, ...]


class Transition(NamedTuple):
    """What ``step`` returns."""

    state: Sequence[Scalar]
    reward: Scalar
    terminated: Scalar


class Simulator(ABC):
    """Base of simulators. Options are constructor arguments, kept as attributes; the functions are pure."""

    description: ClassVar[str] = ""
    """What it is, in a few words."""
    state: ClassVar[tuple[str, ...]]
    """Names of the state's reals."""
    actions: Discrete | Box
    max_episode_steps: int | None = None
    """After which a time limit cuts the episode."""
    num_draws: ClassVar[int]
    """Uniform numbers that ``start`` takes."""

    @abstractmethod
    def start(self, draws: Sequence[Scalar]) -> Sequence[Scalar]:
        """First state of an episode from uniform numbers in [0, 1)."""

    @abstractmethod
    def step(self, s: Any, action: Any) -> tuple[Sequence[Scalar], Scalar, Scalar]:
        """Next state, reward, whether the task ended. ``s`` has the state's names, in order: ``s.x``, or ``x, y = s``."""

    def observe(self, s: Any) -> Sequence[Scalar]:
        """Observation of a state; by default the state itself."""
        return tuple(s)

    @property
    def name(self) -> str:
        """For messages and kernels."""
        return type(self).__name__


@cache
def _state_type(names: tuple[str, ...]) -> Any:
    return namedtuple("State", names)


def named(simulator: Simulator, values: Sequence[Scalar]) -> Any:
    """A state's reals under their names."""
    return _state_type(tuple(simulator.state))(*values)


def action_spec(simulator: Simulator) -> ActionSpec:
    """The actions as policies know them."""
    actions = simulator.actions
    if isinstance(actions, Discrete):
        return ActionSpec(kind="discrete", dim=1, num_choices=actions.count)
    return ActionSpec(kind="continuous", dim=len(actions.low), low=actions.low, high=actions.high)


def action_dim(simulator: Simulator) -> int:
    """Reals of one action."""
    return 1 if isinstance(simulator.actions, Discrete) else len(simulator.actions.low)


def between(draw: Scalar, low: float, high: float) -> Scalar:
    """A uniform number in [0, 1) stretched to [low, high)."""
    return low + (high - low) * draw
