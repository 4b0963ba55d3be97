"""Exceptions of environments, whose messages name the value, the limit and a remedy; and of users' code, as one sentence."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path


class EnvError(Exception):
    """Base class of this package's exceptions."""


class ForkedEnvError(EnvError):
    """A process forked after an environment was made uses it, and has none of its threads."""

    def __init__(self, owner: int) -> None:
        super().__init__(owner)
        self.owner = owner

    def __str__(self) -> str:
        return (
            f"this environment was made in process {self.owner}, and the threads that step it are not in process "
            f"{os.getpid()}, which was forked: make it after the fork, or with one thread"
        )


class ClosedEnvError(EnvError):
    """Environments are used after they were closed."""

    def __init__(self, env_id: str) -> None:
        super().__init__(env_id)
        self.env_id = env_id

    def __str__(self) -> str:
        return f"{self.env_id}: these environments are closed; make new ones to reset and step them"


class _NamedError(EnvError):
    """What is wrong (``reason``) with something that has a name: ``NAME: REASON``."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class UnknownEnvironmentError(EnvError):
    """Neither rayagi nor Gymnasium has an environment of this id."""

    def __init__(self, env_id: str, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(env_id, nearest)
        self.env_id, self.nearest = env_id, nearest

    def __str__(self) -> str:
        near = f"; did you mean {', '.join(self.nearest)}?" if self.nearest else "."
        return (
            f"no environment is called {self.env_id!r}{near} "
            f"`rayagi envs` lists rayagi's own, gymnasium.pprint_registry() every Gymnasium id; "
            f"an id that your own module registers is MODULE:ID."
        )


class EnvironmentOptionError(_NamedError):
    """An unknown option of an environment, or an invalid value."""


class ModelError(_NamedError):
    """A task cannot use a model file, which is the name."""

    def __str__(self) -> str:
        return f"model {super().__str__()}"


class TaskError(_NamedError):
    """A user's task is invalid: a method is missing, raises, or has a wrong result."""


class SimulatorError(_NamedError):
    """A fused simulator cannot be traced. Its name has the function, with file and line if known."""


class KernelError(_NamedError):
    """A kernel cannot be built here. Its name has the simulator and the backend."""


class MemoryShortError(EnvError):
    """The worlds do not fit into free memory; nothing was allocated."""

    def __init__(
        self, engine: str, num_worlds: int, bytes_per_world: int, free_bytes: int, device: str
    ) -> None:
        super().__init__(engine, num_worlds, bytes_per_world, free_bytes, device)
        self.engine, self.num_worlds, self.device = engine, num_worlds, device
        self.bytes_per_world, self.free_bytes = bytes_per_world, free_bytes

    @property
    def most_worlds(self) -> int:
        """Largest number of worlds that fit."""
        return self.free_bytes // self.bytes_per_world

    def __str__(self) -> str:
        needed = self.num_worlds * self.bytes_per_world
        return (
            f"{self.engine} needs {needed / 1e9:,.1f} GB for {self.num_worlds:,} worlds, and {self.free_bytes / 1e9:,.1f} "
            f"GB are free on {self.device}: at most {self.most_worlds:,} fit; lower num_envs"
        )


class UnsupportedSpaceError(EnvError):
    """An observation or action space that rayagi does not support."""

    def __init__(self, env_id: str, space: str, hint: str) -> None:
        super().__init__(env_id, space, hint)
        self.env_id, self.space, self.hint = env_id, space, hint

    def __str__(self) -> str:
        return f"{self.env_id} has the space {self.space}, which rayagi does not learn from; {self.hint}"


class SimulationError(EnvError):
    """A simulation became unstable.

    Args:
        env_index: global index of the environment, over all GMIs.
        step: step of its episode, from 1.
        quantity: the quantity that was NaN, infinite or huge.
    """

    def __init__(self, env_index: int, step: int, quantity: str) -> None:
        super().__init__(env_index, step, quantity)
        self.env_index, self.step, self.quantity = env_index, step, quantity

    def __str__(self) -> str:
        return (
            f"environment {self.env_index} became unstable in step {self.step} of its episode: "
            f"{self.quantity} is NaN, infinite or above 1e10; if it is the action, check the policy "
            f"(learning rate, loss), otherwise the environment's options (model file, frame_skip)"
        )


class EnvironmentFailedError(_NamedError):
    """The code of an environment raised an exception, or returned something of another shape than it declares.

    Args:
        env_id: the environment's id.
        where: the environment and the step of its episode, or the reset.
        reason: what was raised and in which line, or what was returned and what was expected.
    """

    def __init__(self, env_id: str, where: str, reason: str) -> None:
        super().__init__(f"{env_id}, {where}", reason)
        self.args = env_id, where, reason


class FrameStackError(EnvError):
    """Observations do not continue the stacks of frames before them."""

    def __init__(self, env_id: str, frames: int) -> None:
        super().__init__(env_id, frames)
        self.env_id, self.frames = env_id, frames

    def __str__(self) -> str:
        return (
            f"{self.env_id}: an observation does not continue the stack of {self.frames} frames before it, which a replay "
            "stores frame by frame: if the environment changes an array that it has returned, let it return copies"
        )


class SimulatorLostError(_NamedError):
    """An external simulator process exited, failed, or does not respond."""

    def __str__(self) -> str:
        return f"the simulator of {self.name} {self.reason}"


class RenderingError(EnvError):
    """A frame could not be rendered. ``advice``: what to install or set, if known."""

    def __init__(self, env_id: str, reason: str, advice: str = "") -> None:
        super().__init__(env_id, reason, advice)
        self.env_id, self.reason, self.advice = env_id, reason, advice

    def __str__(self) -> str:
        advice = f". {self.advice}" if self.advice else ""
        return f"{self.env_id} cannot be rendered here: {self.reason}{advice}"


_LIBRARIES = re.compile(r"-packages[/\\](gymnasium[/\\](?!envs)|(mujoco|numpy|ray|torch)[/\\])")
_INSIDE = (str(Path(__file__).parent), "<frozen ")
_IN_CALLER = " in the code that called it"
_STDLIB = sysconfig.get_path("stdlib")


def failure_text(error: BaseException, otherwise: str = "") -> str:
    """The exception's first line, with ``file:line`` of its last frame outside rayagi, libraries and Python.

    ``otherwise``: where it was raised, if there is no such frame.
    """
    first_line = next(iter(str(error).strip().splitlines()), "it gives no reason")
    return f"{type(error).__name__}{place_text(error) or otherwise}: {first_line}"


def place_text(error: BaseException) -> str:
    """`` at file:line`` of the exception's last frame outside rayagi, libraries and Python; empty if there is none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


RETURNED = {
    "reset": ("observation", "info"),
    "step": ("observation", "reward", "terminated", "truncated", "info"),
}
"""What these methods of a Gymnasium environment return."""


def wrong_return(method: str, returned: str) -> str:
    """The sentence for a method that returned something else."""
    return f"{method} must return ({', '.join(RETURNED[method])}); it returned {returned}"


def _unpacking_text(error: BaseException) -> str:
    """``wrong_return`` if one of Gymnasium's wrappers failed to unpack what an environment returned; else empty."""
    frames, message = traceback.extract_tb(error.__traceback__), str(error)
    if (
        not isinstance(error, ValueError | TypeError)
        or "unpack" not in message
        or not _is_library(frames[-1].filename)
    ):
        return ""
    methods = [method for method in RETURNED if f".{method}(" in (frames[-1].line or "")]
    if not methods:
        return ""
    got, kind = re.search(r"got (\d+)", message), re.search(r"non-iterable (\w+)", message)
    if got:
        returned = f"{got[1]} values"
    elif kind:
        returned = "None" if kind[1] == "NoneType" else f"a value of type {kind[1]}"
    else:
        returned = f"more than {len(RETURNED[methods[0]])} values"
    return wrong_return(methods[0], returned)


def _is_library(path: str) -> bool:
    in_stdlib = path.startswith(_STDLIB) and "-packages" not in path
    return in_stdlib or path.startswith(_INSIDE) or _LIBRARIES.search(path) is not None


class NamedFailures:
    """Context that raises what an environment's code raises as EnvironmentFailedError."""

    __slots__ = ("_env_id", "_where")

    def __init__(self, env_id: str, where: Callable[[], str]) -> None:
        """``where``: the environment and its step."""
        self._env_id, self._where = env_id, where

    def __enter__(self) -> None:
        """Nothing: a generator would take as long as a small environment's step."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Name the failure."""
        if isinstance(error, Exception | SystemExit) and not isinstance(error, EnvError):
            reason = _unpacking_text(error) or failure_text(error, _IN_CALLER)
            raise EnvironmentFailedError(self._env_id, self._where(), reason) from error
