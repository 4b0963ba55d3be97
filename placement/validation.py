"""The best candidates of a search, measured again before one of them is called the best. Pure, over an injected probe.

The best of many noisy trials is, more likely than not, one that was lucky. So the first measurements only choose who is
measured again; what is then found decides, and is what a run may expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import hypot, sqrt
from statistics import fmean, stdev

from placement.search import Score, Trial, TrialFailure, TrialMeasurement, throughput

MAX_FINALISTS = 3
"""Candidates that are measured again."""
MAX_TRIAL_ERROR = 0.1
"""The largest error that a trial is taken to have: beyond it, it would make everything a contender."""
VALIDATION_ROUNDS = 4
"""In which each of them is measured again, at most. A round differs from the next by some 7 % where others share the
machine: the means of four rounds of two candidates differ by 5 % for no reason."""
SUFFICIENT_DURATION_S = 20.0
"""What was measured for so long in all needs no further round: it outlasted a machine's slow and fast spells."""
TIE_TOLERANCE = 0.01
"""Two that are no further apart than this, nor than their errors, are as good as each other. Noise is larger, but what is
given away by a tie comes on top of what noise hides."""

RemeasureFn = Callable[[int, int, int], TrialMeasurement | TrialFailure]
"""From GMIs per device, environments per GMI and the round, counted from 1, to what was measured."""


def validate_finalists(
    again: RemeasureFn,
    trials: Sequence[Trial],
    *,
    num_gpus: int,
    score: Score = throughput,
    most: int = MAX_FINALISTS,
) -> Iterator[Trial]:
    """Measure the contenders again and yield one trial for each; the one that is best is marked so.

    Four times each, or fewer where that takes long; in the order of the search backwards, then forwards, and so on: what
    drifts meanwhile meets all alike, and GMIs that still run need not be started again. One that fails is out; where all
    fail, the next best take their place.

    Args:
        again: measures a candidate, better than the search did
        trials: of the search, in its order
        num_gpus: devices of the whole system
        score: what is best
        most: candidates at a time
    """
    left = _merge_repeats(trials)
    while chosen := sorted(finalists(left, most), key=left.index, reverse=True):
        rounds: list[list[TrialMeasurement | TrialFailure]] = [[] for _ in chosen]
        for number in range(1, VALIDATION_ROUNDS + 1):
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
        yield from (best if best is not None and _same_candidate(trial, best) else trial for trial in found)
        if best is not None:
            return
        left = [trial for trial in left if trial not in chosen]


def finalists(trials: Sequence[Trial], most: int = MAX_FINALISTS) -> tuple[Trial, ...]:
    """Those that may be the best as far as their errors tell, the highest score first, ``most`` of them."""
    measured = sorted((trial for trial in trials if trial.score is not None), key=_score, reverse=True)
    if not measured:
        return ()
    least = _score(measured[0]) * (1 - min(MAX_TRIAL_ERROR, _error(measured[0])))
    near = [trial for trial in measured if _score(trial) * (1 + min(MAX_TRIAL_ERROR, _error(trial))) >= least]
    return tuple(near[:most])


def select_best(trials: Sequence[Trial]) -> Trial | None:
    """The highest score, marked as the best; of those as good as it, the smallest batch. None where nothing was measured.

    A smaller batch learns at least as much from each step, so that a tie in steps per second is none in learning.
    """
    ranked = sorted((trial for trial in trials if trial.score is not None), key=_score, reverse=True)
    if not ranked:
        return None
    top = ranked[0]
    alike = [trial for trial in ranked if _score(top) - _score(trial) <= _tie(top, trial) * _score(top)]
    best = min(alike, key=lambda trial: (_batch(trial), -_score(trial)))
    if best is top:
        return replace(best, best=True)
    behind = 100 * (1 - _score(best) / _score(top))
    reason = (
        f"{behind:.1f} % behind {top.gmis_per_gpu} x {top.num_envs}, no more than noise, with a smaller batch"
    )
    return replace(best, best=True, reason=reason)


def pool_measurements(rounds: Sequence[TrialMeasurement]) -> TrialMeasurement:
    """Measurements of a candidate as one: their mean, and an error that is no smaller than what they differ by."""
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


_T_80 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)
"""Student's t, two-sided 80 %, for 1 to 10 degrees of freedom; 1.282 for infinitely many."""


def half_width(speeds: Sequence[float]) -> float | None:
    """Half of the interval in which 80 of 100 later means of as many rounds lie, relative to the mean of these.

    Rounds differ by more than the error within each: a machine has slow and fast spells that outlast a round. With k rounds
    of standard deviation s, the difference of two such means has the deviation s sqrt(2 / k).

    Args:
        speeds: of each round

    Returns:
        None for a single round, which does not tell.
    """
    count = len(speeds)
    if count < 2:
        return None
    mean = sum(speeds) / count
    deviation = sqrt(sum((speed - mean) ** 2 for speed in speeds) / (count - 1))
    t = _T_80[count - 2] if count - 2 < len(_T_80) else 1.282 + 0.9 / (count - 1)
    return t * deviation * sqrt(2 / count) / mean


def _validated(
    trial: Trial, outcomes: Sequence[TrialMeasurement | TrialFailure], num_gpus: int, score: Score
) -> Trial:
    """What the rounds of a contender say."""
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
    """In their order, each with the mean of its scores.

    Who was measured beside another has kept pace with it, or not, whatever minute it was: where the other is by so much
    faster on average than it was there, so is this one.
    """
    found: dict[tuple[int, int], list[Trial]] = {}
    for trial in trials:
        found.setdefault(_candidate(trial), []).append(trial)
    means = {candidate: _mean_score(same) for candidate, same in found.items()}
    paces: dict[tuple[int, int], float] = {}
    for rival, beside in pairwise(trials):
        if rival.verdict == "compared" and rival.score:
            paces[_candidate(beside)] = means[_candidate(rival)] / rival.score
    return [
        same[0]
        if same[0].score is None
        else replace(same[0], score=means[candidate] * paces.get(candidate, 1.0))
        for candidate, same in found.items()
    ]


def _candidate(trial: Trial) -> tuple[int, int]:
    return trial.gmis_per_gpu, trial.num_envs


def _mean_score(trials: Sequence[Trial]) -> float:
    return fmean(map(_score, trials))


def _score(trial: Trial) -> float:
    return trial.score or 0.0


def _error(trial: Trial) -> float:
    return trial.outcome.relative_error if isinstance(trial.outcome, TrialMeasurement) else 0.0


def _tie(one: Trial, other: Trial) -> float:
    return min(TIE_TOLERANCE, hypot(_error(one), _error(other)))


def _batch(trial: Trial) -> int:
    return trial.gmis_per_gpu * trial.num_envs


def _same_candidate(one: Trial, other: Trial) -> bool:
    return _candidate(one) == _candidate(other)
