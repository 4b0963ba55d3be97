"""Configuration search on this machine: runs Algorithm 1 with a real probe, a cache, a time budget and an objective."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from placement.errors import counted
from placement.search import (
    GMIS_PER_GPU,
    NUM_ENVS,
    NUM_ENVS_ON_CORES,
    PAPER_STOPPING,
    CompareFn,
    EarlyStopping,
    Score,
    Trial,
    TrialFailure,
    TrialMeasurement,
    best_trial,
    core_counts,
    core_upper_bound,
    explore,
    throughput,
    untried,
)
from placement.types import Machine, core_ranges
from placement.validation import validate_finalists
from rayagi.algorithms.gradient_noise import NoiseScale, useful_steps_per_s
from rayagi.config.spec import RunSpec
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.probe import SCREENING, VALIDATION, SessionProbe, plan_failure
from rayagi.coordinator.profiling import noise_scale_of
from rayagi.coordinator.search_store import SearchStore
from rayagi.planning import usable_machine, uses_gpus

Objective = Literal["throughput", "time_to_return"]

HOST_MEMORY_SHARE = 0.9
"""Fraction of a host's memory that its GMIs may use together: Ray kills processes from 95 % on."""


MIN_GAIN = 0.05
"""On cores: minimum relative gain of a doubling over the row's fastest trial. If a fixed cost per iteration is spread over
more environments, a doubling that gains g leaves at most g / (1 - g) to all further ones."""
COARSE_STEP = 3
"""With a time budget, a coarse pass tries every third number of environments, eight times the one before."""
PATIENCE = 3
"""On cores: consecutive doublings without that gain that end a row. One or two may be disturbed trials."""
MIN_BOUND_GAIN = 0.1
"""On cores: minimum gain of the upper bound of a row with fewer GMIs. The bound assumes that threads never wait for each
other. In fact GMIs wait for the slowest once per update, but the threads of one GMI in every step."""


class NothingMeasuredError(RuntimeError):
    """A search found no candidate that runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """Options of a search."""

    objective: Objective = "throughput"
    budget_s: float | None = None
    """Wall time after which no further trial starts; None: until the algorithm ends."""
    gmis: int | None = None
    """Fixed number of GMIs per GPU, or of GMIs on cores; None: search it."""
    num_envs: int | None = None
    """Fixed number of environments; None: search it."""
    folder: Path | None = None
    """Cache folder; None: ~/.cache/rayagi/search."""
    again: bool = False
    """Measure each candidate of this search again. Other measurements stay in the cache."""

    def name(self) -> str:
        """Key of the search's result in the store."""
        return f"search {self.objective} gmis={self.gmis or 'auto'} num_envs={self.num_envs or 'auto'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Result of a search."""

    task: str
    settings: SearchSettings
    best: Trial
    trials: tuple[Trial, ...]
    complete: bool
    """False if the budget ended it."""
    untried: dict[int, tuple[int, ...]]
    """GMIs per device -> numbers of environments that the budget left untried."""
    on_gpus: bool
    memory_bytes: int
    """Memory of one device, which its GMIs share."""
    duration_s: float
    """Duration of this call; cached trials take no time."""
    noise: NoiseScale | None = None
    """For the objective ``time_to_return``."""
    store: Path = field(default_factory=Path)

    def rest(self) -> str:
        """What the budget left to do, as a sentence; empty if the search is complete."""
        if self.complete:
            return ""
        if not self.untried:
            return "Not done: measuring the best candidates again."
        alike: dict[tuple[int, ...], list[int]] = {}
        for gmis, envs in self.untried.items():
            alike.setdefault(envs, []).append(gmis)
        where = " per GPU" if self.on_gpus else ""
        rows = (
            f"{core_ranges(gmis)} {'GMI' if gmis == [1] else 'GMIs'}{where} of {_doublings(envs)} environments"
            for envs, gmis in alike.items()
        )
        return f"Not tried: {'; '.join(rows)}."

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; an infinite Sat becomes null, since JSON has no infinity."""
        plain = asdict(self)
        for trial in (plain["best"], *plain["trials"]):
            if trial["saturation"] is not None and not math.isfinite(trial["saturation"]):
                trial["saturation"] = None
        plain["settings"]["folder"] = None if self.settings.folder is None else str(self.settings.folder)
        plain["store"] = str(self.store)
        return plain


class BudgetSpentError(Exception):
    """The time budget does not allow another trial."""


class CachedProbe:
    """Returns stored outcomes; measures and stores missing ones until the budget is spent."""

    def __init__(
        self,
        probe: SessionProbe,
        store: SearchStore,
        open_ray: Callable[[], None],
        on_start: Callable[[str], None],
        ends_at: float | None,
    ) -> None:
        self._probe, self._store, self._open_ray, self._on_start = probe, store, open_ray, on_start
        self._ends_at = ends_at

    def __call__(self, gmis_per_gpu: int, num_envs: int, round_: int = 0) -> TrialMeasurement | TrialFailure:
        """The outcome of a candidate; ``round_`` as of ``SearchStore.outcome``.

        Raises:
            BudgetSpentError: it is not stored, and the budget is spent.
        """
        kept = self._store.outcome(gmis_per_gpu, num_envs, round_)
        if kept is not None:
            if isinstance(kept, TrialMeasurement):
                self._probe.remember(gmis_per_gpu, kept.steps_per_s)
            return kept
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            raise BudgetSpentError
        self._open_ray()
        again = f" again (round {round_})" if round_ > 0 else " again, to compare" if round_ else ""
        self._on_start(f"{gmis_per_gpu} x {counted(num_envs, 'environment')}{again}")
        outcome = self._probe.measure(gmis_per_gpu, num_envs, VALIDATION if round_ > 0 else SCREENING)
        self._store.save_outcome(gmis_per_gpu, num_envs, outcome, round_)
        return outcome


def _doublings(counts: Sequence[int]) -> str:
    """Numbers of environments as ranges of doublings: ``256-512, 2048-32768``."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and count == 2 * runs[-1][-1]:
            runs[-1].append(count)
        else:
            runs.append([count])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "more"


def search(
    spec: RunSpec,
    machine: Machine,
    settings: SearchSettings,
    *,
    on_trial: Callable[[Trial], None] = lambda trial: None,
    on_start: Callable[[str], None] = lambda what: None,
) -> SearchResult:
    """Find the configuration that trains fastest on this machine. Starts Ray only if a trial has to run.

    Interrupted by Ctrl-C or ended by its budget, it keeps its measurements; the next call continues with what was not tried.
    With a budget, a coarse pass over all numbers of GMIs comes first.

    Args:
        spec: the task; its own numbers of GMIs and environments are ignored
        machine: this machine
        settings: options of the search
        on_trial: called with every finished trial
        on_start: called before a measurement, with a description of it

    Raises:
        NothingMeasuredError: no candidate runs.
        PlanError: not even one GMI per GPU can be planned.
        ClusterUnreachableError, ReservationError: no trial can be started.
        DiskError: measurements cannot be written.
    """
    began = time.monotonic()
    store = SearchStore(spec, machine, settings.folder, again=settings.again)
    store.make_folder()
    # A finished search is replayed as it was.
    kept = store.load_note(settings.name()) or {"complete": False}
    coarse = kept["coarse"] if kept["complete"] else settings.budget_s is not None
    on_gpus = uses_gpus(spec, machine)
    usable, _ = usable_machine(spec, machine)
    num_devices = usable.num_gpus if on_gpus else 1
    score: Score = throughput
    noise = None
    with ExitStack() as stack:
        open_ray = cache(lambda: stack.enter_context(connected()))
        if settings.objective == "time_to_return":
            noise = _noise(spec, store, open_ray, on_start)
            score = _learning_score(noise, num_devices)
        ends_at = None if settings.budget_s is None else began + settings.budget_s
        with SessionProbe(spec, machine) as sessions:
            probe = CachedProbe(sessions, store, open_ray, on_start, ends_at)
            trials, complete = _run_search(probe, spec, machine, settings, score, on_trial, coarse=coarse)
    best = _best(trials, validated=complete)
    if best is None:
        raise _nothing_measured(spec.env.id, trials)
    rest = {} if complete else untried(trials, _gmis(spec, machine, settings), _num_envs(on_gpus, settings))
    result = SearchResult(
        task=spec.env.id,
        settings=settings,
        best=best,
        trials=tuple(trials),
        complete=complete,
        untried=rest,
        on_gpus=on_gpus,
        memory_bytes=device_memory_bytes(spec, usable),
        duration_s=time.monotonic() - began,
        noise=noise,
        store=store.path,
    )
    found = {"gmis": best.gmis_per_gpu, "num_envs": best.num_envs, "complete": complete, "coarse": coarse}
    store.save_note(settings.name(), found | {"rest": result.rest()})
    return result


def _nothing_measured(task: str, trials: Sequence[Trial]) -> NothingMeasuredError:
    reasons = (trial.outcome.reason for trial in trials if isinstance(trial.outcome, TrialFailure))
    why = (
        "; ".join(dict.fromkeys(reasons)) or "the budget ended before the first trial; give a larger --budget"
    )
    return NothingMeasuredError(f"no candidate for {task} could be measured: {why}")


def device_memory_bytes(spec: RunSpec, machine: Machine) -> int:
    """Memory that the GMIs of one device share: the smallest GPU's, or the usable part of the host's."""
    if uses_gpus(spec, machine):
        return min(gpu.available_bytes for node in machine.nodes for gpu in node.usable_gpus)
    return int(HOST_MEMORY_SHARE * sum(node.memory_total_bytes for node in machine.nodes))


def _run_search(
    probe: CachedProbe,
    spec: RunSpec,
    machine: Machine,
    settings: SearchSettings,
    score: Score,
    on_trial: Callable[[Trial], None],
    *,
    coarse: bool,
) -> tuple[list[Trial], bool]:
    """Run Algorithm 1, then validate its best candidates; returns the trials, and False if the budget ended it."""
    on_gpus = uses_gpus(spec, machine)
    usable, _ = usable_machine(spec, machine)
    num_devices = usable.num_gpus if on_gpus else 1
    trials: list[Trial] = []

    def screen(gmis_per_gpu: int, num_envs: int) -> TrialMeasurement | TrialFailure:
        """A trial runs on one device only: first whether all of them together can be planned."""
        return plan_failure(spec, machine, gmis_per_gpu, num_envs) or probe(gmis_per_gpu, num_envs)

    steps = explore(
        screen,
        num_gpus=num_devices,
        gpu_memory_bytes=device_memory_bytes(spec, usable),
        early_stopping=_early_stopping(spec, machine, lambda gmis, envs, times: probe(gmis, envs, -times)),
        gmis_per_gpu=_gmis(spec, machine, settings),
        num_envs=_num_envs(on_gpus, settings),
        coarse=_num_envs(on_gpus, settings)[::COARSE_STEP] if coarse else (),
        score=score,
    )
    if not _collect_trials(steps, trials, on_trial):
        return trials, False
    again = validate_finalists(probe, tuple(trials), num_gpus=num_devices, score=score)
    return trials, _collect_trials(again, trials, on_trial)


def _collect_trials(steps: Iterator[Trial], trials: list[Trial], on_trial: Callable[[Trial], None]) -> bool:
    """Append the trials to ``trials``; False if the budget ended them."""
    try:
        for trial in steps:
            trials.append(trial)
            on_trial(trial)
    except BudgetSpentError:
        return False
    return True


def _best(trials: Sequence[Trial], *, validated: bool) -> Trial | None:
    """The winner of the validation; without a complete one, the best single trial, of its own row if that has come."""
    best = best_trial([trial for trial in trials if trial.verdict == "again" or not validated])
    if best is None or best.verdict != "coarse":
        return best
    same = (best.candidate, best.outcome)
    replayed = (trial for trial in trials if (trial.candidate, trial.outcome) == same)
    return max(replayed, key=lambda trial: trial.verdict != "coarse")


def _noise(
    spec: RunSpec, store: SearchStore, open_ray: Callable[[], None], on_start: Callable[[str], None]
) -> NoiseScale:
    stored = store.load_note("noise scale")
    if stored is not None:
        return NoiseScale(**stored)
    open_ray()
    on_start("the gradient's noise, while learning")
    noise = noise_scale_of(spec)
    store.save_note("noise scale", asdict(noise))
    return noise


def _learning_score(noise: NoiseScale, num_devices: int) -> Score:
    def score(gmis_per_gpu: int, num_envs: int, steps_per_s: float) -> float:
        return useful_steps_per_s(noise, gmis_per_gpu * num_devices * num_envs, steps_per_s)

    return score


def _early_stopping(spec: RunSpec, machine: Machine, compare: CompareFn) -> EarlyStopping:
    """The papers' rules on GPUs, where memory grows with the environments; further rules on cores, where it hardly does."""
    if uses_gpus(spec, machine):
        return PAPER_STOPPING
    upper_bound = partial(core_upper_bound, num_cores=machine.num_cores)
    return EarlyStopping(
        min_gain=MIN_GAIN,
        patience=PATIENCE,
        compare=compare,
        upper_bound=upper_bound,
        min_bound_gain=MIN_BOUND_GAIN,
    )


def _gmis(spec: RunSpec, machine: Machine, settings: SearchSettings) -> tuple[int, ...]:
    if settings.gmis is not None:
        return (settings.gmis,)
    return GMIS_PER_GPU if uses_gpus(spec, machine) else core_counts(machine.num_cores)


def _num_envs(on_gpus: bool, settings: SearchSettings) -> tuple[int, ...]:
    if settings.num_envs is not None:
        return (settings.num_envs,)
    return NUM_ENVS if on_gpus else NUM_ENVS_ON_CORES
