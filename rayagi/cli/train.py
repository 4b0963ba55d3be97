"""``rayagi train``: start or resume a run, drive it, and say how it ended."""

from __future__ import annotations

import argparse
import shutil
import traceback
from contextlib import ExitStack, suppress
from typing import Any

from rich.console import Console

from rayagi.cli.failures import INTERRUPTED, explain
from rayagi.cli.settings import limits_from, resumed_spec, spec_from, typed_limits
from rayagi.config.convert import run_spec_from_dict, run_spec_to_dict
from rayagi.config.spec import RunSpec
from rayagi.coordinator.session import Session
from rayagi.monitoring.progress import LiveProgress, PlainProgress
from rayagi.run.atomic import replace_json, replace_text
from rayagi.run.checkpoints import Checkpoint
from rayagi.run.csv_log import read_rows
from rayagi.run.errors import LimitReachedError, NoCheckpointError, RunError
from rayagi.run.folder import RunFolder, create_run, open_run
from rayagi.run.interrupt import Interrupt
from rayagi.run.limits import Limits, should_stop
from rayagi.run.loop_types import Interval, LoopSettings, Outcome
from rayagi.run.measures import position_of
from rayagi.run.recorders import FileRecorder
from rayagi.run.training_loop import TrainingLoop
from rayagi.run.versions import collect_versions, rayagi_version


def run(arguments: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    if arguments.resume is not None:
        folder, spec, checkpoint = _reopened(arguments)
    else:
        folder, spec, checkpoint = _created(arguments)
    settings = _settings(arguments, spec, folder)
    try:
        _refuse_if_done(folder, settings, checkpoint)
        _describe(folder, spec, settings, checkpoint)
        outcome = _train(folder, spec, settings, checkpoint, dashboard=arguments.dashboard)
    except BaseException as error:
        _after_failure(folder, error)
        raise
    finally:
        folder.unlock()
    return _conclude(folder, outcome)


def _created(arguments: argparse.Namespace) -> tuple[RunFolder, RunSpec, None]:
    spec = spec_from(arguments)
    folder = create_run(
        arguments.out, spec.env.id, seed=spec.seed, rayagi_version=rayagi_version(), name=arguments.name
    )
    return folder, spec, None


def _reopened(arguments: argparse.Namespace) -> tuple[RunFolder, RunSpec, Checkpoint | None]:
    folder = open_run(arguments.resume)
    spec = resumed_spec(run_spec_from_dict(folder.read_config()), arguments)
    folder.lock()
    try:
        checkpoint = folder.checkpoints.load("last")
    except NoCheckpointError as error:
        if error.damaged:
            raise
        say("No checkpoint was saved yet: the run starts from the beginning.")
        return folder, spec, None
    for reason in checkpoint.damaged:
        say(f"{reason}; going back to {checkpoint.name}.")
    return folder, spec, checkpoint


def _settings(arguments: argparse.Namespace, spec: RunSpec, folder: RunFolder) -> LoopSettings:
    stored = folder.record
    limits = limits_from(arguments, spec)
    if arguments.resume is not None and typed_limits(arguments).is_empty() and stored.limits:
        limits = Limits.from_dict(stored.limits)
    every = Interval(**stored.checkpoint_every) if stored.checkpoint_every else Interval(time_s=60.0)
    if arguments.checkpoint_every is not None:
        unit, amount = arguments.checkpoint_every
        every = Interval(iterations=int(amount)) if unit == "iterations" else Interval(time_s=amount)
    return LoopSettings(
        limits=limits,
        seed=spec.seed,
        evaluation_interval=spec.evaluation.interval,
        evaluation_episodes=spec.evaluation.num_episodes,
        checkpoint_every=every,
    )


def _refuse_if_done(folder: RunFolder, settings: LoopSettings, checkpoint: Checkpoint | None) -> None:
    if checkpoint is None:
        return
    position = position_of(checkpoint.counters)
    if should_stop(settings.limits, position, settings.return_source) is not None:
        raise LimitReachedError(str(folder.path), settings.limits.text(settings.return_source))


def _describe(
    folder: RunFolder, spec: RunSpec, settings: LoopSettings, checkpoint: Checkpoint | None
) -> None:
    """Write what is known before anything starts."""
    folder.write_config(run_spec_to_dict(spec))
    replace_json(folder.path / "versions.json", collect_versions())
    every = settings.checkpoint_every
    folder.update(
        status="running",
        reason="",
        limits=settings.limits.to_dict(),
        checkpoint_every={"iterations": every.iterations, "time_s": every.time_s},
    )
    begun = (
        f"Resuming {spec.env.id} at iteration {checkpoint.counters['iteration']:,}"
        if checkpoint
        else spec.env.id
    )
    say(f"{begun} in {folder.path}. Ends after {settings.limits.text(settings.return_source)}.")


def _train(
    folder: RunFolder,
    spec: RunSpec,
    settings: LoopSettings,
    checkpoint: Checkpoint | None,
    *,
    dashboard: bool,
) -> Outcome:
    with ExitStack() as stack:
        session = stack.enter_context(
            Session(
                spec,
                run_name=folder.path.name,
                on_plan=lambda plan: _show_plan(folder, plan),
                dashboard=dashboard,
            )
        )
        position = None if checkpoint is None else position_of(checkpoint.counters)
        folder.checkpoints.rewind(-1 if position is None else position.iteration)
        files = FileRecorder(folder, resumed_at=position)
        stack.callback(files.close)
        screen = _screen(folder, spec, settings)
        interrupt = Interrupt(_announce_end)
        loop = TrainingLoop(session, folder.checkpoints, [files, screen], settings, interrupt=interrupt)
        if checkpoint is not None:
            loop.restore(checkpoint)
        with screen, interrupt:
            outcome = loop.run()
    return outcome


def _show_plan(folder: RunFolder, plan: Any) -> None:
    table = plan.table()
    replace_text(folder.path / "plan.txt", table + "\n")
    replace_json(folder.path / "plan.json", plan.to_dict())
    say(table)


def _screen(folder: RunFolder, spec: RunSpec, settings: LoopSettings) -> LiveProgress | PlainProgress:
    console = Console()
    if console.is_terminal and not console.is_dumb_terminal:
        title = f"{spec.env.id}  {folder.path}"
        return LiveProgress(title, settings.limits, settings.return_source, console)
    return PlainProgress(settings.limits, say)


def _announce_end() -> None:
    # Called from a signal handler: Python refuses to print where the signal came in the middle of a print.
    with suppress(RuntimeError):
        say("Finishing what is being computed, then saving. Ctrl-C again quits at once.")


def _conclude(folder: RunFolder, outcome: Outcome) -> int:
    """Record how the run ended, write the report, and say what to do next."""
    interrupted = outcome.stop is None
    reason = "Ctrl-C" if outcome.stop is None else outcome.stop.reason
    position = outcome.position
    folder.update(
        status="interrupted" if interrupted else "finished",
        reason=reason,
        counters={
            "iteration": position.iteration,
            "env_steps": position.env_steps,
            "train_s": position.train_s,
            "best_return": outcome.best_return,
        },
    )
    if position.iteration > 0:
        # Imported here: drawing is not needed before the end, and takes its time to load.
        from rayagi.monitoring.report import summary, write_report

        report = write_report(folder)
        facts = summary(folder, read_rows(folder.progress_csv), read_rows(folder.evaluations_csv))
        say("")
        for key, value in facts:
            say(f"{key:>18}  {value}")
        say(f"{'report':>18}  {report}")
    say("")
    if interrupted:
        say(f"Saved {outcome.checkpoint}. Go on with:\n  rayagi train --resume {folder.path}")
        return INTERRUPTED
    say(f"Next:\n  rayagi evaluate {folder.path}\n  rayagi evaluate {folder.path} --video out.mp4")
    return 0


def _after_failure(folder: RunFolder, error: BaseException) -> None:
    """Leave the folder saying what happened, and the error saying what still stands."""
    known = explain(error)
    checkpoints = folder.checkpoints.names()
    started = folder.progress_csv.exists() or bool(checkpoints)
    if known is not None and not started and folder.record.status == "running":
        # Nothing was computed: an empty folder would only be in the way.
        shutil.rmtree(folder.path, ignore_errors=True)
        return
    if isinstance(error, LimitReachedError):
        return
    # The disk may be what failed: the first error is the one to tell.
    with suppress(RunError):
        if known is None and isinstance(error, Exception):
            log = folder.path / "error.log"
            replace_text(log, "".join(traceback.format_exception(error)))
            error.add_note(f"The traceback is in {log}.")
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        folder.update(status=status, reason=known.message if known else f"{type(error).__name__}: {error}")
    if checkpoints:
        error.add_note(
            f"The last good checkpoint is {checkpoints[-1]}. Go on from it with:\n"
            f"  rayagi train --resume {folder.path}"
        )
    else:
        error.add_note("No checkpoint had been saved yet.")


def say(text: str) -> None:
    """Write to standard output at once, so that a pipe or a log file shows it when it happens."""
    print(text, flush=True)
