"""Algorithm 1: profiling-based GMI exploration (GMI-DRL §3.1.2; the preprint's Algorithm 2), as a pure function.

The probe is injected: it runs a candidate and says how fast and how large it was. Here is only what to try next, when to
stop, and what was best. Decisions where the papers differ, or are silent:

- Every trial that was measured may be the best one. The published loop passes over the first num_env of each GMIperGPU
  (line 12-15) and the one at which it saturates (line 22); both are measured anyway, and on a small machine the first
  may well win. Which trials are made, and in which order, is as published.
- A trial that fails ends its GMIperGPU, since more environments need more memory and time. (The preprint goes on to
  larger ones; the later paper only projects.)
- One that needed more than its GMI's memory, where nothing held it back, counts as failed for want of memory.
- ``EarlyStopping`` says when a GMIperGPU ends before its environments do. Its defaults are the papers'; what they have no
  rule for, noise and cores whose memory hardly grows, is in its other fields.
- ``estimate`` (line 26) is a GMI's throughput times all GMIs. The probe runs all GMIs of a device at once, so that their
  contention is in the measurement; devices are taken to be alike and not to slow each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

SATURATION = 0.1
"""The papers' threshold alpha on Sat ("generally < 0.1", preprint §5.2)."""
GMIS_PER_GPU: tuple[int, ...] = tuple(range(10, 0, -1))
NUM_ENVS: tuple[int, ...] = tuple(128 * 2**power for power in range(9))
"""128 to 32768, as in the paper."""
NUM_ENVS_ON_CORES: tuple[int, ...] = tuple(16 * 2**power for power in range(9))
"""16 to 4096: a core simulates thousands of steps per second where a GPU does millions."""

FailureKind = Literal["crashed", "out of memory", "hung", "too long"]
"""``too long``: it would take more time to measure than a trial may."""
TrialVerdict = Literal[
    "first", "going on", "saturated", "plateau", "no memory", "failed", "cannot win", "compared", "again"
]
"""Of candidates that were measured before: ``compared`` with a slower one, in the same minute; ``again`` by confirmation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialMeasurement:
    """What the probe found."""

    steps_per_s: float
    """Environment steps per second of one GMI while all GMIs of its device run."""
    memory_bytes: int
    """Of one GMI, the largest: on the device, or resident without one."""
    relative_error: float = 0.0
    """Half of the throughput's 95 % confidence interval, relative to it."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Mean seconds of an iteration by phase; names as in the metric catalogue."""
    duration_s: float = 0.0
    """What the trial took, starting and ending included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFailure:
    """A candidate that could not be measured."""

    kind: FailureKind
    reason: str
    duration_s: float = 0.0


class Probe(Protocol):
    """Runs one candidate for real."""

    def __call__(self, gmis_per_gpu: int, num_envs: int) -> TrialMeasurement | TrialFailure:
        """Measure it; a failure of the candidate is an answer, not an exception."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One step of the search."""

    gmis_per_gpu: int
    num_envs: int
    verdict: TrialVerdict
    outcome: TrialMeasurement | TrialFailure | None
    """None where it was clear beforehand that it would not do."""
    reason: str = ""
    """Of a verdict beyond the papers' rules, in numbers."""
    projected_bytes: float | None = None
    """m_p of eq. 4; None for the first two of a GMIperGPU."""
    saturation: float | None = None
    """Sat; None for the first."""
    system_steps_per_s: float | None = None
    """Estimate for all devices; None where nothing was measured or it does not fit."""
    score: float | None = None
    """What the search maximises; the system's throughput unless the objective is another."""
    best: bool = False
    """Whether nothing before it scored as high."""


Score = Callable[[int, int, float], float]
"""From GMIs per device, environments per GMI and the system's steps per second to what is maximised."""


def throughput(gmis_per_gpu: int, num_envs: int, steps_per_s: float) -> float:
    """The paper's objective."""
    return steps_per_s


UpperBoundFn = Callable[[Sequence[Trial], int], float]
"""From the trials so far and a number of GMIs to what the system cannot exceed with it; infinite where nothing is known."""


CompareFn = Callable[[int, int, int], TrialMeasurement | TrialFailure]
"""From GMIs per device, environments per GMI and how often it was compared before, to what is measured now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStopping:
    """When a GMIperGPU ends before its environments do. The defaults are the papers'."""

    saturation: float = SATURATION
    """alpha: a trial with a smaller gain in throughput per gain in memory is saturated."""
    min_gain: float | None = None
    """A trial that is not this much faster than the fastest before it in its GMIperGPU is on the plateau."""
    patience: int = 1
    """So many trials in a row that are saturated or on the plateau end a GMIperGPU: with 2, a single slow one does not."""
    compare: CompareFn | None = None
    """Before a trial ends its GMIperGPU for want of gain, measures the fastest before it once more, and that counts: a
    machine's speed changes from minute to minute, and what was fast in a good one may be slower than this one is now."""
    upper_bound: UpperBoundFn | None = None
    """What a GMIperGPU cannot exceed; looked at once one before it has ended for want of gain, or of time."""
    min_bound_gain: float = 0.0
    """A GMIperGPU is not tried unless its ceiling is this much above what is reached already."""


PAPER_STOPPING = EarlyStopping()


def explore(
    probe: Probe,
    *,
    num_gpus: int,
    gpu_memory_bytes: int,
    early_stopping: EarlyStopping = PAPER_STOPPING,
    gmis_per_gpu: Sequence[int] = GMIS_PER_GPU,
    num_envs: Sequence[int] = NUM_ENVS,
    score: Score = throughput,
) -> Iterator[Trial]:
    """Try candidates, most GMIs first, environments doubling; yields each trial when it is done.

    Args:
        probe: measures a candidate
        num_gpus: devices of the whole system; 1 for the cores of a machine without GPUs
        gpu_memory_bytes: memory of one device, which its GMIs share evenly
        stops: what ends a GMIperGPU early
        gmis_per_gpu: numbers of GMIs on one device, in the order in which they are tried
        num_envs: numbers of environments of one GMI, ascending
        score: what is best

    Raises:
        ValueError: numbers of environments are not ascending, or a number is not positive.
    """
    if list(num_envs) != sorted(set(num_envs)) or min((*num_envs, *gmis_per_gpu, num_gpus), default=0) < 1:
        raise ValueError("environments have to ascend, and all numbers have to be positive")
    trials: list[Trial] = []
    for gmis in gmis_per_gpu:
        pruned = _pruned_by_upper_bound(trials, gmis, num_envs[0], early_stopping, score)
        if pruned is not None:
            trials.append(pruned)
            yield pruned
            continue
        for trial in _explore_env_counts(
            probe, gmis, num_envs, gpu_memory_bytes / gmis, num_gpus, early_stopping, score
        ):
            better = trial.score is not None and trial.score > highest_score(trials)
            trials.append(replace(trial, best=better))
            yield trials[-1]


def _explore_env_counts(
    probe: Probe,
    gmis: int,
    num_envs: Sequence[int],
    memory: float,
    num_gpus: int,
    early_stopping: EarlyStopping,
    score: Score,
) -> Iterator[Trial]:
    """One GMIperGPU, each of whose GMIs has ``memory`` bytes: lines 3 to 31."""
    before: list[tuple[int, TrialMeasurement]] = []
    compared: Counter[int] = Counter()
    stalled = 0

    def scored(trial: Trial, outcome: TrialMeasurement) -> Trial:
        total = outcome.steps_per_s * gmis * num_gpus
        worth = score(gmis, trial.num_envs, total)
        return replace(trial, outcome=outcome, system_steps_per_s=total, score=worth)

    for envs in num_envs:
        projected = project_memory(before, envs)
        trial = Trial(
            gmis_per_gpu=gmis, num_envs=envs, verdict="no memory", outcome=None, projected_bytes=projected
        )
        if projected is not None and projected > memory:
            yield trial
            return
        outcome = probe(gmis, envs)
        if isinstance(outcome, TrialFailure) or outcome.memory_bytes > memory:
            failed: TrialVerdict = "failed" if isinstance(outcome, TrialFailure) else "no memory"
            yield replace(trial, outcome=outcome, verdict=failed)
            return
        change, stall = _stall_verdict(before, outcome, early_stopping)
        if (
            stall is not None
            and early_stopping.compare is not None
            and stalled + 1 >= early_stopping.patience
        ):
            rival, earlier = max(before, key=lambda one: one[1].steps_per_s)
            compared[rival] += 1
            now = early_stopping.compare(gmis, rival, compared[rival])
            if isinstance(now, TrialMeasurement):
                remeasured = Trial(gmis_per_gpu=gmis, num_envs=rival, verdict="compared", outcome=now)
                yield scored(replace(remeasured, reason=f"beside {gmis} x {envs}"), now)
                before[before.index((rival, earlier))] = (
                    rival,
                    replace(earlier, steps_per_s=now.steps_per_s),
                )
                change, stall = _stall_verdict(before, outcome, early_stopping)
        stalled = 0 if stall is None else stalled + 1
        ended = stalled >= early_stopping.patience
        verdict: TrialVerdict = stall[0] if stall and ended else "going on" if before else "first"
        reason = stall[1] if stall else ""
        yield scored(replace(trial, verdict=verdict, reason=reason, saturation=change), outcome)
        if ended:
            return
        before.append((envs, outcome))


def _stall_verdict(
    before: Sequence[tuple[int, TrialMeasurement]], now: TrialMeasurement, early_stopping: EarlyStopping
) -> tuple[float | None, tuple[TrialVerdict, str] | None]:
    """Sat of a trial, None for the first; and by which rule it gained too little, None where it gained enough."""
    if not before:
        return None, None
    change = saturation_metric(before[-1][1], now)
    if change < early_stopping.saturation:
        return change, ("saturated", "")
    fastest = max(measured.steps_per_s for _, measured in before)
    gain = now.steps_per_s / fastest - 1
    if early_stopping.min_gain is not None and gain < early_stopping.min_gain:
        reason = (
            f"{100 * gain:+.1f} % against the fastest before it, {100 * early_stopping.min_gain:.0f} % wanted"
        )
        return change, ("plateau", reason)
    return change, None


def _pruned_by_upper_bound(
    trials: Sequence[Trial], gmis: int, num_envs: int, early_stopping: EarlyStopping, score: Score
) -> Trial | None:
    """A GMIperGPU that is not tried, since it cannot win; None where it may.

    More memory for each GMI is an advantage of its own: the ceiling counts only once a GMIperGPU ended for another reason.

    Args:
        trials: so far
        gmis: the GMIperGPU
        num_envs: its fewest environments, with which a score that falls with the batch is highest
        stops: has the ceiling
        score: what is best
    """
    best = best_trial(trials)
    ended = any(trial.verdict in ("saturated", "plateau") or _too_long(trial) for trial in trials)
    if early_stopping.upper_bound is None or best is None or best.score is None or not ended:
        return None
    upper_bound = early_stopping.upper_bound(trials, gmis)
    if score(gmis, num_envs, upper_bound) >= best.score * (1 + early_stopping.min_bound_gain):
        return None
    reason = (
        f"at most {upper_bound:,.0f} steps/s, and {best.system_steps_per_s or 0:,.0f} are reached already"
    )
    return Trial(gmis_per_gpu=gmis, num_envs=num_envs, verdict="cannot win", outcome=None, reason=reason)


def _too_long(trial: Trial) -> bool:
    return isinstance(trial.outcome, TrialFailure) and trial.outcome.kind == "too long"


def project_memory(before: Sequence[tuple[int, TrialMeasurement]], num_envs: int) -> float | None:
    """Eq. 4: memory at ``num_envs`` on the line through the last two trials; None before there are two."""
    if len(before) < 2:
        return None
    (envs_1, one), (envs_2, two) = before[-2:]
    slope = (two.memory_bytes - one.memory_bytes) / (envs_2 - envs_1)
    return (num_envs - envs_2) * slope + two.memory_bytes


def saturation_metric(before: TrialMeasurement, now: TrialMeasurement) -> float:
    """Sat: relative gain in throughput per relative gain in memory (lines 17 to 19).

    Resident memory may stand still while the batch doubles: a gain that costs nothing is infinite, and no gain at no
    cost counts as saturated.
    """
    gain = (now.steps_per_s - before.steps_per_s) / before.steps_per_s
    cost = (now.memory_bytes - before.memory_bytes) / before.memory_bytes
    if cost <= 0:
        return float("inf") if gain > 0 else float("-inf")
    return gain / cost


def highest_score(trials: Sequence[Trial]) -> float:
    """Of what was measured; minus infinity where nothing was."""
    return max((trial.score for trial in trials if trial.score is not None), default=float("-inf"))


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The best of what was measured; None where nothing was."""
    return next((trial for trial in reversed(trials) if trial.best), None)


def core_counts(num_cores: int) -> tuple[int, ...]:
    """Numbers of GMIs to try on cores alone, descending: those that leave the fewest cores idle for each size of GMI.

    With c cores, c // 1, c // 2, ... , 1: another number of GMIs would not give any of them a core more.
    """
    if num_cores < 1:
        raise ValueError(f"num_cores={num_cores}: at least 1 is needed")
    return tuple(sorted({num_cores // width for width in range(1, num_cores + 1)}, reverse=True))


def core_upper_bound(trials: Sequence[Trial], gmis: int, *, num_cores: int) -> float:
    """Steps per second that ``gmis`` GMIs on cores cannot exceed, by the trials with more GMIs before them.

    Steps per second of a core that never waits for another GMI, at its fastest, times the cores that are used. A GMI of
    several cores splits each piece of its work between them, which is never faster than that many times one core; what it
    can save is waiting for other GMIs, and that is left out. Infinite where phases were not measured.
    """
    best = 0.0
    for trial in trials:
        outcome = trial.outcome
        if not isinstance(outcome, TrialMeasurement) or trial.gmis_per_gpu < gmis:
            continue
        iteration_s = sum(outcome.phases_s.values())
        working_s = iteration_s - outcome.phases_s.get("sync_s", iteration_s)
        if working_s <= 0:
            return float("inf")
        cores = num_cores // trial.gmis_per_gpu
        best = max(best, outcome.steps_per_s / cores * iteration_s / working_s)
    return best * gmis * (num_cores // gmis) if best else float("inf")
