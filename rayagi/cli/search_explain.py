"""``rayagi search --explain``: profiles the best configuration and the second, and compares where their time goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote

from placement.errors import counted
from placement.search import Trial, TrialMeasurement
from placement.types import Machine
from rayagi.config.spec import RunSpec
from rayagi.coordinator.probe import candidate_spec, plan_on
from rayagi.coordinator.searching import SearchResult
from rayagi.coordinator.session import Session
from rayagi.profiler.advice import advice
from rayagi.profiler.calibration import corrected
from rayagi.profiler.calibration_store import choose, default_folder, recorded_in
from rayagi.profiler.critical_path import critical_path
from rayagi.profiler.difference import difference_text, differences
from rayagi.profiler.injection import recording
from rayagi.profiler.interception import packages_with
from rayagi.profiler.overlap import Breakdown, breakdown
from rayagi.profiler.schedule import Schedule
from rayagi.profiler.session import create_profile
from rayagi.profiler.summary import waits
from rayagi.profiler.trace import read_profile
from rayagi.run.atomic import new_folder
from rayagi.run.errors import disk_errors

FEWEST, MOST = 5, 40
"""Recorded iterations of each: fewer than 4 show no significance."""
RECORD_S = 10.0
"""Target duration of the recorded iterations."""
_UNIT_STEPS = 1000
"""Times are of this many environment steps, since iterations of the two are of different size."""
_SKIPPED = 2
"""First iterations: torch and kernels start up."""
_ROWS = 16


@dataclass(frozen=True)
class Explained:
    """A trial and its profile.

    Attributes:
        trial: the configuration
        folder: of the profile; `rayagi profile report FOLDER` shows all of it
        found: its times, corrected where a calibration fits
        note: why they are not corrected; empty if they are
        env_steps: of an iteration, of all GMIs of the device
        sentences: what would help
    """

    trial: Trial
    folder: Path
    found: Breakdown
    note: str
    env_steps: float
    sentences: list[str]


def best_and_second(result: SearchResult) -> list[Trial]:
    """The best trial, and the best-scored one with another configuration; those that were measured again come first."""
    best = result.best
    others = [
        trial
        for trial in result.trials
        if trial.candidate != best.candidate
        and isinstance(trial.outcome, TrialMeasurement)
        and trial.score is not None
    ]
    ranked = sorted(others, key=lambda trial: (trial.verdict != "again", -(trial.score or 0.0)))
    return [best, *ranked[:1]]


def explain(
    spec: RunSpec, machine: Machine, result: SearchResult, folder: Path, log: Callable[[str], None]
) -> list[Explained]:
    """Profile the best and the second, each in new processes of a local Ray, which inherit the profiler.

    Raises:
        GmiLostError, GmiSilentError, ReservationError: it does not run any more.
        DiskError, ProfilerError, TraceError: the profile cannot be written, or read.
    """
    return [_profiled(spec, machine, trial, folder, log) for trial in best_and_second(result)]


def _profiled(
    spec: RunSpec, machine: Machine, trial: Trial, folder: Path, log: Callable[[str], None]
) -> Explained:
    candidate = candidate_spec(spec, machine, trial.gmis_per_gpu, trial.num_envs)
    iterations = _iterations(candidate, trial)
    log(f"  profiling {counted(iterations, 'iteration')} of {_name(trial)} ...")
    with disk_errors(folder):
        path = new_folder(folder / f"profile-{trial.gmis_per_gpu}x{trial.num_envs}")
    packages = packages_with(())
    # As the command that would train so: a calibration is of a command.
    command = ["rayagi", "train", spec.env.id]
    command += ["--gmis", str(trial.gmis_per_gpu), "--num-envs", str(trial.num_envs)]
    schedule = Schedule(skip=_SKIPPED, record=iterations)
    create_profile(path, command, packages, schedule)
    with (
        recording(path, packages, schedule),
        Session(candidate, make_plan=partial(plan_on, machine, candidate)) as session,
    ):
        results = session.train(schedule.skip + schedule.warm_up + iterations)
    profile = read_profile(path)
    used, note = choose(recorded_in(profile), None, default_folder())
    found = breakdown(profile) if used is None else corrected(profile, used.calibration)
    return Explained(
        trial=trial,
        folder=path,
        found=found,
        note=note,
        env_steps=results[-1].metrics["env_steps"],
        sentences=advice(profile, found, waits(profile), critical_path(profile)),
    )


def _iterations(spec: RunSpec, trial: Trial) -> int:
    """As many as take RECORD_S by the search's measurement, within FEWEST and MOST."""
    assert isinstance(trial.outcome, TrialMeasurement)
    iteration_s = trial.num_envs * spec.learning.rollout_length / trial.outcome.steps_per_s
    return min(MOST, max(FEWEST, round(RECORD_S / iteration_s)))


def _name(trial: Trial) -> str:
    return f"{counted(trial.gmis_per_gpu, 'GMI')} of {counted(trial.num_envs, 'environment')}"


def explanation_text(explained: list[Explained]) -> str:
    """Where the time of an environment step goes in both, the largest differences first, and what would help the best."""
    best, *second = explained
    lines = ["Why, by profiles of both" if second else "Only one configuration was measured; its profile"]
    for letter, each in zip("AB", explained, strict=False):
        speed = each.trial.system_steps_per_s or 0.0
        lines.append(f"  {letter}: {_name(each.trial)}, {speed:,.0f} steps/s in the search: {each.folder}")
    if note := next((each.note for each in explained if each.note), ""):
        lines.append(f"  {note}")
    for other in second:
        rows = differences(
            best.found, other.found, (best.env_steps / _UNIT_STEPS, other.env_steps / _UNIT_STEPS)
        )
        lines += ["", difference_text(rows, most=_ROWS, unit=counted(_UNIT_STEPS, "environment step"))]
    if best.sentences:
        lines += ["", "What would help the best", *(f"  - {each}" for each in best.sentences)]
    lines += ["", f"All of it: rayagi profile report {quote(str(best.folder))}"]
    return "\n".join(lines)
