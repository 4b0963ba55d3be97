"""Probe of the search: measures a candidate's real pipeline (simulate, infer, update) on its real slices.

All GMIs of a device run concurrently in their own processes through a Session, so their contention is measured. The next
candidate with as many GMIs reuses the processes and only builds another program. A crash, an out-of-memory error or a hang
of a candidate is returned as a TrialFailure; its processes are stopped first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.special import stdtrit

from actors.errors import GmiSilentError
from actors.protocols import IterationResult
from collectives.closing import ClosesOnExit
from placement.errors import GpuMemoryError, InventoryError, PlanError, ReservationError
from placement.plan import PlacementPlan
from placement.search import FailureKind, TrialFailure, TrialMeasurement
from placement.types import Machine
from rayagi.config.errors import ConfigError
from rayagi.config.spec import RunSpec
from rayagi.coordinator.probe_program import ProbeProgram, parts_of
from rayagi.coordinator.session import Session
from rayagi.envs.errors import (
    EnvironmentOptionError,
    MemoryShortError,
    UnknownEnvironmentError,
    UnsupportedSpaceError,
)
from rayagi.planning import plan_of, uses_gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadyState:
    """Statistics of a series of iteration times without its warm-up."""

    warm_up: int
    """Values dropped at the start."""
    num_kept: int
    mean_s: float
    relative_error: float
    """Half of the mean's 95 % confidence interval, relative to it; infinite for a single value."""


def trim_warmup(seconds: Sequence[float], least: int = 1) -> SteadyState:
    """Drop the warm-up, and compute the mean of the rest with its relative error.

    MSER rule (White, 1997, "An effective truncation heuristic for bias reduction in simulation output"): drop d values, at
    most half of the series, so that the squared standard error of the rest is minimal:

        d* = argmin_d  sum_{i>d} (x_i - mean)^2 / (n - d)^2

    The first iteration is always dropped, since it touches memory and starts threads. The caller may require more, since
    robots that have just been reset cost less than robots that touch the ground.

    Args:
        seconds: duration of each iteration, more than ``least``
        least: minimum number of dropped values, 1 or more
    """
    candidates = range(least, max(least, len(seconds) // 2) + 1)
    warm_up = min(candidates, key=lambda count: (_squared_error(seconds[count:]), count))
    kept = seconds[warm_up:]
    # 95 % confidence interval of the mean: t * s / sqrt(n)
    mean = float(np.mean(kept))
    half = (
        float(stdtrit(len(kept) - 1, 0.975)) * float(np.std(kept, ddof=1)) / math.sqrt(len(kept))
        if len(kept) > 1
        else math.inf
    )
    return SteadyState(warm_up=warm_up, num_kept=len(kept), mean_s=mean, relative_error=half / mean)


def _squared_error(values: Sequence[float]) -> float:
    """MSER statistic: sum of squared deviations / n^2; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    return float(np.var(values)) / len(values)


PHASES = ("simulate_s", "act_s", "update_s", "sync_s")
REQUEST_S = 0.5
"""Target duration of a request for iterations: short enough to check the time limits, long enough to interrupt rarely."""
_MIN_KEPT_TIGHT = 4
"""Minimum iterations after the warm-up for a measurement with the tight error."""
_MIN_KEPT = 2
"""Minimum iterations after the warm-up for any measurement."""
_ASSUMED_STEPS_PER_S = 10_000.0
"""Assumed throughput of a GMI before the first measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSettings:
    """Stopping rules of a measurement. Times count from the candidate's first iteration."""

    relative_error: float
    """Tight rule: stop once half of the mean's 95 % confidence interval is at most this fraction of the mean."""
    min_duration_s: float
    """Minimum total duration of the iterations after the warm-up for the tight rule."""
    loose_after_s: float
    """Loose rule: after this time, stop at ``loose_error`` with two iterations after the warm-up."""
    loose_error: float
    max_duration_s: float
    """After this time, stop with two iterations after the warm-up, whatever the error."""
    iteration_s: float
    """Longer iterations are measured in parts (probe_program)."""
    max_iteration_s: float = 40.0
    """Iterations that are expected to last longer, from trials with fewer environments, are not measured."""
    warm_up_steps: int = 8
    """Minimum warm-up in steps per environment. Until robots touch the ground, steps of Ant-v5, HalfCheetah-v5 and
    Humanoid-v5 cost up to a sixth less than later ones."""
    hang_s: float = 120.0
    """A candidate without a response for this time counts as hung."""


SCREENING = ProbeSettings(
    relative_error=0.05,
    min_duration_s=1.0,
    loose_after_s=3.0,
    loose_error=0.1,
    max_duration_s=4.0,
    iteration_s=0.25,
)
"""Settings of the search: enough to compare numbers of environments that differ by a factor of two."""
VALIDATION = ProbeSettings(
    relative_error=0.02,
    min_duration_s=1.5,
    loose_after_s=3.0,
    loose_error=0.05,
    max_duration_s=5.0,
    iteration_s=0.5,
    max_iteration_s=math.inf,
)
"""Settings of each validation round."""


class SessionProbe(ClosesOnExit):
    """Implements placement.search.Probe for one task on one machine. Close it, or use it as a context manager."""

    def __init__(self, spec: RunSpec, machine: Machine, settings: ProbeSettings = SCREENING) -> None:
        self._spec, self._machine, self._settings = spec, machine, settings
        self._session: Session | None = None
        self._gmis = 0
        """Number of GMIs of the current session."""
        self._fastest: dict[int, float] = {}
        """Number of GMIs -> highest steps per second of one GMI so far, to predict the duration of an iteration."""

    def __call__(self, gmis_per_gpu: int, num_envs: int) -> TrialMeasurement | TrialFailure:
        """Measure a candidate.

        Raises:
            ClusterUnreachableError, ReservationError: no candidate can be measured.
            EnvError: the task's environment cannot be made, and no candidate was measured before.
        """
        return self.measure(gmis_per_gpu, num_envs, self._settings)

    def remember(self, gmis_per_gpu: int, steps_per_s: float) -> None:
        """Take account of an earlier measurement in the predictions of how long an iteration lasts."""
        self._fastest[gmis_per_gpu] = max(steps_per_s, self._fastest.get(gmis_per_gpu, 0.0))

    def measure(
        self, gmis_per_gpu: int, num_envs: int, settings: ProbeSettings
    ) -> TrialMeasurement | TrialFailure:
        """Measure a candidate with these settings.

        A candidate that crashes is retried once in new processes: somebody may have killed one, or an earlier candidate be
        the cause. One that runs out of memory is, too, if its processes were reused.

        Raises:
            ClusterUnreachableError, ReservationError: no candidate can be measured.
            EnvError: the task's environment cannot be made, and no candidate was measured before.
        """
        reused = self._session is not None and self._gmis == gmis_per_gpu
        outcome = self._attempt(gmis_per_gpu, num_envs, settings)
        if isinstance(outcome, TrialFailure) and (
            outcome.kind == "crashed" or (reused and outcome.kind == "out of memory")
        ):
            again = self._attempt(gmis_per_gpu, num_envs, settings)
            return replace(again, duration_s=again.duration_s + outcome.duration_s)
        return outcome

    def _attempt(
        self, gmis_per_gpu: int, num_envs: int, settings: ProbeSettings
    ) -> TrialMeasurement | TrialFailure:
        started = time.monotonic()
        spec = candidate_spec(self._spec, self._machine, gmis_per_gpu, num_envs)
        steps_per_s = self._fastest.get(gmis_per_gpu, _ASSUMED_STEPS_PER_S)
        expected_s = num_envs * spec.learning.rollout_length / steps_per_s
        if gmis_per_gpu in self._fastest and expected_s > settings.max_iteration_s:
            reason = (
                f"an iteration would last {expected_s:.0f} s; the limit is {settings.max_iteration_s:.0f} s"
            )
            return TrialFailure(kind="too long", reason=reason)
        parts = parts_of(spec, expected_s, settings.iteration_s)
        part_steps = spec.learning.rollout_length // parts
        try:
            session = self._session_for(gmis_per_gpu, spec, parts)
            results, steady = _measure_until_sufficient(
                session, settings, math.ceil(settings.warm_up_steps / part_steps)
            )
        except BaseException as error:
            self.close()
            task_runs = bool(self._fastest)
            kind = failure_kind(error, task_runs=task_runs) if isinstance(error, Exception) else None
            if kind is None:
                raise
            reason = f"{type(error).__name__}: {error}"
            return TrialFailure(kind=kind, reason=reason, duration_s=time.monotonic() - started)
        kept = results[steady.warm_up :]
        steps_per_s = kept[0].metrics["env_steps"] / gmis_per_gpu / steady.mean_s
        self.remember(gmis_per_gpu, steps_per_s)
        return TrialMeasurement(
            steps_per_s=steps_per_s,
            memory_bytes=int(max(memory_of(result) for result in results)),
            relative_error=steady.relative_error,
            phases_s={
                name: parts * sum(result.metrics[name] for result in kept) / len(kept) for name in PHASES
            },
            duration_s=time.monotonic() - started,
        )

    def _session_for(self, gmis_per_gpu: int, spec: RunSpec, parts: int) -> Session:
        """A session that runs the candidate; reuses the current processes if the number of GMIs is the same."""
        factory = partial(ProbeProgram, spec, spec.env.factory(), parts)
        if self._session is not None and self._gmis == gmis_per_gpu:
            self._session.rebuild(factory)
            return self._session
        self.close()
        plans: list[PlacementPlan] = []
        make_plan = partial(plan_on, self._machine, spec)
        session = Session(spec, factory=factory, make_plan=make_plan, on_plan=plans.append)
        self._session, self._gmis = session.__enter__(), gmis_per_gpu
        if plans[-1].backend != plans[0].backend:  # MPS does not work here: later trials do not try it again
            self._spec = self._spec.with_gmi(backend=plans[-1].backend)
        return self._session

    def close(self) -> None:
        """Stop the processes. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _measure_until_sufficient(
    session: Session, settings: ProbeSettings, warm_up: int, clock: Callable[[], float] = time.monotonic
) -> tuple[list[IterationResult], SteadyState]:
    """Iterate until ``is_sufficient``; at least ``warm_up`` iterations are discarded."""
    results: list[IterationResult] = []
    began = clock()
    while True:
        last_s = results[-1].metrics["iteration_s"] if results else REQUEST_S
        session.submit(max(1, round(REQUEST_S / last_s)))
        results += session.collect(settings.hang_s)
        if len(results) < warm_up + _MIN_KEPT:
            continue
        steady = trim_warmup([result.metrics["iteration_s"] for result in results], warm_up)
        if is_sufficient(settings, steady, clock() - began):
            return results, steady


def is_sufficient(settings: ProbeSettings, steady: SteadyState, elapsed_s: float) -> bool:
    """Whether a measurement may stop: by the tight rule, the loose rule, or the time limit."""
    much = steady.num_kept >= _MIN_KEPT_TIGHT and steady.num_kept * steady.mean_s >= settings.min_duration_s
    tight = much and steady.relative_error <= settings.relative_error
    loose = elapsed_s > settings.loose_after_s and steady.relative_error <= settings.loose_error
    return steady.num_kept >= _MIN_KEPT and (tight or loose or elapsed_s > settings.max_duration_s)


def run_spec_of(spec: RunSpec, machine: Machine, gmis_per_gpu: int, num_envs: int) -> RunSpec:
    """The spec of a run that uses a candidate: ``gmis_per_gpu`` GMIs on every GPU, or on all cores."""
    on_gpus = uses_gpus(spec, machine)
    return spec.with_gmi(
        num_gmis=None if on_gpus else gmis_per_gpu,
        gmis_per_gpu=gmis_per_gpu if on_gpus else None,
        num_envs=num_envs,
        left_out=(),
    )


def plan_failure(spec: RunSpec, machine: Machine, gmis_per_gpu: int, num_envs: int) -> TrialFailure | None:
    """Why a run could not use a candidate; None if the whole machine can be planned with it."""
    try:
        plan_of(run_spec_of(spec, machine, gmis_per_gpu, num_envs), machine)
    except PlanError as error:
        return TrialFailure(kind="cannot be planned", reason=str(error))
    return None


def candidate_spec(spec: RunSpec, machine: Machine, gmis_per_gpu: int, num_envs: int) -> RunSpec:
    """The spec of a trial: the GMIs of one GPU, with the cores that they have in a run on all GPUs; or those on all cores.

    Raises:
        PlanError: a run could not use the candidate.
    """
    whole = run_spec_of(spec, machine, gmis_per_gpu, num_envs)
    if not uses_gpus(spec, machine):
        return whole
    threads = min(gmi_slice.num_threads for gmi_slice in plan_of(whole, machine).slices)
    return whole.with_gmi(num_gmis=gmis_per_gpu, threads_per_gmi=threads)


def plan_on(machine: Machine, spec: RunSpec, now: Machine) -> PlacementPlan:
    """The plan for ``now``, with the GPUs as ``machine`` has them: processes of the trial before may not have ended yet."""
    before = {gpu.uuid: gpu for node in machine.nodes for gpu in node.gpus}
    nodes = (replace(node, gpus=tuple(before.get(gpu.uuid, gpu) for gpu in node.gpus)) for node in now.nodes)
    return plan_of(spec, replace(now, nodes=tuple(nodes)))


def memory_of(result: IterationResult) -> float:
    """Memory of a GMI: device memory if it has a device, else resident memory."""
    return result.metrics.get("device_bytes", result.metrics["resident_bytes"])


_UNRELATED_ERRORS = (
    ConfigError,
    ConnectionError,
    EnvironmentOptionError,
    InventoryError,
    ReservationError,
    UnknownEnvironmentError,
    UnsupportedSpaceError,
)
"""Errors that affect every candidate: configuration, task, cluster, occupied resources."""


def failure_kind(error: Exception, *, task_runs: bool = False) -> FailureKind | None:
    """Classify a candidate's error; None if it is not specific to this candidate.

    Args:
        error: of the candidate
        task_runs: whether another candidate of the task was measured: if the environment cannot be made now, it is because
            of their number
    """
    if task_runs and isinstance(error, EnvironmentOptionError):
        return "crashed"
    if isinstance(error, _UNRELATED_ERRORS):
        return None
    # By name, since the module of torch's class differs between versions. Ray's memory monitor is known by its text.
    out_of_memory = (
        isinstance(error, MemoryError | GpuMemoryError | MemoryShortError)
        or type(error).__name__ == "OutOfMemoryError"
    )
    if out_of_memory or "running low on memory" in str(error).lower():
        return "out of memory"
    return "hung" if isinstance(error, GmiSilentError) else "crashed"
