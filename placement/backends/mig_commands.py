"""Commands that an administrator runs for MIG, for error messages."""

from __future__ import annotations

from collections.abc import Sequence

from placement.mig_geometry import PlacedProfile
from placement.types import Gpu

FIRST_WITHOUT_RESET = (9, 0)
"""From Hopper on, a change of MIG mode needs no reset of the GPU."""


def mode_problem(enabled: bool | None, pending: bool | None) -> str | None:
    """Why no instance can be created in this state of MIG mode; None if it is on."""
    if enabled and pending is not False:
        return None
    if enabled:
        return "MIG mode is on, but will be off after the pending reset"
    if pending:
        return "MIG mode will be on after the pending reset of the GPU"
    return "MIG mode is off" if enabled is False else "the MIG mode is unknown"


def mode_commands(gpu: Gpu, enabled: bool | None, pending: bool | None) -> str:
    """Commands that enable MIG mode on an idle GPU.

    Args:
        gpu: its compute capability decides whether a reset is needed
        enabled: whether the mode is on now; None: unknown
        pending: whether it will be on after the next reset
    """
    reset = f"`sudo nvidia-smi --gpu-reset -i {gpu.uuid}`"
    if pending and not enabled:
        return f"{reset} while the GPU is idle"
    switch = f"`sudo nvidia-smi -i {gpu.uuid} -mig 1`"
    if enabled:
        return f"{switch}, which cancels the pending change"
    if gpu.compute_capability is not None and gpu.compute_capability >= FIRST_WITHOUT_RESET:
        return f"{switch} while the GPU is idle"
    return f"{switch}, then {reset}, while the GPU is idle"


def create_command(gpu: Gpu, placed: Sequence[PlacedProfile]) -> str:
    """Command that creates these GPU instances, each with its compute instance."""
    by_size = sorted(placed, key=lambda one: (-one.profile.size, one.start))
    specifiers = ",".join(f"{one.profile.profile_id}:{one.start}" for one in by_size)
    return f"`sudo nvidia-smi mig -i {gpu.uuid} -cgi {specifiers} -C`"
