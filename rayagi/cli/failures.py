"""Known exceptions and their exit codes.

Classes are looked up by name, so that a command without Ray does not import it to report an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

KNOWN: dict[str, int] = {
    "rayagi.HiddenPackageError": BAD_INPUT,
    "rayagi.config.errors.ConfigError": BAD_INPUT,
    "rayagi.envs.errors.SimulationError": FAILED,
    "rayagi.envs.errors.SimulatorLostError": FAILED,
    "rayagi.envs.errors.EnvironmentFailedError": FAILED,
    "rayagi.envs.errors.FrameStackError": FAILED,
    "rayagi.envs.errors.EnvError": BAD_INPUT,
    "rayagi.run.errors.RunFolderError": BAD_INPUT,
    "rayagi.run.errors.RunVersionError": BAD_INPUT,
    "rayagi.run.errors.NoCheckpointError": BAD_INPUT,
    "rayagi.run.errors.EnvironmentChangedError": BAD_INPUT,
    "rayagi.run.errors.LimitReachedError": BAD_INPUT,
    "rayagi.serving.errors.DatasetError": BAD_INPUT,
    "rayagi.serving.errors.ExportError": BAD_INPUT,
    "rayagi.serving.source.PolicyMismatchError": BAD_INPUT,
    "rayagi.run.errors.RunError": FAILED,
    "rayagi.cli.failures.UsageError": BAD_INPUT,
    "rayagi.coordinator.cluster.ClusterUnreachableError": BAD_INPUT,
    "rayagi.coordinator.cluster.RayStartError": FAILED,
    "rayagi.coordinator.lost_ray.RayLostError": FAILED,
    "rayagi.coordinator.searching.NothingMeasuredError": FAILED,
    "actors.errors.GmiLostError": FAILED,
    "actors.errors.GmiSilentError": FAILED,
    "actors.errors.ProgramInterruptedError": FAILED,
    "actors.errors.ObjectStoreError": FAILED,
    "placement.errors.PlanError": BAD_INPUT,
    "placement.errors.InventoryError": BAD_INPUT,
    "placement.errors.PlacementError": FAILED,
    "actors.errors.NonFiniteError": FAILED,
    "rayagi.benchmark.measure.BenchmarkError": FAILED,
    "collectives.errors.LayoutError": BAD_INPUT,
    "collectives.errors.CompositionError": BAD_INPUT,
    "collectives.errors.ProfileError": BAD_INPUT,
    "collectives.errors.CommunicatorError": FAILED,
    "collectives.errors.RendezvousError": FAILED,
    "collectives.experience.errors.ChannelError": FAILED,
    "actors.errors.IterationMismatchError": FAILED,
    "collectives.experience.errors.NoChannelError": BAD_INPUT,
    "actors.replay.errors.ReplayError": BAD_INPUT,
    "actors.replay.errors.ReplayBusyError": FAILED,
    "rayagi.profiler.calibration.CalibrationError": FAILED,
    "rayagi.profiler.errors.ProfilerError": BAD_INPUT,
    "rayagi.profiler.trace.TraceError": BAD_INPUT,
}
"""Exit code by class name; the nearest listed base class counts."""


class UsageError(Exception):
    """Options that cannot be used together."""


class Explanation(NamedTuple):
    """A known error, whose text is for the user, and the exit code."""

    error: BaseException
    exit_code: int


def explain(error: BaseException) -> Explanation | None:
    """A known error, or the known cause of one; None for unexpected errors."""
    for candidate in _chain(error):
        for cls in type(candidate).__mro__:
            code = KNOWN.get(f"{cls.__module__}.{cls.__qualname__}")
            if code is not None:
                return Explanation(candidate, code)
    return None


def stopped_text(error: BaseException) -> str:
    """How a signal ended a command before its time."""
    why = str(error) if isinstance(error, KeyboardInterrupt) else ""  # a SystemExit has a number
    return f"stopped: {why}" if why else "stopped at once"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes. Ray wraps a remote error with its traceback: the inner error comes first."""
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        inner = getattr(current, "cause", None)
        if isinstance(inner, BaseException):
            yield inner
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
