"""Measurement of templates: the best candidates of the throughput model train by turns, and the fastest is used.

A candidate whose GMIs crash, hang or run out of memory is left out, with a sentence. Measurements are cached with those of
searches: they are repeated on another machine, with other code or other settings.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import cast

from actors.protocols import IterationResult
from placement.errors import PlanError
from placement.search import TrialFailure
from rayagi.config.learning import Template
from rayagi.config.spec import RunSpec
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.decoupled import session_of
from rayagi.coordinator.memory_need import reject_insufficient_memory
from rayagi.coordinator.probe import VALIDATION, failure_kind, is_sufficient, trim_warmup
from rayagi.coordinator.profiling import without_filling
from rayagi.coordinator.search_store import Measuring, SearchStore
from rayagi.coordinator.template_choice import on_template

MeasureFn = Callable[[RunSpec, str], float]
"""(run, template) -> environment steps per second of all GMIs. Raises what its session raises."""
TurnFn = Callable[[str], float | TrialFailure]
"""Runs one turn of a name: environment steps per second of all GMIs, or why it failed. Raises what its session raises."""
BUDGET_S = 300.0
"""Wall time after which no further turn starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Measurements by turns, as of templates."""

    turns: dict[str, list[float]]
    """Name -> environment steps per second of each of its turns. Without those that failed."""
    failures: dict[str, str] = field(default_factory=dict)
    """Name -> why it does not run."""
    complete: bool = True
    """False: the time budget ended it."""

    def fastest(self, default: str) -> str | None:
        """The name with the highest mean. None: some turns are missing, or all failed.

        The default, unless the other is faster in each turn than the default in any.
        """
        if not self.turns or not self.complete:
            return None
        best = max(self.turns, key=lambda name: statistics.fmean(self.turns[name]))
        known = self.turns.get(default)
        return default if known and min(self.turns[best]) <= max(known) else best

    def text(self, predicted: Mapping[str, float]) -> str:
        """Measured and predicted steps per second of each template, and why the others failed."""
        parts = [
            f"{name} {' and '.join(f'{speed:,.0f}' for speed in speeds)} steps/s (predicted {predicted[name]:,.0f})"
            for name, speeds in self.turns.items()
            if speeds
        ]
        sentences = [f"measured by turns: {', '.join(parts)}."] if parts else ["nothing could be measured."]
        sentences += [f"{name} does not run here: {reason}" for name, reason in self.failures.items()]
        return " ".join(sentences)


def compared(
    store: SearchStore,
    note: str,
    names: Sequence[str],
    measure: TurnFn,
    *,
    log: Callable[[str], None],
    measuring: Measuring,
    missing: PlanError,
) -> Comparison:
    """The cached comparison, or a new one.

    Args:
        store: the cache of the run
        note: its name there
        names: what is compared, the default first
        measure: runs one turn
        log: called with a sentence before turns start
        measuring: what may be measured
        missing: raised if it is not cached, and nothing may be measured

    Raises:
        ClusterUnreachableError, ReservationError, EnvError: nothing can be measured.
    """
    stored = store.load_comparison(note, measuring)
    if stored is not None:
        return Comparison(**stored)
    if measuring == "nothing":
        raise missing
    log(f"Comparing {', '.join(names)} by turns: about a minute.")
    with connected():
        found, is_final = by_turns(names, measure)
    store.save_comparison(note, asdict(found), is_final=found.complete and is_final, log=log)
    return found


def by_turns(
    names: Sequence[str], measure: TurnFn, clock: Callable[[], float] = time.monotonic
) -> tuple[Comparison, bool]:
    """Measure in the order A B C C B A, so that drift of the machine's speed affects all alike.

    Returns:
        The comparison, and whether its failures would recur.
    """
    turns: dict[str, list[float]] = {name: [] for name in names}
    failures, is_final = dict[str, str](), True
    ends_at = clock() + BUDGET_S
    for name in (*names, *reversed(names)):
        if name in failures:
            continue
        if clock() >= ends_at:
            return Comparison(turns=turns, failures=failures, complete=False), is_final
        if len(turns) == 1 and all(turns.values()):
            break  # the others failed
        outcome = _turn(measure, name)
        if isinstance(outcome, TrialFailure):
            failures[name] = f"{outcome.kind} ({outcome.reason})"
            is_final = is_final and outcome.is_final
            del turns[name]
        else:
            turns[name].append(outcome)
    return Comparison(turns=turns, failures=failures), is_final


def _turn(measure: TurnFn, name: str) -> float | TrialFailure:
    try:
        return measure(name)
    except Exception as error:
        kind = "cannot be planned" if isinstance(error, PlanError) else failure_kind(error)
        if kind is None:
            raise
        return TrialFailure(kind=kind, reason=f"{type(error).__name__}: {error}")


def trained_steps_per_s(spec: RunSpec, template: str) -> float:
    """Environment steps per second that are trained on, of a short run on a template.

    A replay is not filled first: while it is, nothing is learned.
    """
    candidate = without_filling(on_template(spec, cast("Template", template)))
    with session_of(candidate, on_plan=lambda plan: reject_insufficient_memory(candidate, plan)) as session:

        def iterate(count: int) -> float:
            session.submit(count)
            return sum(map(_steps, session.collect(VALIDATION.hang_s * count)))

        return steps_per_s_of(iterate)


def _steps(result: IterationResult) -> float:
    """Environment steps that an update used. Free-running collectors may have made others."""
    return result.metrics.get("train_samples", result.metrics["env_steps"])


def steps_per_s_of(iterate: Callable[[int], float], clock: Callable[[], float] = time.perf_counter) -> float:
    """Environment steps per second of a run, without its warm-up.

    Args:
        iterate: runs so many iterations; returns their environment steps
        clock: the time in seconds
    """
    iterate(1)  # compiles, allocates, and fills the channels
    began = clock()
    iterate(1)
    size = max(1, round(VALIDATION.iteration_s / max(clock() - began, 1e-9)))
    seconds, steps = list[float](), list[float]()
    began = clock()
    while True:
        started = clock()
        steps.append(iterate(size))
        seconds.append(clock() - started)
        if len(seconds) > 2:
            steady = trim_warmup(seconds)
            if is_sufficient(VALIDATION, steady, clock() - began):
                return statistics.fmean(steps[steady.warm_up :]) / steady.mean_s
