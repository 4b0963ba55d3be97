"""What can go wrong with an environment, each with the value, the limit and the way out."""

from __future__ import annotations


class EnvError(Exception):
    """Base of this package's errors."""


class UnknownEnvironmentError(EnvError):
    """No environment of that name is known to rayagi or to Gymnasium."""

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
    """An environment was asked for with an option that it does not have, or with a value that it refuses."""

    def __init__(self, env_id: str, reason: str) -> None:
        super().__init__(env_id, reason)
        self.env_id, self.reason = env_id, reason

    def __str__(self) -> str:
        return f"{self.env_id}: {self.reason}"


class ModelError(EnvError):
    """A model file that a task cannot use."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"model {self.path}: {self.reason}"


class TaskError(EnvError):
    """A user's task that is not one: a method is missing, raises, or returns something else than it should."""

    def __init__(self, env_id: str, reason: str) -> None:
        super().__init__(env_id, reason)
        self.env_id, self.reason = env_id, reason

    def __str__(self) -> str:
        return f"{self.env_id}: {self.reason}"


class MemoryShortError(EnvError):
    """So many worlds would not fit into the memory that is free; nothing was allocated."""

    def __init__(
        self, engine: str, num_worlds: int, bytes_per_world: int, free_bytes: int, device: str
    ) -> None:
        super().__init__(engine, num_worlds, bytes_per_world, free_bytes, device)
        self.engine, self.num_worlds, self.device = engine, num_worlds, device
        self.bytes_per_world, self.free_bytes = bytes_per_world, free_bytes

    @property
    def most_worlds(self) -> int:
        """That would fit."""
        return self.free_bytes // self.bytes_per_world

    def __str__(self) -> str:
        needed = self.num_worlds * self.bytes_per_world
        return (
            f"{self.engine} needs {needed / 1e9:,.1f} GB for {self.num_worlds:,} worlds, and {self.free_bytes / 1e9:,.1f} "
            f"GB are free on {self.device}: at most {self.most_worlds:,} fit; lower num_envs"
        )


class UnsupportedSpaceError(EnvError):
    """An observation or action space that a flat policy cannot use."""

    def __init__(self, env_id: str, space: str, hint: str) -> None:
        super().__init__(env_id, space, hint)
        self.env_id, self.space, self.hint = env_id, space, hint

    def __str__(self) -> str:
        return f"{self.env_id} has the space {self.space}, which rayagi does not learn from; {self.hint}"


class SimulationError(EnvError):
    """A simulation left the finite numbers.

    Args:
        env_index: the environment, counted over all GMIs.
        step: step of its episode, counted from 1.
        quantity: what was NaN, infinite or huge.
    """

    def __init__(self, env_index: int, step: int, quantity: str) -> None:
        super().__init__(env_index, step, quantity)
        self.env_index, self.step, self.quantity = env_index, step, quantity

    def __str__(self) -> str:
        return (
            f"environment {self.env_index} became unstable in step {self.step} of its episode: "
            f"{self.quantity} is NaN, infinite or above 1e10; if it is the action, look at the policy "
            f"(learning rate, loss), otherwise at the environment's options (model file, frame_skip)"
        )


class SimulatorLostError(EnvError):
    """A simulator in a process of its own ended, failed, or does not answer."""

    def __init__(self, env_id: str, reason: str) -> None:
        super().__init__(env_id, reason)
        self.env_id, self.reason = env_id, reason

    def __str__(self) -> str:
        return f"the simulator of {self.env_id} {self.reason}"


class RenderingError(EnvError):
    """A frame could not be drawn. ``advice``: what to install or set, where that is known."""

    def __init__(self, env_id: str, reason: str, advice: str = "") -> None:
        super().__init__(env_id, reason, advice)
        self.env_id, self.reason, self.advice = env_id, reason, advice

    def __str__(self) -> str:
        advice = f". {self.advice}" if self.advice else ""
        return f"{self.env_id} cannot be rendered here: {self.reason}{advice}"
