"""``rayagi serve``: run a trained policy on GMIs and record its experience."""

from __future__ import annotations

import argparse
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any

from placement.errors import counted
from rayagi.cli.failures import INTERRUPTED, UsageError
from rayagi.cli.output import say, say_if_temporary
from rayagi.cli.settings import machine_of_run
from rayagi.config.spec import RunSpec
from rayagi.coordinator.cluster import continue_stopped
from rayagi.coordinator.session import Session
from rayagi.planning import serving_plan_of
from rayagi.run.errors import RunError
from rayagi.run.interrupt import Interrupt
from rayagi.run.quantities import bytes_text
from rayagi.run.versions import collect_versions
from rayagi.serving.column_layout import ColumnLayout
from rayagi.serving.driver import DEFAULT_TIME_S, Served, ServingLimits, ServingLoop
from rayagi.serving.manifest import DatasetFolder, Description
from rayagi.serving.program import Recording, ServingJob
from rayagi.serving.source import SavedPolicy, saved_policy
from rayagi.serving.templates import chosen_template, serving_factory

_WRITERS_S = 30.0
"""Time limit for writers of ended GMIs to complete their files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """The dataset to write, and the number of this session."""

    folder: DatasetFolder
    created: bool
    """Whether this command created it."""
    session: int
    seed: int
    recording: Recording


def run(arguments: argparse.Namespace) -> int:
    """Serve; returns the exit code."""
    saved = saved_policy(arguments.run, arguments.checkpoint, trust_modules=arguments.trust_modules)
    for reason in saved.damaged:
        say(f"{reason}; using {saved.checkpoint}.")
    spec = _spec(saved.spec, arguments)
    job = ServingJob(
        spec=spec,
        shared=saved.shared,
        version=saved.version,
        greedy=not arguments.explore,
        seed=arguments.seed or 0,
    )
    template = chosen_template(
        job, arguments.template, num_agents=arguments.agents, machine=machine_of_run, log=say
    )
    target = _target(arguments, saved)
    if target is not None:
        job = replace(job, seed=target.seed, recording=target.recording)
    limits = ServingLimits(env_steps=arguments.steps, episodes=arguments.episodes, time_s=arguments.time)
    if limits == ServingLimits():
        limits = ServingLimits(time_s=DEFAULT_TIME_S)
    goal = "nothing is written" if target is None else f"into {target.folder.path}"
    say(
        f"{spec.env.id}, {saved.checkpoint} ({saved.env_steps:,} environment steps), {template}, "
        f"{'greedy' if job.greedy else 'exploring'}, seed {job.seed}; {goal}. Ends after {limits.text()}."
    )
    if target is not None:
        say_if_temporary(target.folder.path)
    interrupt = Interrupt(_begin_to_end)
    provenance = _provenance(arguments, saved, job, template)
    try:
        served = _serve(job, template, arguments.agents, limits, interrupt, target, provenance)
    except BaseException as error:
        _after_failure(target, provenance, error)
        raise
    finally:
        if target is not None:
            target.folder.unlock()
    return _conclude(served, target, interrupt)


def _begin_to_end() -> None:
    """After a signal: the GMIs answer through Ray."""
    continue_stopped()
    say("Finishing the current request, then completing the files. Ctrl-C again quits at once.")


def _spec(spec: RunSpec, arguments: argparse.Namespace) -> RunSpec:
    """The run's settings with GMIs for serving; those for training do not apply."""
    served = spec.with_gmi(
        num_gmis=arguments.gmis,
        gmis_per_gpu=None,
        slices=None,
        num_envs=arguments.num_envs or spec.gmi.num_envs,
        backend=arguments.backend or "auto",
    )
    if served.gmi.num_envs == "auto":
        raise UsageError('--num-envs: the run has "auto"; give the number of environments of each GMI')
    return served


def _target(arguments: argparse.Namespace, saved: SavedPolicy) -> _Target | None:
    """Create or open the dataset, and lock it.

    Raises:
        UsageError: options need --out, or contradict the existing dataset.
        DatasetError: the folder is in use, or is no dataset that this run can append to.
    """
    if arguments.out is None:
        if arguments.append or arguments.format is not None:
            raise UsageError("--append and --format are about the dataset of --out: give --out too")
        return None
    description = Description(
        task=saved.spec.env.id, format=arguments.format or "parquet", layout=ColumnLayout.for_env(saved.info)
    )
    path = Path(arguments.out).absolute()
    created = not arguments.append
    folder = (
        DatasetFolder.create(path, description) if created else _appended_to(path, description, arguments)
    )
    # Until they have ended, the number of the last episode is not known.
    folder.lock(_WRITERS_S)
    sessions = folder.sessions()
    session = len(sessions)
    seed = session if arguments.seed is None else arguments.seed
    used = [each["seed"] for each in sessions]
    if seed in used:
        folder.unlock()
        raise UsageError(
            f"--seed {seed} was used in this dataset before: the same episodes would come again; used: {used}"
        )
    recording = Recording(
        folder=str(path),
        format=folder.description.format,
        session=session,
        first_episode=folder.statistics().last_episode + 1,
        rows_per_file=arguments.rows_per_file,
        bytes_per_file=arguments.file_size,
        about={"task": saved.spec.env.id, "run": str(arguments.run), "checkpoint": saved.checkpoint},
    )
    return _Target(folder=folder, created=created, session=session, seed=seed, recording=recording)


def _appended_to(path: Path, wanted: Description, arguments: argparse.Namespace) -> DatasetFolder:
    folder = DatasetFolder.open(path)
    own = folder.description
    if own.task != wanted.task or own.layout != wanted.layout:
        raise UsageError(
            f"--append: {path} holds {own.task} ({own.layout.obs_dim} observations, {own.layout.action.dim} actions), "
            f"and {arguments.run} is of {wanted.task} ({wanted.layout.obs_dim}, {wanted.layout.action.dim})"
        )
    if arguments.format not in (None, own.format):
        raise UsageError(f"--append: {path} is of format {own.format}; leave --format out")
    return folder


def _serve(
    job: ServingJob,
    template: str,
    num_agents: int | None,
    limits: ServingLimits,
    interrupt: Interrupt,
    target: _Target | None,
    provenance: dict[str, Any],
) -> Served:
    loop: ServingLoop | None = None
    is_served = False
    try:
        with ExitStack() as stack:
            stack.enter_context(interrupt.hangup_deferred())
            session = stack.enter_context(
                Session(
                    job.spec,
                    factory=serving_factory(job, template),
                    make_plan=lambda machine: serving_plan_of(
                        job.spec.gmi, template, machine, num_agents=num_agents
                    ),
                    run_name=f"serve-{job.spec.env.id}",
                    on_plan=lambda plan: say(plan.table()),
                )
            )
            plan = session.plan
            provenance |= {"num_gmis": plan.num_gmis, "envs": list(plan.envs), "backend": plan.backend}
            _note(target, provenance)
            loop = ServingLoop(session, limits, total_envs=sum(plan.envs), interrupt=interrupt, log=say)
            with interrupt:
                served = loop.serve()
                is_served = True
    except (KeyboardInterrupt, SystemExit):
        # Ctrl-C or another SIGTERM during shutdown, or a second Ctrl-C: writers complete their files all the same.
        if loop is None or not (is_served or interrupt.requested):
            raise
        served = loop.served
    provenance |= {
        "ended": _now(),
        "status": "interrupted" if interrupt.requested else "finished",
        "reason": interrupt.reason or served.stop,
        "steps_per_s": round(served.steps_per_s, 1),
        "step": served.total.step.to_dict(),
        "act": served.total.act.to_dict(),
    }
    _note(target, provenance)
    return served


def _provenance(
    arguments: argparse.Namespace, saved: SavedPolicy, job: ServingJob, template: str
) -> dict[str, Any]:
    return {
        "task": job.spec.env.id,
        "env_kwargs": dict(job.spec.env.kwargs),
        "run": str(Path(arguments.run).absolute()),
        "checkpoint": saved.checkpoint,
        "policy_version": job.version,
        "env_steps_trained": saved.env_steps,
        "seed": job.seed,
        "actions": "greedy" if job.greedy else "explore",
        "template": template,
        "began": _now(),
        "status": "running",
        "machine": collect_versions(),
    }


def _note(target: _Target | None, provenance: dict[str, Any]) -> None:
    if target is not None:
        target.folder.write_session(target.session, provenance)


def _after_failure(target: _Target | None, provenance: dict[str, Any], error: BaseException) -> None:
    """Wait for the writers, and add to the error which files are complete."""
    if target is None:
        return
    with suppress(RunError, KeyboardInterrupt):
        folder = target.folder
        folder.wait_for_writers(_WRITERS_S)
        files = [file for file in folder.files() if file.session == target.session]
        if target.created and not files:
            shutil.rmtree(folder.path, ignore_errors=True)
            error.add_note("No file was completed, so no dataset is left.")
            return
        rows = sum(file.statistics.rows for file in files)
        error.add_note(
            f"Complete and readable in {folder.data}: {counted(len(files), 'file')} of this session with "
            f"{counted(rows, 'row')}."
            if files
            else f"No file of this session was completed: {folder.path} holds what it held before."
        )
        if "envs" not in provenance:  # it did not start
            return
        stopped = not isinstance(error, Exception)
        reason = "stopped at once" if stopped else f"{type(error).__name__}: {error}"
        provenance |= {"ended": _now(), "status": "interrupted" if stopped else "failed", "reason": reason}
        # The disk may have failed: report the first error only.
        _note(target, provenance)
        folder.write_statistics()


def _conclude(served: Served, target: _Target | None, interrupt: Interrupt) -> int:
    total = served.total
    say(
        f"\n{total.env_steps:,} environment steps in {served.wall_s:.1f} s: {served.steps_per_s:,.0f} steps/s "
        f"({served.stop or interrupt.reason})."
    )
    say(f"step of all environments of a GMI: {total.step.text()}")
    say(f"  inference: {total.act.text()}\n  simulation: {total.simulate.text()}")
    mean = served.return_mean()
    if mean is not None:
        say(f"{counted(served.episodes, 'episode')} ended, mean return {mean:,.1f}")
    if target is not None:
        target.folder.wait_for_writers(_WRITERS_S)  # after a second Ctrl-C they still complete their files
        whole = target.folder.write_statistics()
        files = target.folder.files()
        say(
            f"{target.folder.path}: {counted(whole.rows, 'row')} in {counted(len(files), 'file')}, "
            f"{bytes_text(whole.bytes)}, {counted(whole.episodes, 'episode')}; writing made GMIs wait for "
            f"{total.write_wait_s:.2f} s."
        )
        path = quote(str(target.folder.path))
        say(f"\nNext:\n  rayagi replay info {path}\n  rayagi export {path} --to rllib {path}-rllib")
    if served.stop:
        return 0
    return INTERRUPTED


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
