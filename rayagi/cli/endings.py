"""End of a training run: status, report, follow-up commands and error notes."""

from __future__ import annotations

import shutil
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from shlex import quote

from actors.errors import NonFiniteError
from placement.errors import PlanError
from rayagi.cli.failures import BAD_INPUT, INTERRUPTED, Explanation, explain, stopped_text
from rayagi.cli.output import say
from rayagi.config.spec import RunSpec
from rayagi.coordinator.lost_ray import NotEndedError
from rayagi.envs import EnvironmentFailedError, SimulationError, has_pictures
from rayagi.run import prediction
from rayagi.run.atomic import replace_text
from rayagi.run.csv_log import read_rows
from rayagi.run.errors import DiskError, NonFiniteResultError, RunError, UnstableSimulationsError
from rayagi.run.folder import RunFolder, RunRecord
from rayagi.run.training_loop import TrainingOutcome

_DIVERGED = (NonFiniteError, NonFiniteResultError, SimulationError)
"""Errors that would recur if the run continued from its last checkpoint."""


def record_outcome(folder: RunFolder, outcome: TrainingOutcome, interrupted_by: str) -> None:
    """Record how the run ended: at once, since whoever ends it may not wait until the GMIs and Ray have ended.

    Raises:
        DiskError: it cannot be written.
    """
    position = outcome.position
    folder.update(
        status="interrupted" if outcome.stop is None else "finished",
        reason=interrupted_by if outcome.stop is None else outcome.stop.reason,
        counters={
            "iteration": position.iteration,
            "env_steps": position.env_steps,
            "train_s": position.train_s,
            "best_return": outcome.best_return,
        },
    )


def conclude(folder: RunFolder, spec: RunSpec, outcome: TrainingOutcome) -> int:
    """Write the report, and print the next commands; returns the exit code."""
    if outcome.position.iteration > 0:
        # Imported here: matplotlib is slow to import and needed only at the end.
        from rayagi.monitoring.report import mean_rate, speed_range, summary_text, write_report

        progress = read_rows(folder.progress_csv)
        try:
            speed = mean_rate(progress, "env_steps"), speed_range(progress)
            prediction.record_measurement(folder.path, *speed)
            report = write_report(folder)
        except DiskError as error:
            error.add_note(
                f"The run is saved ({outcome.checkpoint}). Write its report with:\n  rayagi report {quote(str(folder.path))}"
            )
            raise
        say(f"\n{summary_text(folder, report)}")
    if outcome.stop is None:
        say(
            f"\nSaved {outcome.checkpoint}. Continue with:\n  rayagi train --resume {quote(str(folder.path))}"
        )
        return INTERRUPTED
    evaluate = f"  rayagi evaluate {quote(str(folder.path))}"
    say("\nNext:\n" + evaluate + (f"\n{evaluate} --video out.mp4" if has_pictures(spec.env.id) else ""))
    return 0


@dataclass(frozen=True)
class Resumed:
    """What a resumed run had before: its record, and the names of its checkpoints."""

    record: RunRecord
    checkpoints: list[str]


def after_failure(folder: RunFolder, spec: RunSpec, error: BaseException, *, before: Resumed | None) -> None:
    """Record the error in the run folder, and add notes to it about what was saved.

    ``before``: of a resumed run; None for a new run.
    """
    if not folder.path.is_dir():
        error.add_note(
            f"{folder.path} was removed or renamed while the run used it. A renamed one continues with:\n"
            "  rayagi train --resume ITS-NEW-PATH"
        )
        return
    known = explain(error)
    refused = known if known is not None and known.exit_code == BAD_INPUT else None
    if before is not None and refused is not None and before.checkpoints == folder.checkpoints.names():
        # It did not continue: keep the earlier reason.
        with suppress(RunError):
            folder.update(**asdict(before.record))
        if isinstance(refused.error, PlanError):
            error.add_note(
                "A resumed run keeps its number of GMIs, since the total batch depends on it. With another number, "
                f"start a new run:\n  rayagi train {spec.env.id} --config {quote(str(folder.path))}/config.yaml --gmis N"
            )
        return
    checkpoints = folder.checkpoints.names()
    # By Ctrl-C, or by SIGTERM during startup.
    stopped = isinstance(error, NotEndedError) or not isinstance(error, Exception)
    if (
        before is None
        and not checkpoints
        and _is_bare(folder, stopped=stopped)
        and (stopped or known is not None)
    ):
        # Nothing was computed: remove the empty folder.
        shutil.rmtree(folder.path, ignore_errors=True)
        of_environment = known is not None and isinstance(known.error, EnvironmentFailedError)
        hint = " --debug shows the traceback." if of_environment else ""
        error.add_note(f"Nothing was computed yet, so no run folder is left.{hint}")
        return
    # The disk may have failed: report the first error only.
    with suppress(RunError):
        if not stopped and (known is None or isinstance(known.error, EnvironmentFailedError)):
            log = folder.path / "error.log"
            replace_text(log, "".join(traceback.format_exception(error)))
            error.add_note(f"The traceback is in {log}.")
        unexpected = stopped_text(error) if stopped else f"{type(error).__name__}: {error}"
        reason = str(known.error) if known else unexpected
        folder.update(status="interrupted" if stopped else "failed", reason=reason)
    error.add_note(_follow_up(folder, spec, known, checkpoints))


def _is_bare(folder: RunFolder, *, stopped: bool) -> bool:
    """Whether a new run's folder has nothing worth keeping. After a failure, its settings are, once it ran."""
    if not folder.progress_csv.exists():
        return True
    return stopped and len(folder.progress_csv.read_text().splitlines()) < 2


def _follow_up(folder: RunFolder, spec: RunSpec, known: Explanation | None, checkpoints: list[str]) -> str:
    """What was saved, and the command that continues from there."""
    saved = (
        f"The last good checkpoint is {checkpoints[-1]}."
        if checkpoints
        else "No checkpoint had been saved yet."
    )
    if known is not None and isinstance(known.error, _DIVERGED):
        return (
            f"{saved} To try again from the start with half the learning rate:\n"
            f"  rayagi train {spec.env.id} --config {quote(str(folder.path))}/config.yaml "
            f"--set {spec.algorithm}.learning_rate={spec.learning.learning_rate / 2:g}"
        )
    if known is not None and isinstance(known.error, UnstableSimulationsError):
        # A resumed run keeps its configuration, and would fail again.
        return (
            f"{saved} Repair the model and start a new run, or allow more unstable steps:\n"
            f"  rayagi train {spec.env.id} --config {quote(str(folder.path))}/config.yaml "
            f"--set env.max_unstable_share={min(1.0, 2 * known.error.unstable / known.error.env_steps):.2g}"
        )
    where = "Continue from it with" if checkpoints else "Start it again with"
    return f"{saved} {where}:\n  rayagi train --resume {quote(str(folder.path))}"
