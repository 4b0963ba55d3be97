"""What can go wrong with a fused simulator, each with the place and the way out."""

from __future__ import annotations

from rayagi.envs.errors import EnvError


class SimulatorError(EnvError):
    """A simulator that cannot be traced. ``place``: its name and function, file and line where these are known."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(place, reason)
        self.place, self.reason = place, reason

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class KernelError(EnvError):
    """A kernel that cannot be made here. ``kernel``: what it is of and in which form."""

    def __init__(self, kernel: str, reason: str) -> None:
        super().__init__(kernel, reason)
        self.kernel, self.reason = kernel, reason

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"
