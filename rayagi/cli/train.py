"""``rayagi train``: start or resume a run, train, and report the result."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shlex import quote

from ray._private.worker import get_dashboard_url
from rich.console import Console

from actors.protocols import StateDict
from placement.errors import PlanError, counted
from placement.plan import PlacementPlan
from rayagi.cli.endings import Resumed, after_failure, conclude, record_outcome
from rayagi.cli.failures import UsageError
from rayagi.cli.output import say, say_if_temporary
from rayagi.cli.profile import summarize
from rayagi.cli.settings import (
    decays_linearly,
    gives_num_envs,
    initial_state_from,
    limits_from,
    machine_of_run,
    resumed_limits,
    resumed_spec,
    spec_from,
    with_num_gmis,
)
from rayagi.config.convert import run_spec_to_dict
from rayagi.config.spec import RunSpec
from rayagi.coordinator.auto import resolve_auto
from rayagi.coordinator.cluster import continue_stopped, import_in_background, starts_local
from rayagi.coordinator.decoupled import DecoupledSession, session_of
from rayagi.coordinator.default_layout import takes_default, with_default_layout
from rayagi.coordinator.health_monitor import RunHealthMonitor
from rayagi.coordinator.lost_ray import when_ray_is_lost
from rayagi.coordinator.memory_need import reject_insufficient_memory
from rayagi.coordinator.search_store import predict_throughput
from rayagi.coordinator.session import Session, SessionClosedError
from rayagi.monitoring.progress import LiveProgress, PlainProgress
from rayagi.monitoring.ray_metrics import RunExporter
from rayagi.profiler.injection import recording
from rayagi.profiler.interception import packages_with
from rayagi.profiler.process_ends import ends_noted
from rayagi.profiler.schedule import Schedule
from rayagi.profiler.session import create_profile, note_iterations
from rayagi.run import experience_record
from rayagi.run.atomic import new_folder, replace_json, replace_text
from rayagi.run.checkpoints import Checkpoint
from rayagi.run.csv_log import read_rows
from rayagi.run.errors import LimitReachedError, NoCheckpointError, disk_errors
from rayagi.run.folder import RunFolder, create_run, open_run
from rayagi.run.interrupt import Interrupt
from rayagi.run.limits import should_stop
from rayagi.run.measures import position_of
from rayagi.run.prediction import save_prediction
from rayagi.run.recorders import FileRecorder
from rayagi.run.trained_env import env_to_dict, refuse_changed_env
from rayagi.run.training_loop import CHECKPOINT_EVERY, Interval, LoopSettings, TrainingLoop, TrainingOutcome
from rayagi.run.versions import collect_versions, rayagi_version

_SKIPPED_ITERATIONS = 2
"""First iterations are slower than all others: torch and the kernels start up."""


def run(arguments: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    if arguments.profile is not None and not starts_local():
        raise UsageError(
            "--profile needs a local Ray, whose processes inherit the profiler: unset RAY_ADDRESS"
        )
    opened = _created(arguments) if arguments.resume is None else _reopened(arguments)
    folder, spec, checkpoint, initial = opened
    settings = _settings(arguments, spec, folder)
    before = None if arguments.resume is None else Resumed(folder.record, folder.checkpoints.names())
    interrupt = Interrupt(_begin_to_end)
    try:
        _refuse_if_done(folder, spec, settings, checkpoint)
        _describe(folder, spec, settings, checkpoint)
        with (
            when_ray_is_lost(lambda error: after_failure(folder, spec, error, before=before)),
            _profiled(folder, arguments.profile) as profile,
        ):
            outcome = _train(
                folder, spec, settings, checkpoint, interrupt, initial=initial, dashboard=arguments.dashboard
            )
            if profile is not None and spec.gmi.template != "decoupled":  # there each process has its own
                begun = 0 if checkpoint is None else int(checkpoint.counters["iteration"])
                note_iterations(profile, outcome.position.iteration - begun)
    except BaseException as error:
        after_failure(folder, spec, error, before=before)
        raise
    finally:
        folder.unlock()
    return conclude(folder, spec, outcome)


def _begin_to_end() -> None:
    """After a signal: the GMIs save through Ray."""
    continue_stopped()
    say("Finishing the current request, then saving. Ctrl-C again quits at once.")


@contextmanager
def _profiled(folder: RunFolder, num_iterations: int | None) -> Iterator[Path | None]:
    """Processes that Ray starts within it record that many iterations of theirs, after the first ones, into this folder."""
    if num_iterations is None:
        yield None
        return
    with disk_errors(folder.path):
        path = new_folder(folder.path / "profile")  # a resumed run may have one of an earlier session
    packages = packages_with(())
    schedule = Schedule(skip=_SKIPPED_ITERATIONS, record=num_iterations)
    create_profile(path, sys.orig_argv, packages, schedule)
    with ends_noted(path), recording(path, packages, schedule):
        yield path
    summarize(path)


_Opened = tuple[RunFolder, RunSpec, Checkpoint | None, StateDict | None]
"""A run's folder and settings, its last checkpoint, and without one the state of another run that it begins with."""


def _created(arguments: argparse.Namespace) -> _Opened:
    spec = spec_from(arguments)
    if spec.data.path is not None:
        # Imported here: it loads torch, which a run without a dataset does while Ray starts.
        from rayagi.algorithms.offline_data import other_task

        if other := other_task(spec.data.path, spec.env.id):
            say(other)
    initial, init = None, ""
    if arguments.init is not None:
        initial, init = _initial(arguments.init, spec, arguments), str(arguments.init.absolute())
    if not spec.gmi.is_resolved:
        spec = resolve_auto(spec, machine_of_run(), log=say)
    if takes_default(spec):
        spec = with_default_layout(spec, machine_of_run(), log=say, keep_envs=gives_num_envs(arguments))
    folder = create_run(
        arguments.out or Path("runs"),
        spec.env.id,
        seed=spec.seed,
        rayagi_version=rayagi_version(),
        name=arguments.name,
        init=init,
        environment=env_to_dict(spec.env.info()),
    )
    return folder, spec, None, initial


def _initial(run: Path, spec: RunSpec, arguments: argparse.Namespace) -> StateDict:
    state = initial_state_from(run, spec, trust_modules=arguments.trust_modules)
    say(f"Begins with the networks of {run}.")
    return state


def _reopened(arguments: argparse.Namespace) -> _Opened:
    folder = open_run(arguments.resume)
    spec = resumed_spec(folder.read_spec(trust_modules=arguments.trust_modules), arguments)
    if folder.record.environment:
        refuse_changed_env(str(folder.path), folder.record.environment, spec.env.info())
    for table in (folder.progress_csv, folder.evaluations_csv):
        read_rows(table)  # raises for one that was damaged, before Ray starts
    folder.lock()
    try:
        checkpoint = folder.checkpoints.load("last")
    except NoCheckpointError as error:
        if error.damaged:
            raise
        say("No checkpoint was saved yet: the run starts from the beginning.")
        init = folder.record.init
        return folder, spec, None, _initial(Path(init), spec, arguments) if init else None
    for reason in checkpoint.damaged:
        say(f"{reason}; continuing from {checkpoint.name}.")
    return folder, with_num_gmis(spec, checkpoint.state["num_gmis"]), checkpoint, None


def _settings(arguments: argparse.Namespace, spec: RunSpec, folder: RunFolder) -> LoopSettings:
    stored = folder.record
    limits = (
        limits_from(arguments, spec)
        if arguments.resume is None
        else resumed_limits(arguments, spec, stored.limits)
    )
    every = Interval(**stored.checkpoint_every) if stored.checkpoint_every else CHECKPOINT_EVERY
    if arguments.checkpoint_every is not None:
        unit, amount = arguments.checkpoint_every
        every = Interval(iterations=int(amount)) if unit == "iterations" else Interval(time_s=amount)
    return LoopSettings(
        limits=limits,
        seed=spec.seed,
        max_unstable_share=spec.env.max_unstable_share,
        evaluation_interval=spec.evaluation.interval,
        evaluation_episodes=spec.evaluation.num_episodes,
        checkpoint_every=every,
    )


def _refuse_if_done(
    folder: RunFolder, spec: RunSpec, settings: LoopSettings, checkpoint: Checkpoint | None
) -> None:
    if checkpoint is None:
        return
    position = position_of(checkpoint.counters)
    stop = should_stop(settings.limits, position, settings.return_source)
    if stop is None:
        return
    if stop.limit == "env_steps" and decays_linearly(spec):
        hint = (
            "Its learning rate has fallen to zero there; train longer in a new run: rayagi train "
            f"{spec.env.id} --config {quote(str(folder.path))}/config.yaml --env-steps {2 * position.env_steps}"
        )
    else:
        hours = int(position.train_s // 3600) + 1
        hint = (
            "Limits count from the start of the run: give a larger one, e.g. "
            f"rayagi train --resume {quote(str(folder.path))} --time {hours}h"
        )
    limits = settings.limits.text(settings.return_source)
    raise LimitReachedError(f"{folder.path} has already reached its limit ({limits}). {hint}")


def _describe(
    folder: RunFolder, spec: RunSpec, settings: LoopSettings, checkpoint: Checkpoint | None
) -> None:
    """Write plan, settings and versions before anything starts."""
    folder.write_config(run_spec_to_dict(spec))
    replace_json(folder.path / "versions.json", collect_versions())
    folder.update(
        status="running",
        reason="",
        limits=asdict(settings.limits),
        checkpoint_every=asdict(settings.checkpoint_every),
    )
    begun = (
        f"Resuming {spec.env.id} at iteration {checkpoint.counters['iteration']:,}"
        if checkpoint
        else spec.env.id
    )
    say(f"{begun} in {folder.path}. Ends after {settings.limits.text(settings.return_source)}.")
    say_if_temporary(folder.path)


def _train(
    folder: RunFolder,
    spec: RunSpec,
    settings: LoopSettings,
    checkpoint: Checkpoint | None,
    interrupt: Interrupt,
    *,
    initial: StateDict | None,
    dashboard: bool,
) -> TrainingOutcome:
    outcome: TrainingOutcome | None = None
    try:
        with ExitStack() as until_ray_ends, ExitStack() as stack:
            stack.enter_context(interrupt.hangup_deferred())
            loop, screen = _opened(stack, folder, spec, settings, checkpoint, interrupt, dashboard=dashboard)
            if initial is not None:
                loop.begin_with(initial)
            with screen, interrupt:
                outcome = loop.run()
                record_outcome(folder, outcome, interrupt.reason)
            # What draws the report is imported while the GMIs and Ray end.
            until_ray_ends.enter_context(import_in_background("matplotlib.figure"))
    except (KeyboardInterrupt, SystemExit):
        # Ctrl-C or another SIGTERM during shutdown: the run is saved, and Ray ends with this process.
        if outcome is None:
            raise
    return outcome


def _opened(
    stack: ExitStack,
    folder: RunFolder,
    spec: RunSpec,
    settings: LoopSettings,
    checkpoint: Checkpoint | None,
    interrupt: Interrupt,
    *,
    dashboard: bool,
) -> tuple[TrainingLoop, LiveProgress | PlainProgress]:
    """The training loop, restored if resumed, and its progress display; ``stack`` closes their resources."""

    def open_session(own: RunSpec, num_gmis: int | None = None) -> Session:
        session = session_of(
            own,
            log=log,
            run_name=folder.path.name,
            on_plan=lambda plan: _show_plan(folder, own, plan, num_gmis),
            dashboard=dashboard,
        )
        stack.enter_context(session)
        if isinstance(session, DecoupledSession):
            stack.push(partial(_keep_experience, folder, session))
        return session

    def log(text: str) -> None:
        folder.note(text)
        say(text)

    session = open_session(spec, None if checkpoint is None else checkpoint.state["num_gmis"])
    expected = predict_throughput(spec, session.plan)
    health_monitor = RunHealthMonitor(
        spec,
        session,
        reopen=open_session,
        log=log,
        save_spec=lambda own: folder.write_config(run_spec_to_dict(own)),
        planned_steps_per_s=None if expected is None else expected.own_work_steps_per_s,
    )
    if dashboard:
        # Ray's public API returns the address only on connecting, which the session does.
        url = get_dashboard_url()
        say(f"Ray's dashboard: http://{url}" if url else "This cluster has no dashboard.")
    position = None if checkpoint is None else position_of(checkpoint.counters)
    folder.checkpoints.rewind(-1 if position is None else position.iteration)
    files = FileRecorder(folder, resumed_at=position)
    stack.callback(files.close)
    console = Console()
    screen: LiveProgress | PlainProgress = PlainProgress(settings.limits, say)
    if console.is_terminal and not console.is_dumb_terminal:
        title = f"{spec.env.id}  {folder.path}"
        screen = LiveProgress(title, settings.limits, settings.return_source, console)
    recorders = [files, screen, RunExporter(run=folder.path.name, task=spec.env.id)]
    loop = TrainingLoop(
        session, folder.checkpoints, recorders, settings, interrupt=interrupt, health_monitor=health_monitor
    )
    if checkpoint is not None:
        loop.restore(checkpoint)
    return loop, screen


def _keep_experience(
    folder: RunFolder, session: DecoupledSession, error: type[BaseException] | None, *details: object
) -> None:
    if error is not None and not issubclass(error, Exception):
        return  # ended by a signal: GMIs would have to answer, and may hang
    with suppress(SessionClosedError):  # it failed; the end of the run reports why
        experience_record.save(folder.path, session.experience())


def _show_plan(folder: RunFolder, spec: RunSpec, plan: PlacementPlan, num_gmis: int | None) -> None:
    if num_gmis not in (None, plan.num_gmis):
        raise PlanError(
            f"resuming a run of {counted(num_gmis, 'GMI')}",
            f"its settings give {plan.num_gmis} here, hence another batch",
            "Resume it on a machine like the first one",
        )
    reject_insufficient_memory(spec, plan)
    table = plan.table()
    replace_text(folder.path / "plan.txt", table + "\n")
    replace_json(folder.path / "plan.json", plan.to_dict())
    say(table)
    expected = predict_throughput(spec, plan)
    if expected is not None:
        save_prediction(expected, folder.path)
        say(f"Expected: {expected.text()}.")
