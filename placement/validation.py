"""Validation of a search: remeasures its best candidates and selects one. A pure function of an injected probe.

The maximum of many noisy trials is biased upwards. The search's measurements therefore only select the finalists. The new
measurements select the winner and predict its throughput.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import hypot, sqrt
from statistics import fmean, stdev

from placement.search import Score, Trial, TrialFailure, TrialMeasurement, throughput

MAX_FINALISTS = 3
"""Candidates that are remeasured at a time."""
MAX_TRIAL_ERROR = 0.1
"""Cap on a trial's relative error when finalists are selected; a larger error would admit every candidate."""
VALIDATION_ROUNDS = 4
"""Rounds per finalist, at most. On a shared machine rounds differ by some 7 %: the means of four rounds of two equal
candidates differ by 5 %."""
SUFFICIENT_DURATION_S = 20.0
"""Total measured time after which a finalist needs no further round: longer than the machine's slow and fast phases."""
TIE_TOLERANCE = 0.01
"""Two candidates tie if their relative difference is below this and below their errors. Noise is larger than this, but a
loss by a tie adds to what noise hides."""
LARGE_ERROR = 0.1
"""Relative error above which a winner within the others' errors is reported as undecided: more than rounds on a shared
machine differ by."""

RemeasureFn = Callable[[int, int, int], TrialMeasurement | TrialFailure]
"""(GMIs per device, environments per GMI, round counted from 1) -> a new measurement."""


def validate_finalists(
    again: RemeasureFn,
    trials: Sequence[Trial],
    *,
    num_gpus: int,
    score: Score = throughput,
) -> Iterator[Trial]:
    """Remeasure the finalists and yield one trial for each; ``best`` marks the winner.

    Each finalist gets four rounds, or fewer if they take long. Rounds alternate between the reverse and the forward order
    of the search: drift affects all finalists alike, and running GMIs are reused. A finalist that fails is out. If all
    fail, the next best candidates follow.

    Args:
        again: measures a candidate, more precisely than the search did
        trials: all trials of the search, in its order
        num_gpus: devices of the whole system
        score: objective to maximise
    """
    left = _merge_repeats(trials)
    while chosen := sorted(finalists(left), key=left.index, reverse=True):
        rounds: list[list[TrialMeasurement | TrialFailure]] = [[] for _ in chosen]
        for number in range(1, VALIDATION_ROUNDS + 1):
            # Odd rounds backwards, even rounds forwards (``chosen`` is in reverse order of the search).
            places = range(len(chosen))
            for place in places if number % 2 else reversed(places):
                if _needs_more_rounds(rounds[place]):
                    trial = chosen[place]
                    rounds[place].append(again(trial.gmis_per_gpu, trial.num_envs, number))
        found = [
            _validated(trial, outcomes, num_gpus, score)
            for trial, outcomes in zip(chosen, rounds, strict=True)
        ]
        best = select_best(found)
        yield from (
            best if best is not None and trial.candidate == best.candidate else trial for trial in found
        )
        if best is not None:
            return
        left = [trial for trial in left if trial not in chosen]


def finalists(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """At most ``MAX_FINALISTS`` whose confidence interval reaches the best one's lower limit; highest score first."""
    measured = sorted((trial for trial in trials if trial.score is not None), key=_score, reverse=True)
    if not measured:
        return ()
    least = _score(measured[0]) * (1 - min(MAX_TRIAL_ERROR, _error(measured[0])))
    near = [trial for trial in measured if _score(trial) * (1 + min(MAX_TRIAL_ERROR, _error(trial))) >= least]
    return tuple(near[:MAX_FINALISTS])


def select_best(trials: Sequence[Trial]) -> Trial | None:
    """The highest score, marked as the best; on a tie, the smallest batch. None if nothing was measured.

    A smaller batch learns at least as much from each step, so it wins a tie in steps per second.
    """
    ranked = sorted((trial for trial in trials if trial.score is not None), key=_score, reverse=True)
    if not ranked:
        return None
    top = ranked[0]
    alike = [trial for trial in ranked if _score(top) - _score(trial) <= _tie(top, trial) * _score(top)]
    best = min(alike, key=lambda trial: (trial.gmis_per_gpu * trial.num_envs, -_score(trial)))
    if best is top:
        return replace(best, best=True)
    behind = 100 * (1 - _score(best) / _score(top))
    reason = f"{behind:.1f} % behind {top.gmis_per_gpu} x {top.num_envs}, within noise, with a smaller batch"
    return replace(best, best=True, reason=reason)


def undecided(best: Trial, trials: Sequence[Trial]) -> list[Trial]:
    """The best trial and those that may be as fast, if one of their errors exceeds ``LARGE_ERROR``; else empty.

    Confidence intervals that overlap: s (1 + e) >= s_best (1 - e_best). Validated trials are compared with validated ones
    only, and single trials with single ones.

    Args:
        best: the winner
        trials: all trials, in the order of the search

    Returns:
        The best first, then the highest score.
    """
    least = _score(best) * (1 - _error(best))
    latest = {
        trial.candidate: trial
        for trial in trials
        if trial.score is not None and (trial.verdict == "again") == (best.verdict == "again")
    }
    latest.pop(best.candidate, None)
    near = [trial for trial in latest.values() if _score(trial) * (1 + _error(trial)) >= least]
    if not near or max(map(_error, (best, *near))) <= LARGE_ERROR:
        return []
    return [best, *sorted(near, key=_score, reverse=True)]


def pool_measurements(rounds: Sequence[TrialMeasurement]) -> TrialMeasurement:
    """Pool a candidate's rounds: mean throughput, and the larger of the errors within and between rounds.

    within = sqrt(sum(e_i^2)) / k; between = s / (sqrt(k) * mean), for k rounds with standard deviation s.
    """
    count = len(rounds)
    if count == 1:
        return rounds[0]
    speeds = [each.steps_per_s for each in rounds]
    within = hypot(*(each.relative_error for each in rounds)) / count
    between = stdev(speeds) / sqrt(count) / fmean(speeds)
    names = set.intersection(*(set(each.phases_s) for each in rounds))
    return TrialMeasurement(
        steps_per_s=fmean(speeds),
        memory_bytes=max(each.memory_bytes for each in rounds),
        relative_error=max(within, between),
        phases_s={name: fmean(each.phases_s[name] for each in rounds) for name in sorted(names)},
        duration_s=sum(each.duration_s for each in rounds),
    )


def half_width(speeds: Sequence[float]) -> float | None:
    """Half-width of the 80 % prediction interval for a later mean of as many rounds, relative to the mean of these.

    half_width = t_{k-1} * s * sqrt(2 / k) / mean, for k rounds with standard deviation s

    Rounds differ by more than the error within each, since a machine's slow and fast phases outlast a round.

    Args:
        speeds: steps per second of each round

    Returns:
        None for a single round, which has no deviation.
    """
    count = len(speeds)
    if count < 2:
        return None
    # Imported here: it takes 0.2 s, and `rayagi train` needs it only where a search has measured.
    from scipy.special import stdtrit

    t_80 = float(stdtrit(count - 1, 0.9))  # two-sided 80 %
    return t_80 * stdev(speeds) * sqrt(2 / count) / fmean(speeds)


def _validated(
    trial: Trial, outcomes: Sequence[TrialMeasurement | TrialFailure], num_gpus: int, score: Score
) -> Trial:
    """The pooled trial of a finalist; without a score if a round failed."""
    gmis, envs = trial.gmis_per_gpu, trial.num_envs
    plain = Trial(gmis_per_gpu=gmis, num_envs=envs, verdict="again", outcome=outcomes[-1])
    measured = [outcome for outcome in outcomes if isinstance(outcome, TrialMeasurement)]
    if len(measured) < len(outcomes):
        return plain
    outcome = pool_measurements(measured)
    total = outcome.steps_per_s * gmis * num_gpus
    return replace(plain, outcome=outcome, system_steps_per_s=total, score=score(gmis, envs, total))


def _needs_more_rounds(outcomes: Sequence[TrialMeasurement | TrialFailure]) -> bool:
    failed = any(isinstance(outcome, TrialFailure) for outcome in outcomes)
    return not failed and sum(outcome.duration_s for outcome in outcomes) < SUFFICIENT_DURATION_S


def _merge_repeats(trials: Sequence[Trial]) -> list[Trial]:
    """One trial per candidate, in their order, with the mean of its scores.

    A candidate that was measured next to a rival ("compared") has its score scaled by mean(rival) / rival there. This
    removes the machine's drift: both were measured in the same minute.
    """
    found: dict[tuple[int, int], list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.candidate, []).append(trial)
    # A candidate that crashed once may have been measured later.
    found = {
        candidate: [trial for trial in same if trial.score is not None] or same
        for candidate, same in found.items()
    }
    means = {candidate: fmean(map(_score, same)) for candidate, same in found.items()}
    drift: dict[tuple[int, int], float] = {}
    for rival, compared in pairwise(trials):
        if rival.verdict == "compared" and rival.score:
            drift[compared.candidate] = means[rival.candidate] / rival.score
    return [
        same[0]
        if same[0].score is None
        else replace(same[0], score=means[candidate] * drift.get(candidate, 1.0))
        for candidate, same in found.items()
    ]


def _score(trial: Trial) -> float:
    return trial.score or 0.0


def _error(trial: Trial) -> float:
    return trial.outcome.relative_error if isinstance(trial.outcome, TrialMeasurement) else 0.0


def _tie(one: Trial, other: Trial) -> float:
    return min(TIE_TOLERANCE, hypot(_error(one), _error(other)))
