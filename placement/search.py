"""Algorithm 1: profiling-based GMI exploration (GMI-DRL §3.1.2; the preprint's Algorithm 2), as a pure function.

The probe is injected: it runs a candidate and returns its throughput and memory. This module decides what to try next, when
to stop, and which candidate is best. *Row* means all trials of one GMIperGPU. Choices where the papers differ or are silent:

- Every measured trial may be the best. The published loop skips the first num_env of a row (lines 12-15) and the one that
  saturates (line 22). Both are measured anyway, and on a small machine the first may win. The order of trials is as
  published.
- A failed trial ends its row, since more environments need more memory and time. (The preprint tries larger ones; the later
  paper only projects.)
- A trial that used more than its GMI's share of memory, where no limit was enforced, counts as out of memory.
- ``EarlyStopping`` holds the rules that end a row. Its defaults are the papers' rules. The other fields handle what the
  papers do not cover: measurement noise, and CPU cores, where memory hardly grows with environments.
- A coarse pass may come first: every row with few numbers of environments. The rows then follow from the fastest to the
  slowest, so that a search that is ended early has seen all of them, and the best ones closely.
- ``estimate`` (line 26) is one GMI's throughput times the number of GMIs. The probe runs all GMIs of a device at once, so
  their contention is measured. Devices are assumed identical and independent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

SATURATION = 0.1
"""The papers' threshold alpha on Sat ("generally < 0.1", preprint §5.2)."""
GMIS_PER_GPU: tuple[int, ...] = tuple(range(10, 0, -1))
NUM_ENVS: tuple[int, ...] = tuple(128 * 2**power for power in range(9))
"""128 to 32768, as in the paper."""
NUM_ENVS_ON_CORES: tuple[int, ...] = tuple(16 * 2**power for power in range(9))
"""16 to 4096: a core simulates thousands of steps per second, a GPU millions."""

FailureKind = Literal["crashed", "out of memory", "hung", "too long", "cannot be planned"]
"""``too long``: measuring it would exceed the time limit of a trial. ``cannot be planned``: the machine cannot hold so many
GMIs on all of its devices together."""
TrialVerdict = Literal[
    "coarse",
    "first",
    "going on",
    "saturated",
    "plateau",
    "no memory",
    "failed",
    "cannot win",
    "compared",
    "again",
]
"""``coarse``: a trial of the coarse pass. ``first``: the row's first trial. ``going on``: the row continues. ``saturated``:
Sat < alpha. ``plateau``: gain below ``EarlyStopping.min_gain``. ``cannot win``: skipped because of its upper bound.
``compared``: the row's fastest candidate, remeasured next to a slower one. ``again``: remeasured by
``placement.validation``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialMeasurement:
    """Result of a successful trial."""

    steps_per_s: float
    """Environment steps per second of one GMI while all GMIs of its device run."""
    memory_bytes: int
    """Memory of the largest GMI: device memory on a GPU, resident memory on cores."""
    relative_error: float = 0.0
    """Half of the throughput's 95 % confidence interval, relative to it."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Mean seconds of an iteration by phase; names as in the metric catalogue."""
    duration_s: float = 0.0
    """Wall time of the trial, including start-up and shutdown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFailure:
    """A candidate that could not be measured."""

    kind: FailureKind
    reason: str
    duration_s: float = 0.0

    @property
    def is_final(self) -> bool:
        """Whether it would fail again: by memory or time. Crashes and hangs may not recur."""
        return self.kind in ("out of memory", "too long")


Probe = Callable[[int, int], TrialMeasurement | TrialFailure]
"""(GMIs per device, environments per GMI) -> the candidate's measurement; its failure is returned, not raised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One step of the search."""

    gmis_per_gpu: int
    num_envs: int
    verdict: TrialVerdict
    outcome: TrialMeasurement | TrialFailure | None
    """None if the candidate was skipped: projected out of memory, or its upper bound is too low."""
    reason: str = ""
    """The verdict in numbers, for rules beyond the papers'."""
    projected_bytes: float | None = None
    """m_p of eq. 4; None for the first two trials of a row."""
    saturation: float | None = None
    """Sat (lines 17-19); None for the first trial of a row."""
    system_steps_per_s: float | None = None
    """Estimate for all devices; None if nothing was measured or the candidate does not fit."""
    score: float | None = None
    """The objective to maximise: the system's throughput by default."""
    best: bool = False
    """Whether it scored higher than every earlier trial."""

    @property
    def candidate(self) -> tuple[int, int]:
        """GMIs per device, and environments of each."""
        return self.gmis_per_gpu, self.num_envs


Score = Callable[[int, int, float], float]
"""Objective: (GMIs per device, environments per GMI, the system's steps per second) -> score to maximise."""


def throughput(gmis_per_gpu: int, num_envs: int, steps_per_s: float) -> float:
    """The paper's objective."""
    return steps_per_s


UpperBoundFn = Callable[[Sequence[Trial], int], float]
"""(trials so far, GMIs per device) -> steps per second that the system cannot exceed; infinity if unknown."""


CompareFn = Callable[[int, int, int], TrialMeasurement | TrialFailure]
"""(GMIs per device, environments per GMI, which comparison of this candidate: 1, 2, ...) -> a new measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStopping:
    """Rules that end or skip a row (all trials of one GMIperGPU). The defaults are the papers' rules."""

    saturation: float = SATURATION
    """alpha: a trial is saturated if Sat = (gain in throughput) / (gain in memory) is smaller."""
    min_gain: float | None = None
    """A trial is on the plateau if its relative gain over the row's fastest trial is smaller. None: no such rule."""
    patience: int = 1
    """Consecutive saturated or plateau trials that end a row."""
    compare: CompareFn | None = None
    """Remeasures the row's fastest candidate before a trial ends the row for lack of gain; the new value replaces the old.
    A machine's speed drifts: the earlier value may come from a faster minute."""
    upper_bound: UpperBoundFn | None = None
    """Upper bound on a row's throughput. It applies once an earlier row has ended for lack of gain or of time."""
    min_bound_gain: float = 0.0
    """A row is skipped unless its upper bound exceeds the best score by this fraction."""


PAPER_STOPPING = EarlyStopping()


def explore(
    probe: Probe,
    *,
    num_gpus: int,
    gpu_memory_bytes: int,
    early_stopping: EarlyStopping = PAPER_STOPPING,
    gmis_per_gpu: Sequence[int] = GMIS_PER_GPU,
    num_envs: Sequence[int] = NUM_ENVS,
    coarse: Sequence[int] = (),
    score: Score = throughput,
) -> Iterator[Trial]:
    """Algorithm 1: most GMIs first, environments doubling; yields each finished trial.

    A candidate of the coarse pass is probed again where its row follows: the probe should remember its outcomes.

    Args:
        probe: measures a candidate
        num_gpus: devices of the whole system; 1 for the cores of a machine without GPUs
        gpu_memory_bytes: memory of one device, which its GMIs share evenly
        early_stopping: rules that end or skip a row
        gmis_per_gpu: numbers of GMIs on one device, in the order of the search
        num_envs: numbers of environments of one GMI, ascending
        coarse: those of the coarse pass, from the first of ``num_envs`` on; empty: no such pass
        score: objective to maximise
    """
    trials: list[Trial] = []

    def row(gmis: int, envs: Sequence[int], rules: EarlyStopping) -> Iterator[Trial]:
        for trial in _explore_env_counts(probe, gmis, envs, gpu_memory_bytes / gmis, num_gpus, rules, score):
            # Lines 27-29: acc_top > max_top.
            yield replace(trial, best=trial.score is not None and trial.score > highest_score(trials))

    if coarse:
        for gmis in gmis_per_gpu:
            for trial in row(gmis, coarse, PAPER_STOPPING):
                # A row whose first trial fails has ended; any other end is only that of the coarse pass.
                ended = trial.num_envs == num_envs[0] and trial.score is None
                trials.append(trial if ended else replace(trial, verdict="coarse"))
                yield trials[-1]
    first_fine = len(trials)
    for gmis in _fastest_first(trials, gmis_per_gpu):  # line 2: GMIperGPU in 10 ... 1
        # Ours: skip the row if even its upper bound is no improvement.
        pruned = _pruned_by_upper_bound(trials[first_fine:], gmis, num_envs[0], early_stopping, score)
        for trial in row(gmis, num_envs, early_stopping) if pruned is None else (pruned,):
            trials.append(trial)
            yield trial


def _fastest_first(coarse: Sequence[Trial], gmis_per_gpu: Sequence[int]) -> list[int]:
    """The rows that have not ended in the coarse pass, by their best score there; in their order without such a pass."""
    ended = {trial.gmis_per_gpu for trial in coarse if trial.verdict != "coarse"}
    rows = [gmis for gmis in gmis_per_gpu if gmis not in ended]
    return sorted(
        rows, key=lambda gmis: -highest_score([each for each in coarse if each.gmis_per_gpu == gmis])
    )


_ROW_ENDS: tuple[TrialVerdict, ...] = ("saturated", "plateau", "no memory", "failed", "cannot win")


def untried(
    trials: Sequence[Trial], gmis_per_gpu: Sequence[int], num_envs: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """What a search that was ended early has not tried: GMIs per device -> numbers of environments without a trial.

    Only rows that no rule has ended; some of these candidates might have been skipped.
    """
    left: dict[int, tuple[int, ...]] = {}
    for gmis in gmis_per_gpu:
        row = [trial for trial in trials if trial.gmis_per_gpu == gmis]
        last = any(trial.num_envs == num_envs[-1] and trial.verdict in ("first", "going on") for trial in row)
        if not last and not any(trial.verdict in _ROW_ENDS for trial in row):
            tried = {trial.num_envs for trial in row}
            left[gmis] = tuple(envs for envs in num_envs if envs not in tried)
    return left


def _explore_env_counts(
    probe: Probe,
    gmis: int,
    num_envs: Sequence[int],
    memory: float,
    num_gpus: int,
    early_stopping: EarlyStopping,
    score: Score,
) -> Iterator[Trial]:
    """One row, whose GMIs have ``memory`` bytes each (lines 3-31).

    The loop ends at the first candidate that does not fit, fails, or exhausts ``early_stopping.patience``.
    """
    before: list[tuple[int, TrialMeasurement]] = []
    compared: Counter[int] = Counter()
    stalled = 0

    def scored(trial: Trial, outcome: TrialMeasurement) -> Trial:
        total = outcome.steps_per_s * gmis * num_gpus  # line 26: estimate(GMIperGPU, num_GPU, top)
        worth = score(gmis, trial.num_envs, total)
        return replace(trial, outcome=outcome, system_steps_per_s=total, score=worth)

    for envs in num_envs:  # line 4
        # Lines 6-8: stop if the memory projected by eq. 4 exceeds GPU_mem / GMIperGPU.
        projected = project_memory(before, envs)
        trial = Trial(
            gmis_per_gpu=gmis, num_envs=envs, verdict="no memory", outcome=None, projected_bytes=projected
        )
        if projected is not None and projected > memory:
            yield trial
            return
        # Line 10: profile. A failure, or a measured excess over the GMI's share of memory, ends the row.
        outcome = probe(gmis, envs)
        if isinstance(outcome, TrialFailure) or outcome.memory_bytes > memory:
            failed: TrialVerdict = "failed" if isinstance(outcome, TrialFailure) else "no memory"
            yield replace(trial, outcome=outcome, verdict=failed)
            return
        # Lines 17-22: Sat, and whether the trial gained too little.
        change, stall = _stall_verdict(before, outcome, early_stopping)
        # Ours: before this trial ends the row, remeasure the row's fastest candidate and judge once more.
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
                yield scored(replace(remeasured, reason=f"next to {gmis} x {envs}"), now)
                drifted = replace(earlier, steps_per_s=now.steps_per_s)
                before[before.index((rival, earlier))] = rival, drifted
                change, stall = _stall_verdict(before, outcome, early_stopping)
        # Line 23, with patience: break after so many consecutive trials without enough gain.
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
    """Sat of a trial (None for the row's first), and the rule by which it gained too little (None: it gained enough).

    The rules: Sat < alpha (line 22); ours: steps / max(earlier steps) - 1 < min_gain.
    """
    if not before:
        return None, None
    change = saturation_metric(before[-1][1], now)
    if change < early_stopping.saturation:
        return change, ("saturated", "")
    fastest = max(measured.steps_per_s for _, measured in before)
    gain = now.steps_per_s / fastest - 1
    if early_stopping.min_gain is not None and gain < early_stopping.min_gain:
        reason = (
            f"{100 * gain:+.1f} % over the fastest before it, {100 * early_stopping.min_gain:.0f} % required"
        )
        return change, ("plateau", reason)
    return change, None


def _pruned_by_upper_bound(
    trials: Sequence[Trial], gmis: int, num_envs: int, early_stopping: EarlyStopping, score: Score
) -> Trial | None:
    """The "cannot win" trial of a row whose upper bound is too low; None if the row has to be tried.

    The bound applies only once a row has ended for another reason than memory: fewer GMIs have more memory each, which may
    help by itself.

    Args:
        trials: the trials so far
        gmis: GMIperGPU of the row
        num_envs: fewest environments of the row; a score that falls with the batch is highest there
        early_stopping: has the upper bound
        score: objective to maximise
    """
    ended = any(
        trial.verdict in ("saturated", "plateau")
        or (isinstance(trial.outcome, TrialFailure) and trial.outcome.kind == "too long")
        for trial in trials
    )
    scored = (trial for trial in trials if trial.score is not None)
    best = max(scored, key=lambda trial: highest_score([trial]), default=None)
    if early_stopping.upper_bound is None or best is None or best.score is None or not ended:
        return None
    upper_bound = early_stopping.upper_bound(trials, gmis)
    # Prune if score(bound) < best score * (1 + min_bound_gain).
    if score(gmis, num_envs, upper_bound) >= best.score * (1 + early_stopping.min_bound_gain):
        return None
    reason = f"at most {upper_bound:,.0f} steps/s; the best so far has {best.system_steps_per_s or 0:,.0f}"
    return Trial(gmis_per_gpu=gmis, num_envs=num_envs, verdict="cannot win", outcome=None, reason=reason)


def project_memory(before: Sequence[tuple[int, TrialMeasurement]], num_envs: int) -> float | None:
    """Eq. 4: memory at ``num_envs``, extrapolated linearly from the last two trials; None with fewer than two.

    m_p = (e - e_2) / (e_2 - e_1) * (m_2 - m_1) + m_2
    """
    if len(before) < 2:
        return None
    (envs_1, one), (envs_2, two) = before[-2:]
    slope = (two.memory_bytes - one.memory_bytes) / (envs_2 - envs_1)
    return (num_envs - envs_2) * slope + two.memory_bytes


def saturation_metric(before: TrialMeasurement, now: TrialMeasurement) -> float:
    """Sat = R_top / R_mem: relative gain in throughput per relative gain in memory (lines 17-19).

    Resident memory may not grow while the batch doubles. Sat is then +infinity with a gain in throughput, and -infinity
    (saturated) without one.
    """
    gain = (now.steps_per_s - before.steps_per_s) / before.steps_per_s  # R_top, line 17
    cost = (now.memory_bytes - before.memory_bytes) / before.memory_bytes  # R_mem, line 18
    if cost <= 0:
        return float("inf") if gain > 0 else float("-inf")
    return gain / cost


def highest_score(trials: Sequence[Trial]) -> float:
    """The highest score of the measured trials; minus infinity if there is none."""
    return max((trial.score for trial in trials if trial.score is not None), default=float("-inf"))


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The best of the measured trials; None if there is none."""
    return next((trial for trial in reversed(trials) if trial.best), None)


def core_counts(num_cores: int) -> tuple[int, ...]:
    """Numbers of GMIs to try on cores, descending: the most GMIs of each width that fit.

    With c cores: c // 1, c // 2, ..., 1. Any other number would leave cores idle without a wider GMI.
    """
    if num_cores < 1:
        raise ValueError(f"num_cores={num_cores}: at least 1 is needed")
    return tuple(sorted({num_cores // width for width in range(1, num_cores + 1)}, reverse=True))


def core_upper_bound(trials: Sequence[Trial], gmis: int, *, num_cores: int) -> float:
    """Upper bound on the steps per second of ``gmis`` GMIs on cores, from the trials with at least as many GMIs.

    bound = max over trials (steps per second and core * t_iteration / (t_iteration - t_sync)) * cores in use

    The factor removes the time spent waiting for other GMIs. A GMI of w cores is never faster than w times one core: it can
    only save that waiting. Infinite if a trial has no phase times.
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
    return best * gmis * (num_cores // gmis) if best else float("inf")  # num_cores // gmis: cores per GMI
