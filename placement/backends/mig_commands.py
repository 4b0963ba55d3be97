"""What a human would have to run for MIG: the exact commands, and why."""

from __future__ import annotations

from collections.abc import Sequence

from placement.mig_geometry import PlacedProfile
from placement.types import Gpu

FIRST_WITHOUT_RESET = (9, 0)
"""From Hopper on, a change of MIG mode takes effect without a reset of the GPU."""


def mode_problem(enabled: bool | None, pending: bool | None) -> str | None:
    """Why no instance can be made in this state of MIG mode; None where it is on."""
    if enabled and pending is not False:
        return None
    if enabled:
        return "MIG mode is on, but is to be off after the reset that is due"
    if pending:
        return "MIG mode is to be on, but the GPU was not reset yet"
    return "MIG mode is off" if enabled is False else "it is not known whether MIG mode is on"


def mode_commands(gpu: Gpu, enabled: bool | None, pending: bool | None) -> str:
    """What an administrator runs to have MIG mode on, nobody using the GPU.

    Args:
        gpu: whose architecture decides whether a reset is needed
        enabled: whether the mode is on now; None: not known
        pending: whether it is to be on after the next reset
    """
    reset = f"`sudo nvidia-smi --gpu-reset -i {gpu.uuid}`"
    if pending and not enabled:
        return f"{reset} while nobody uses the GPU"
    switch = f"`sudo nvidia-smi -i {gpu.uuid} -mig 1`"
    if enabled:
        return f"{switch}, which takes the switch that is due back"
    if gpu.compute_capability is not None and gpu.compute_capability >= FIRST_WITHOUT_RESET:
        return f"{switch} while nobody uses the GPU"
    return f"{switch}, then {reset}, while nobody uses the GPU"


def create_command(gpu: Gpu, placed: Sequence[PlacedProfile]) -> str:
    """How an administrator creates these instances, each with its compute instance."""
    by_size = sorted(placed, key=lambda one: (-one.profile.size, one.start))
    specifiers = ",".join(f"{one.profile.profile_id}:{one.start}" for one in by_size)
    return f"`sudo nvidia-smi mig -i {gpu.uuid} -cgi {specifiers} -C`"
