"""The probe of the search: a candidate's real pipeline (simulate, infer, update) on its real slices, measured.

All GMIs of a device run at once, in processes of their own through the Session, so that what they take from each other is
in the measurement. A candidate that crashes, runs out of memory or hangs is an answer; its processes are gone by then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from actors.groups import GmiSilentError
from actors.protocols import IterationResult
from placement.errors import InventoryError, ReservationError
from placement.search import Failed, FailureKind, Measured
from placement.types import Machine
from rayagi.config.errors import ConfigError
from rayagi.config.spec import RunSpec
from rayagi.coordinator.session import Session
from rayagi.coordinator.settling import Settled, settle
from rayagi.envs.errors import EnvironmentOptionError, UnknownEnvironmentError, UnsupportedSpaceError
from rayagi.planning import uses_gpus

PHASES = ("simulate_s", "act_s", "update_s", "sync_s")
_REQUEST_S = 0.5
"""About how long a request for iterations takes, so that the driver neither waits long nor interrupts often."""
_FEWEST_KEPT, _SHORTEST_S = 4, 2.0
"""Iterations after the warm-up, and their time, before a measurement may count as tight."""
_ENOUGH = 2
"""Iterations after the warm-up with which a slow candidate has to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSettings:
    """How long a candidate is measured, and how well."""

    relative_error: float = 0.03
    """A measurement ends once the 95 % confidence interval of its mean is within this share of it."""
    time_s: float = 10.0
    """After this long, ``loose_error`` and two iterations after the warm-up will do."""
    loose_error: float = 0.1
    most_s: float = 30.0
    """After this long, two iterations after the warm-up will do: slow or disturbed, it says so by its error."""
    hang_s: float = 120.0
    """A candidate that answers nothing for this long is given up: also one that is merely so slow."""


class SessionProbe:
    """Implements placement.search.Probe for one task on one machine."""

    def __init__(self, spec: RunSpec, machine: Machine, settings: ProbeSettings | None = None) -> None:
        self._spec, self._machine = spec, machine
        self._settings = settings or ProbeSettings()

    def __call__(self, gmis_per_gpu: int, num_envs: int) -> Measured | Failed:
        """Measure a candidate.

        Raises:
            ClusterUnreachableError, ReservationError, EnvError: nothing can be measured here now.
        """
        started = time.monotonic()
        try:
            with Session(candidate(self._spec, self._machine, gmis_per_gpu, num_envs)) as session:
                results, settled = self._watch(session)
        except Exception as error:
            kind = failure_kind(error)
            if kind is None:
                raise
            reason = f"{type(error).__name__}: {error}"
            return Failed(kind=kind, reason=reason, duration_s=time.monotonic() - started)
        kept = results[settled.warm_up :]
        return Measured(
            steps_per_s=kept[0].metrics["env_steps"] / gmis_per_gpu / settled.mean_s,
            memory_bytes=int(max(memory_of(result) for result in results)),
            relative_error=settled.relative_error,
            phases_s={name: sum(result.metrics[name] for result in kept) / len(kept) for name in PHASES},
            duration_s=time.monotonic() - started,
        )

    def _watch(self, session: Session) -> tuple[list[IterationResult], Settled]:
        """Iterate until the measurement is tight, or its time is up."""
        results: list[IterationResult] = []
        began = time.monotonic()
        while True:
            last_s = results[-1].metrics["iteration_s"] if results else _REQUEST_S
            session.submit(max(1, round(_REQUEST_S / last_s)))
            results += session.collect(self._settings.hang_s)
            if len(results) < 1 + _ENOUGH:
                continue
            settled = settle([result.metrics["iteration_s"] for result in results])
            if self._will_do(settled, time.monotonic() - began):
                return results, settled

    def _will_do(self, settled: Settled, elapsed_s: float) -> bool:
        wanted = self._settings
        much = settled.num_kept >= _FEWEST_KEPT and settled.num_kept * settled.mean_s >= _SHORTEST_S
        tight = much and settled.relative_error <= wanted.relative_error
        loose = elapsed_s > wanted.time_s and settled.relative_error <= wanted.loose_error
        return settled.num_kept >= _ENOUGH and (tight or loose or elapsed_s > wanted.most_s)


def candidate(spec: RunSpec, machine: Machine, gmis_per_gpu: int, num_envs: int) -> RunSpec:
    """The run that a probe starts: ``gmis_per_gpu`` GMIs on one GPU with that GPU's share of the cores, or all on cores."""
    if not uses_gpus(spec, machine):
        return replace(
            spec, gmi=replace(spec.gmi, num_gmis=gmis_per_gpu, gmis_per_gpu=None, num_envs=num_envs)
        )
    node = machine.nodes[0]
    threads = spec.gmi.threads_per_gmi or len(node.usable_cores) // (gmis_per_gpu * len(node.usable_gpus))
    gmi = replace(
        spec.gmi,
        num_gmis=gmis_per_gpu,
        gmis_per_gpu=gmis_per_gpu,
        num_envs=num_envs,
        threads_per_gmi=max(1, threads),
    )
    return replace(spec, gmi=gmi)


def memory_of(result: IterationResult) -> float:
    """What counts against a GMI's memory: the device's where it has one, else resident memory."""
    return result.metrics.get("device_bytes", result.metrics["resident_bytes"])


_NOT_THE_CANDIDATE = (
    ConfigError,
    ConnectionError,
    EnvironmentOptionError,
    InventoryError,
    ReservationError,
    UnknownEnvironmentError,
    UnsupportedSpaceError,
)
"""What any other candidate would meet too: settings, the task, the cluster, others who hold it."""


def failure_kind(error: Exception) -> FailureKind | None:
    """What a candidate's end means for the search; None where it is not about this candidate."""
    if isinstance(error, _NOT_THE_CANDIDATE):
        return None
    # torch's class has another module from version to version; Ray's killer of processes has only its text.
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if out_of_memory or "running low on memory" in str(error).lower():
        return "out of memory"
    return "hung" if isinstance(error, GmiSilentError) else "crashed"
