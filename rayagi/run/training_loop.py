"""The driver's training loop: requests iterations from the GMIs, records, evaluates, saves, and stops.

A request has as many iterations as take about a second. If no evaluation, checkpoint or limit is due, the loop submits the
next request before it records the last result, so that the GMIs do not wait for file and terminal output.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actors.protocols import IterationResult
from placement.errors import SliceLostError
from rayagi.config.spec import EVALUATION_SEED_OFFSET
from rayagi.monitoring.catalogue import reward_column
from rayagi.run.checkpoints import Checkpoint, CheckpointStore
from rayagi.run.errors import NoCheckpointError, NonFiniteResultError
from rayagi.run.interrupt import END_LIMIT_S, Interrupt
from rayagi.run.limits import (
    EpisodeWindow,
    Limits,
    Position,
    ReturnSource,
    Stop,
    iterations_until,
    should_stop,
)
from rayagi.run.measures import UnstableShare, evaluation_row, first_non_finite
from rayagi.run.recorders import Recorder, Values

if TYPE_CHECKING:  # they import Ray
    from rayagi.coordinator.health_monitor import RunHealthMonitor
    from rayagi.coordinator.session import Session

REPORT_S = 1.0
"""Approximate duration of one request."""
LONG_END_LIMIT_S = 60.0
"""As ``END_LIMIT_S``, for an evaluation, and for what has no duration to compare with: a state, another session."""
_MUST_BE_FINITE = ("policy_loss", "value_loss", "entropy", "grad_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """How often to save: by iterations or by time; with neither, at the end only."""

    iterations: int | None = None
    time_s: float | None = None


CHECKPOINT_EVERY = Interval(time_s=60.0)
"""Default interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """Settings of the training loop."""

    limits: Limits
    seed: int
    max_unstable_share: float = 1.0
    """Largest share of environment steps that may become unstable; more end the run."""
    evaluation_interval: int = 0
    """Iterations between evaluations; 0: none."""
    evaluation_episodes: int = 10
    checkpoint_every: Interval = CHECKPOINT_EVERY

    @property
    def return_source(self) -> ReturnSource:
        """Which return ``stop_return`` and the best checkpoint refer to."""
        return "evaluation" if self.evaluation_interval > 0 else "training"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOutcome:
    """Result of a run."""

    stop: Stop | None
    """The limit reached; None if the run was interrupted."""
    position: Position
    checkpoint: str
    """Name of the last checkpoint."""
    best_return: float | None


class TrainingLoop:
    """Runs a session until a limit or an interrupt."""

    def __init__(
        self,
        session: Session,
        checkpoints: CheckpointStore,
        recorders: Sequence[Recorder],
        settings: LoopSettings,
        *,
        interrupt: Interrupt,
        health_monitor: RunHealthMonitor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._health_monitor = health_monitor
        self._session, self._checkpoints, self._recorders = session, checkpoints, recorders
        self._settings, self._interrupt, self._clock = settings, interrupt, clock
        self._window = EpisodeWindow()
        self._unstable = UnstableShare(settings.max_unstable_share)
        self._iteration = 0
        self._env_steps = 0
        self._episodes = 0
        self._train_s = 0.0
        self._best_return: float | None = None
        self._evaluation_return: float | None = None
        self._evaluated_at = 0
        self._saved_at = -1
        self._saved_at_s = 0.0
        self._iteration_s = self._request_s = self._evaluation_s = 0.0
        self._steps_per_iteration = 0.0
        self._ticked_at = 0.0
        self._beginning = self._counters()

    @property
    def position(self) -> Position:
        """Progress of the run."""
        return Position(
            iteration=self._iteration,
            env_steps=self._env_steps,
            train_s=self._train_s,
            evaluation_return=self._evaluation_return,
            training_return=self._window.return_mean(),
            training_episodes=len(self._window),
        )

    def begin_with(self, shared: Mapping[str, Any]) -> None:
        """Begin a new run with networks of another one, and save them as its first checkpoint."""
        self._ticked_at = self._clock()
        self._session.load_state_dict({"shared": shared, "num_gmis": 0})
        self._save()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint: the session's state and the loop's counters."""
        self._session.load_state_dict(checkpoint.state)
        self.restore_counters(checkpoint.counters)

    def restore_counters(self, counters: Mapping[str, Any]) -> None:
        """Restore the loop's counters from a checkpoint."""
        self._iteration, self._env_steps = int(counters["iteration"]), int(counters["env_steps"])
        self._episodes, self._train_s = int(counters["episodes"]), float(counters["train_s"])
        # Do not compare training returns (with exploration) with evaluation returns.
        alike = counters.get("return_source") == self._settings.return_source
        self._best_return = counters["best_return"] if alike else None
        self._evaluation_return = counters["evaluation_return"]
        self._evaluated_at = int(counters["evaluated_at"])
        self._window.load(counters["window"])
        self._saved_at, self._saved_at_s = self._iteration, self._train_s

    def run(self) -> TrainingOutcome:
        """Train until a limit or an interrupt, and save. Continues from the last checkpoint if a GPU share is lost.

        Raises:
            KeyboardInterrupt: after an interrupt the GMIs do not answer in time, or there was a second Ctrl-C.
            NonFiniteResultError: a loss, gradient or weight is not finite; the last good checkpoint stays.
            UnstableSimulationsError: more simulations than allowed became unstable; likewise.
            DiskError: a file cannot be written; the last good checkpoint stays.
            SliceLostError: a GPU share was lost, and there is no health monitor, or it has retried too often.
        """
        while True:
            try:
                return self._run()
            except SliceLostError as lost:
                if self._health_monitor is None:
                    raise
                self._recover(self._health_monitor, lost)

    def _recover(self, health_monitor: RunHealthMonitor, lost: SliceLostError) -> None:
        """Continue from the last checkpoint in another session; recorders drop later rows."""
        try:
            checkpoint = self._checkpoints.load()
        except NoCheckpointError as error:
            if error.damaged:
                raise lost from error
            state, counters = None, self._beginning
        else:
            state, counters = checkpoint.state, checkpoint.counters
        with self._interrupt.wait_limited(LONG_END_LIMIT_S):
            self._session = health_monitor.recover(lost, state)
        self.restore_counters(counters)
        for recorder in self._recorders:
            recorder.rewound(self.position)

    def _run(self) -> TrainingOutcome:
        self._ticked_at = self._clock()
        stop = should_stop(self._settings.limits, self.position, self._settings.return_source)
        waiting = stop is None
        if waiting:
            self._session.submit(self._request_size())
        while waiting:
            # 1. Wait for the running request, count its results and check the GMIs.
            with self._interrupt.wait_limited(END_LIMIT_S + 2 * self._request_s):
                results = self._session.collect()
            rows = self._account(results)
            if self._health_monitor is not None:
                self._health_monitor.check_health(self.position)
            # 2. If nothing is due, submit the next request before recording: GMIs do not wait for files.
            stop = should_stop(self._settings.limits, self.position, self._settings.return_source)
            waiting = not (
                stop or self._interrupt.requested or self._evaluation_due() or self._checkpoint_due()
            )
            if waiting:
                self._session.submit(self._request_size())
            self._record_iterations(rows, results)
            # 3. Else evaluate, save and re-plan while no request runs, then continue unless it is the end.
            if not waiting:
                stop = self._between_requests(stop)
                waiting = not (stop or self._interrupt.requested)
                if waiting:
                    self._session.submit(self._request_size())
        self._save()
        return TrainingOutcome(
            stop=stop, position=self.position, checkpoint=self._name(), best_return=self._best_return
        )

    def _between_requests(self, stop: Stop | None) -> Stop | None:
        """Evaluate, save and re-plan as due, while no request runs. Returns the reason to stop, if any."""
        final = stop is not None and self._settings.evaluation_interval > 0
        if (
            (self._evaluation_due() or final)
            and not self._interrupt.requested
            and self._evaluated_at != self._iteration
        ):
            self._evaluate()
            stop = stop or should_stop(self._settings.limits, self.position, self._settings.return_source)
        if self._checkpoint_due():
            self._save()
            if stop is None and not self._interrupt.requested:
                self._replan()
        return stop

    def _replan(self) -> None:
        """Continue in another session if the health monitor requests it; saved files stay."""
        if self._health_monitor is not None and self._health_monitor.replan_pending:
            with self._interrupt.wait_limited(LONG_END_LIMIT_S):
                self._session = self._health_monitor.replan(self._session.state_dict())
            self._tick()
            self._iteration_s = 0.0  # unknown for the new plan: request one iteration

    def _request_size(self) -> int:
        """Iterations of the next request: about ``REPORT_S`` worth, and not past a limit, evaluation or checkpoint."""
        limits = self._settings.limits
        per_report_s = REPORT_S
        if limits.time_s is not None:
            per_report_s = min(per_report_s, limits.time_s - self._train_s)
        # Iterations that fit into a report's time at the last measured speed; one if unknown.
        size = int(per_report_s / self._iteration_s) if self._iteration_s > 0 else 1
        bounds = [
            iterations_until(
                limits,
                iteration=self._iteration,
                env_steps=self._env_steps,
                steps_per_iteration=self._steps_per_iteration,
            )
        ]
        intervals = (self._settings.evaluation_interval, self._settings.checkpoint_every.iterations)
        # Up to the next multiple of the evaluation and checkpoint intervals.
        bounds += [interval - self._iteration % interval for interval in intervals if interval]
        return max(1, min([size, *(bound for bound in bounds if bound is not None)]))

    def _account(self, results: Sequence[IterationResult]) -> list[Values]:
        """Add results to the counters, and return rows. Wall time is split in proportion to each iteration's own."""
        elapsed_s = self._request_s = self._tick()
        # While a replay is filled nothing is learned, so that later iterations take a hundred times as long: unknown.
        learns = all(result.metrics.get("gradient_steps", 1.0) > 0 for result in results)
        self._iteration_s = elapsed_s / len(results) if learns else 0.0
        own_s = [max(result.metrics.get("iteration_s", 0.0), 1e-9) for result in results]
        scale = elapsed_s / sum(own_s)
        train_s = self._train_s - elapsed_s
        rows: list[Values] = []
        for result, result_s in zip(results, own_s, strict=True):
            train_s += result_s * scale
            rows.append(self._account_one(result, train_s=train_s, wall_s=result_s * scale))
        return rows

    def _account_one(self, result: IterationResult, *, train_s: float, wall_s: float) -> Values:
        env_steps = int(result.metrics["env_steps"])
        samples = result.metrics.get("train_samples", float(env_steps))
        self._iteration += 1
        self._env_steps += env_steps
        if env_steps:
            self._steps_per_iteration = float(env_steps)
        self._episodes += len(result.episode_returns)
        for name in _MUST_BE_FINITE:
            if not math.isfinite(result.metrics.get(name, 0.0)):
                raise NonFiniteResultError(name, result.metrics[name], self._iteration, self._env_steps)
        for value in result.episode_returns:
            if not math.isfinite(value):
                raise NonFiniteResultError("episode return", value, self._iteration, self._env_steps)
        self._unstable.add(result.metrics)
        self._window.add(result.episode_returns, result.episode_lengths, result.reward_terms)
        terms = {reward_column(name): mean for name, mean in self._window.reward_term_means().items()}
        return {
            "iteration": self._iteration,
            **result.metrics,
            "env_steps_total": self._env_steps,
            "train_s": train_s,
            "steps_per_second": env_steps / wall_s if wall_s > 0 else None,
            "samples_per_second": samples / wall_s if wall_s > 0 else None,
            "episode_return_mean": self._window.return_mean(),
            "episode_length_mean": self._window.length_mean(),
            "episodes_total": self._episodes,
            "evaluation_return_mean": self._evaluation_return,
            **terms,
        }

    def _evaluate(self) -> None:
        seed = self._settings.seed + EVALUATION_SEED_OFFSET
        with self._interrupt.wait_limited(LONG_END_LIMIT_S + 2 * self._evaluation_s):
            result = self._session.evaluate(self._settings.evaluation_episodes, seed=seed)
        self._evaluation_s = self._tick()
        mean = result.mean_return()
        if not math.isfinite(mean):
            raise NonFiniteResultError("evaluation return", mean, self._iteration, self._env_steps)
        self._evaluation_return, self._evaluated_at = mean, self._iteration
        better = self._best_return is None or mean > self._best_return
        row = evaluation_row(result, self.position)
        for recorder in self._recorders:
            recorder.evaluated(row, best=better)
        if better:
            self._best_return = mean
            self._save(best={"metric": "evaluation return", "value": mean})

    def _save(self, *, best: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint, unless this iteration has one."""
        if self._saved_at == self._iteration:
            return
        training_return = self.position.settled_return("training")
        if (
            best is None
            and self._settings.return_source == "training"
            and training_return is not None
            and (self._best_return is None or training_return > self._best_return)
        ):
            self._best_return = training_return
            best = {"metric": "mean return of the last 100 training episodes", "value": training_return}
        with self._interrupt.wait_limited(LONG_END_LIMIT_S):
            state = self._session.state_dict()
        if "env_steps" in state["shared"]:
            # Rollouts in flight are not restored: schedules go on from the run's steps, as if they had been dropped.
            state["shared"]["env_steps"] = self._env_steps
        bad = first_non_finite(state["shared"])
        if bad is not None:
            raise NonFiniteResultError(bad[0], bad[1], self._iteration, self._env_steps)
        self._checkpoints.save(state, self._counters(), best=best, save_replays=self._session.save_replays)
        self._tick()
        self._saved_at, self._saved_at_s = self._iteration, self._train_s
        if self._health_monitor is not None:
            self._health_monitor.on_checkpoint()
        for recorder in self._recorders:
            recorder.saved(self._name())

    def _counters(self) -> dict[str, Any]:
        return {
            "iteration": self._iteration,
            "env_steps": self._env_steps,
            "episodes": self._episodes,
            "train_s": self._train_s,
            "best_return": self._best_return,
            "return_source": self._settings.return_source,
            "evaluation_return": self._evaluation_return,
            "evaluated_at": self._evaluated_at,
            "window": self._window.to_dict(),
        }

    def _evaluation_due(self) -> bool:
        interval = self._settings.evaluation_interval
        return interval > 0 and self._iteration % interval == 0 and self._evaluated_at != self._iteration

    def _checkpoint_due(self) -> bool:
        every = self._settings.checkpoint_every
        if self._saved_at == self._iteration:
            return False
        if every.iterations is not None:
            return self._iteration % every.iterations == 0
        return every.time_s is not None and self._train_s - self._saved_at_s >= every.time_s

    def _record_iterations(self, rows: Sequence[Values], results: Sequence[IterationResult]) -> None:
        for recorder in self._recorders:
            recorder.iterated(rows, self.position)
            for row, result in zip(rows, results, strict=True):
                if result.histograms:
                    recorder.counted(result.histograms, row)

    def _tick(self) -> float:
        """Add the time since the last tick to the training time, and return it."""
        now = self._clock()
        elapsed, self._ticked_at = now - self._ticked_at, now
        self._train_s += elapsed
        return elapsed

    def _name(self) -> str:
        return f"iteration_{self._iteration:06d}"
