"""Exceptions of environments; each message names the value, the limit and a remedy."""

from __future__ import annotations


class EnvError(Exception):
    """Base class of this package's exceptions."""


class UnknownEnvironmentError(EnvError):
    """Neither rayagi nor Gymnasium has an environment of this id."""

    def __init__(self, env_id: str, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(env_id, nearest)
        self.env_id, self.nearest = env_id, nearest

    def __str__(self) -> str:
        near = f"; did you mean {', '.join(self.nearest)}?" if self.nearest else "."
        return (
            f"no environment is called {self.env_id!r}{near} "
            f"`rayagi envs` lists rayagi's own, gymnasium.pprint_registry() every Gymnasium id."
        )


class EnvironmentOptionError(EnvError):
    """An unknown option of an environment, or an invalid value."""

    def __init__(self, env_id: str, reason: str) -> None:
        super().__init__(env_id, reason)
        self.env_id, self.reason = env_id, reason

    def __str__(self) -> str:
        return f"{self.env_id}: {self.reason}"


class ModelError(EnvError):
    """A task cannot use a model file."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"model {self.path}: {self.reason}"


class TaskError(EnvError):
    """A user's task is invalid: a method is missing, raises, or has a wrong result."""

    def __init__(self, env_id: str, reason: str) -> None:
        super().__init__(env_id, reason)
        self.env_id, self.reason = env_id, reason

    def __str__(self) -> str:
        return f"{self.env_id}: {self.reason}"


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


class EnvironmentFailedError(EnvError):
    """The code of an environment raised an exception, or returned something of another shape than it declares.

    Args:
        env_id: the environment's id.
        where: the environment and the step of its episode, or the reset.
        reason: what was raised and in which line, or what was returned and what was expected.
    """

    def __init__(self, env_id: str, where: str, reason: str) -> None:
        super().__init__(env_id, where, reason)
        self.env_id, self.where, self.reason = env_id, where, reason

    def __str__(self) -> str:
        return f"{self.env_id}, {self.where}: {self.reason}"


class SimulatorLostError(EnvError):
    """An external simulator process exited, failed, or does not respond."""

    def __init__(self, env_id: str, reason: str) -> None:
        super().__init__(env_id, reason)
        self.env_id, self.reason = env_id, reason

    def __str__(self) -> str:
        return f"the simulator of {self.env_id} {self.reason}"


class RenderingError(EnvError):
    """A frame could not be rendered. ``advice``: what to install or set, if known."""

    def __init__(self, env_id: str, reason: str, advice: str = "") -> None:
        super().__init__(env_id, reason, advice)
        self.env_id, self.reason, self.advice = env_id, reason, advice

    def __str__(self) -> str:
        advice = f". {self.advice}" if self.advice else ""
        return f"{self.env_id} cannot be rendered here: {self.reason}{advice}"
