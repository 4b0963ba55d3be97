"""Runs Algorithm 1 on this machine: ranges, memory, cache, budget and objective around the pure search and the probe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

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
    best_trial,
    core_counts,
    core_upper_bound,
    explore,
    throughput,
)
from placement.types import Machine
from placement.validation import validate_finalists
from rayagi.algorithms.gradient_noise import NoiseScale, useful_steps_per_s
from rayagi.config.spec import RunSpec
from rayagi.coordinator.cached_probe import BudgetSpentError, CachedProbe, LazyRayConnection
from rayagi.coordinator.probe import SessionProbe
from rayagi.coordinator.profiling import noise_scale_of
from rayagi.coordinator.search_store import SearchStore
from rayagi.planning import uses_gpus

Objective = Literal["throughput", "time_to_return"]

HOST_MEMORY_SHARE = 0.9
"""Of a host's memory, what its GMIs may fill together: Ray ends processes from 95 % on."""


MIN_GAIN = 0.05
"""On cores: twice the environments have to be this much faster than anything before in their row. Where a fixed cost per
iteration is spread over ever more environments, a doubling that gains g leaves g / (1 - g) to gain by all further ones."""
PATIENCE = 3
"""On cores: doublings in a row without that gain. One or two may be trials that something disturbed."""
MIN_BOUND_GAIN = 0.1
"""On cores: what fewer GMIs would have to be able to gain, if their threads never waited for each other. They do: where
GMIs wait for the slowest once per update, threads of one GMI wait for the slowest in every step."""


class NothingMeasuredError(RuntimeError):
    """A search found no candidate that runs."""

    def __init__(self, task: str, reasons: tuple[str, ...]) -> None:
        super().__init__(task, reasons)
        self.task, self.reasons = task, reasons

    def __str__(self) -> str:
        why = "; ".join(self.reasons) or "the budget ended before the first trial did; give a larger --budget"
        return f"no candidate for {self.task} could be measured: {why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """What a search is told."""

    objective: Objective = "throughput"
    budget_s: float | None = None
    """Wall time after which no further trial starts; None: until the algorithm ends."""
    gmis: int | None = None
    """Only this number of GMIs per GPU, or of GMIs on cores; None: search it."""
    num_envs: int | None = None
    """Only this number of environments; None: search it."""
    folder: Path | None = None
    """Where measurements are kept; None: ~/.cache/rayagi/search."""
    again: bool = False
    """Measure everything anew."""

    def name(self) -> str:
        """Names what was asked, among the notes of a store."""
        return f"search {self.objective} gmis={self.gmis or 'auto'} num_envs={self.num_envs or 'auto'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """How a search ended."""

    task: str
    settings: SearchSettings
    best: Trial
    trials: tuple[Trial, ...]
    complete: bool
    """False where the budget ended it."""
    on_gpus: bool
    num_devices: int
    memory_bytes: int
    """Memory of one device, which its GMIs share."""
    duration_s: float
    """Of this call; trials that were kept from before take none."""
    noise: NoiseScale | None = None
    """For the objective ``time_to_return``."""
    store: Path = field(default_factory=Path)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; JSON has no infinity, so that a Sat without a growth in memory is null."""
        plain = asdict(self)
        for trial in (plain["best"], *plain["trials"]):
            if trial["saturation"] is not None and not math.isfinite(trial["saturation"]):
                trial["saturation"] = None
        plain["settings"]["folder"] = None if self.settings.folder is None else str(self.settings.folder)
        plain["store"] = str(self.store)
        return plain


def search(
    spec: RunSpec,
    machine: Machine,
    settings: SearchSettings,
    *,
    on_trial: Callable[[Trial], None] = lambda trial: None,
    on_start: Callable[[str], None] = lambda what: None,
) -> SearchResult:
    """Find the configuration that trains fastest here. Starts Ray where a trial has to be run, and only then.

    Interrupted by Ctrl-C, it keeps what it measured; called again, it goes on from there.

    Args:
        spec: the task; its own numbers of GMIs and environments are not looked at
        machine: where it runs
        settings: what to search for, and how long
        on_trial: told of every trial when it is done
        on_start: told what is measured before it starts, as a sentence

    Raises:
        NothingMeasuredError: no candidate runs.
        ClusterUnreachableError, ReservationError: nothing can be started here now.
        DiskError: measurements cannot be kept.
    """
    began = time.monotonic()
    store = SearchStore(spec, machine, settings.folder)
    if settings.again:
        store.clear()
    on_gpus = uses_gpus(spec, machine)
    num_devices = machine.num_gpus if on_gpus else 1
    score: Score = throughput
    noise = None
    with ExitStack() as stack:
        ray = LazyRayConnection(stack)
        if settings.objective == "time_to_return":
            noise = _noise(spec, store, ray, on_start)
            score = _learning_score(noise, num_devices)
        ends_at = None if settings.budget_s is None else began + settings.budget_s
        with SessionProbe(spec, machine) as sessions:
            probe = CachedProbe(sessions, store, ray, on_start, ends_at)
            trials, complete = _run_search(probe, spec, machine, settings, score, on_trial)
    best = _best(trials, validated=complete)
    if best is None:
        reasons = (trial.outcome.reason for trial in trials if isinstance(trial.outcome, TrialFailure))
        raise NothingMeasuredError(spec.env.id, tuple(dict.fromkeys(reasons)))
    result = SearchResult(
        task=spec.env.id,
        settings=settings,
        best=best,
        trials=tuple(trials),
        complete=complete,
        on_gpus=on_gpus,
        num_devices=num_devices,
        memory_bytes=device_memory_bytes(spec, machine),
        duration_s=time.monotonic() - began,
        noise=noise,
        store=store.path,
    )
    store.save_note(
        settings.name(), {"gmis": best.gmis_per_gpu, "num_envs": best.num_envs, "complete": complete}
    )
    return result


def device_memory_bytes(spec: RunSpec, machine: Machine) -> int:
    """Memory that the GMIs of one device share: a GPU's, or what a host may fill."""
    if uses_gpus(spec, machine):
        return min(gpu.memory_total_bytes for node in machine.nodes for gpu in node.usable_gpus)
    return int(HOST_MEMORY_SHARE * sum(node.memory_total_bytes for node in machine.nodes))


def _run_search(
    probe: CachedProbe,
    spec: RunSpec,
    machine: Machine,
    settings: SearchSettings,
    score: Score,
    on_trial: Callable[[Trial], None],
) -> tuple[list[Trial], bool]:
    """Algorithm 1, then its best once more; and whether that ended by itself."""
    on_gpus = uses_gpus(spec, machine)
    num_devices = machine.num_gpus if on_gpus else 1
    trials: list[Trial] = []
    steps = explore(
        probe.screen,
        num_gpus=num_devices,
        gpu_memory_bytes=device_memory_bytes(spec, machine),
        early_stopping=_early_stopping(spec, machine, probe.compare),
        gmis_per_gpu=_gmis(spec, machine, settings),
        num_envs=_num_envs(on_gpus, settings),
        score=score,
    )
    if not _collect_trials(steps, trials, on_trial):
        return trials, False
    again = validate_finalists(probe.validate, tuple(trials), num_gpus=num_devices, score=score)
    return trials, _collect_trials(again, trials, on_trial)


def _collect_trials(steps: Iterator[Trial], trials: list[Trial], on_trial: Callable[[Trial], None]) -> bool:
    """Add what is tried to ``trials``; False where the budget ended it."""
    try:
        for trial in steps:
            trials.append(trial)
            on_trial(trial)
    except BudgetSpentError:
        return False
    return True


def _best(trials: Sequence[Trial], *, validated: bool) -> Trial | None:
    """What was confirmed as the best; the best of single trials where there was no time for that."""
    return best_trial([trial for trial in trials if trial.verdict == "again" or not validated])


def _noise(
    spec: RunSpec, store: SearchStore, ray: LazyRayConnection, on_start: Callable[[str], None]
) -> NoiseScale:
    stored = store.load_note("noise scale")
    if stored is not None:
        return NoiseScale(**stored)
    ray.open()
    on_start("the gradient's noise, while learning")
    noise = noise_scale_of(spec)
    store.save_note("noise scale", asdict(noise))
    return noise


def _learning_score(noise: NoiseScale, num_devices: int) -> Score:
    def score(gmis_per_gpu: int, num_envs: int, steps_per_s: float) -> float:
        return useful_steps_per_s(noise, gmis_per_gpu * num_devices * num_envs, steps_per_s)

    return score


def _early_stopping(spec: RunSpec, machine: Machine, compare: CompareFn) -> EarlyStopping:
    """The papers' on GPUs, whose memory grows with the environments; on cores, where it hardly does, more than those."""
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
