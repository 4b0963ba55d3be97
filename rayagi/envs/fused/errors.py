"""Exceptions of fused simulators; each message names the location and a remedy."""

from __future__ import annotations

from rayagi.envs.errors import EnvError


class SimulatorError(EnvError):
    """A simulator cannot be traced. ``place``: its name and function, with file and line if known."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(place, reason)
        self.place, self.reason = place, reason

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class KernelError(EnvError):
    """A kernel cannot be built here. ``kernel``: the simulator and the backend."""

    def __init__(self, kernel: str, reason: str) -> None:
        super().__init__(kernel, reason)
        self.kernel, self.reason = kernel, reason

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"
