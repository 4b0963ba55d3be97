"""Health monitor of a run: checks its GMIs, logs findings, and replaces the session by a new plan if that is enabled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from statistics import fmean, median
from typing import Any

from placement.backends.base import SliceHealth
from placement.errors import PartitionError, SliceLostError, counted
from placement.unequal_slices import env_counts
from rayagi.config.errors import ConfigError
from rayagi.config.rules import checked
from rayagi.config.spec import RunSpec
from rayagi.coordinator.decisions import QUIET_WINDOWS, Decision, Finding, GmiHealth, RunHealth, decide
from rayagi.coordinator.session import Session
from rayagi.run.limits import Position

WINDOW = 20
"""Iterations over which speed and memory are evaluated."""
SHARE_CHECK_INTERVAL_S = 20.0
"""Interval of health checks of the GPU shares, through the partitioners on their hosts."""
MAX_RECOVERIES = 3
"""Recoveries from lost shares without a checkpoint in between; after that the loss is considered permanent."""
_WAITING = ("sync_s", "exchange_s", "wait_s")
"""Metrics of the time that a GMI waited for others."""
_WORKING = ("simulate_s", "act_s", "update_s")
"""Metrics of its own work."""


class RunHealthMonitor:
    """Watches the GMIs of one session after another, for rayagi.run.training_loop."""

    def __init__(
        self,
        spec: RunSpec,
        session: Session,
        *,
        reopen: Callable[[RunSpec], Session],
        log: Callable[[str], None],
        save_spec: Callable[[RunSpec], None],
        planned_steps_per_s: float | None = None,
        follow_up: Callable[[RunSpec], str] = lambda spec: "start with --replan, or resume with it",
        window: int = WINDOW,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Observes only, until ``replan`` or ``recover`` is called.

        Args:
            spec: spec of the run; ``spec.gmi.replan`` enables replanning
            session: an open session
            reopen: opens a session of another spec
            log: logs a message for the user
            save_spec: saves the spec of a new plan, called after its first checkpoint
            planned_steps_per_s: predicted steps per second of one GMI's own work; None without a prediction
            follow_up: what the user has to do to continue with a proposed spec, as a clause
            window: iterations that are evaluated together
            clock: monotonic time in seconds
        """
        self._spec, self._session = spec, session
        self._reopen, self._log, self._save_spec = reopen, log, save_spec
        self._follow_up = follow_up
        self._planned, self._window, self._clock = planned_steps_per_s, window, clock
        self._unsaved_spec: RunSpec | None = None
        self._recoveries = 0
        self._findings: frozenset[Finding] = frozenset()
        self._pending_decision: Decision | None = None
        self._begin(session)

    def check_health(self, position: Position) -> None:
        """Evaluate the results that were collected last; logs new findings."""
        memory = "resident_bytes" if self._session.plan.backend == "cpu" else "device_bytes"
        for results in zip(*self._session.collected, strict=True):
            self._num_iterations += 1
            # Unequal GMIs should take equal time, so each is credited with the mean number of steps.
            counts = [result.metrics["env_steps"] for result in results if "env_steps" in result.metrics]
            for index, result in enumerate(results):
                self._metrics[index].append(result.metrics)
                if "env_steps" in result.metrics and any(counts):  # else its speed is not judged
                    self._speeds[index].append(fmean(counts) / _own_work_s(result.metrics))
                if memory in result.metrics:
                    self._memory[index].append(result.metrics[memory])
        self._ask_shares()
        decision = decide(self._health())
        self._findings = decision.findings
        self._last_active |= dict.fromkeys(decision.findings, self._num_iterations)
        if decision.action == "nothing":
            return
        if decision.action == "replan":
            self._pending_decision = decision
        self._log(f"Iteration {position.iteration:,}: {decision.reason}.{self._next_plan_text(decision)}")

    @property
    def replan_pending(self) -> bool:
        """Whether a replan decision waits for a checkpoint."""
        return self._pending_decision is not None

    def replan(self, state: Mapping[str, Any]) -> Session:
        """Close the session and open one with the new plan, resumed from ``state``; environments are reset.

        Raises:
            Exception: an error of opening the session. The old one is closed.
        """
        assert self._pending_decision is not None  # replan_pending
        before = sum(self._session.plan.envs)
        self._planned = None  # the prediction was for the old plan
        self._spec = self._unsaved_spec = replanned_spec(
            self._spec, self._session.plan.num_gmis, self._pending_decision
        )
        self._session.close()
        self._session = self._reopen(self._spec)
        after = sum(self._session.plan.envs)
        self._session.load_state_dict(_without_env_states(state))
        self._begin(self._session)
        self._log(
            f"Continuing with {counted(self._session.plan.num_gmis, 'GMI')} and {counted(after, 'environment')} in total"
            + (
                f" instead of {before}: the batch is {after / before:.3g} times as large"
                if after != before
                else ""
            )
            + ". Environments are reset."
        )
        return self._session

    def recover(self, lost: SliceLostError, state: Mapping[str, Any] | None) -> Session:
        """Repartition the GPUs, restart all GMIs, and resume from ``state``; None: from the beginning.

        The session that lost a share has ended already: its GMIs are stopped and its partitions undone.

        Raises:
            SliceLostError: ``lost``, after ``MAX_RECOVERIES`` attempts without a checkpoint.
            Exception: an error of opening the session.
        """
        self._recoveries += 1
        if self._recoveries > MAX_RECOVERIES:
            lost.add_note(f"Recovered {counted(MAX_RECOVERIES, 'time')} without reaching another checkpoint.")
            raise lost
        whence = "the beginning, since there is no checkpoint yet" if state is None else "the last checkpoint"
        self._log(
            f"{', '.join(lost.slices)}: {lost.problem.rstrip('.')}. All GMIs are restarted on repartitioned GPUs, "
            f"from {whence} (attempt {self._recoveries} of {MAX_RECOVERIES})"
        )
        try:
            self._session = self._reopen(self._spec)
        except Exception as error:
            error.add_note(f"This happened while the run recovered from: {lost}")
            raise
        if state is not None:
            # Before the first checkpoint of a new plan, the state is of the previous one, with other environments.
            same = self._unsaved_spec is None
            self._session.load_state_dict(state if same else _without_env_states(state))
        self._begin(self._session)
        return self._session

    def on_checkpoint(self) -> None:
        """Save the spec of a new plan after its first checkpoint, so that a resume uses it."""
        self._recoveries = 0
        if self._unsaved_spec is not None:
            self._save_spec(self._unsaved_spec)
            self._unsaved_spec = None

    def _begin(self, session: Session) -> None:
        """Reset all measurements for a new session."""
        count = session.plan.num_gmis
        self._speeds = [deque[float](maxlen=self._window) for _ in range(count)]
        self._memory = [deque[float](maxlen=self._window) for _ in range(count)]
        self._metrics = [deque[Mapping[str, float]](maxlen=self._window) for _ in range(count)]
        self._shares: list[SliceHealth | None] = [None] * count
        self._shares_due_s = self._clock() + SHARE_CHECK_INTERVAL_S
        self._findings = frozenset()
        self._num_iterations = 0
        self._last_active: dict[Finding, int] = {}
        """Number of iterations after which each finding was last active."""
        self._pending_decision = None
        self._fewer_envs = fewer_envs(self._spec, session.plan.num_gmis)

    def _ask_shares(self) -> None:
        """Query the shares' health at intervals, since GMIs are idle meanwhile. Keeps the last values on failure."""
        if self._clock() < self._shares_due_s:
            return
        self._shares_due_s = self._clock() + SHARE_CHECK_INTERVAL_S
        with suppress(PartitionError):
            self._shares = list(self._session.health()) or self._shares

    def _health(self) -> RunHealth:
        plan = self._session.plan
        return RunHealth(
            gmis=tuple(
                GmiHealth(
                    steps_per_s=tuple(speeds),
                    planned_steps_per_s=self._planned,
                    memory_bytes=tuple(memory),
                    memory_limit_bytes=plan.memory_bytes(index),
                    driver_bytes=None if share is None else share.memory_bytes,
                    share=share,
                    phases_s=_phases_s(metrics),
                    queue_share=_sum(metrics, "queue_s") / max(_sum(metrics, "iteration_s"), 1e-9),
                    major_faults=_sum(metrics, "major_faults") / max(len(metrics), 1),
                )
                for index, (speeds, memory, share, metrics) in enumerate(
                    zip(self._speeds, self._memory, self._shares, self._metrics, strict=True)
                )
            ),
            num_envs=plan.num_envs,
            fewer_envs=self._fewer_envs,
            window=self._window,
            may_replan=self._spec.gmi.replan,
            findings=self._findings,
            recent=self._recent(),
        )

    def _recent(self) -> frozenset[Finding]:
        """Findings about speed that were active not long ago."""
        since = self._num_iterations - QUIET_WINDOWS * self._window
        return frozenset(
            finding
            for finding, iteration in self._last_active.items()
            if finding[0] in ("slow", "straggler") and iteration >= since
        )

    def _next_plan_text(self, decision: Decision) -> str:
        plan = self._session.plan
        if decision.num_envs == 0 or plan.template != "dp_only":  # the other templates are not replanned
            return ""
        if decision.left_out:
            change = "without " + " and ".join(
                f"GMI {index} {plan.slices[index].label()}" for index in decision.left_out
            )
        else:
            change = f"with {counted(decision.num_envs, 'environment')} in each GMI"
        if decision.action == "replan":
            return f" At the next checkpoint the run continues {change}."
        follow_up = self._follow_up(replanned_spec(self._spec, plan.num_gmis, decision))
        return f" To continue {change}, {follow_up}."


def _without_env_states(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"shared": state["shared"], "num_gmis": state["num_gmis"]}


def replanned_spec(spec: RunSpec, num_gmis: int, decision: Decision) -> RunSpec:
    """The spec of the decided plan: without some of the ``num_gmis`` that run, or with fewer environments.

    The spec counts the GMIs of the whole plan, the decision those that run.
    """
    before = spec.gmi.left_out
    running = [index for index in range(num_gmis + len(before)) if index not in before]
    left_out = sorted((*before, *(running[index] for index in decision.left_out)))
    return spec.with_gmi(num_envs=decision.num_envs, left_out=tuple(left_out))


def fewer_envs(spec: RunSpec, num_gmis: int) -> int:
    """The most environments of one GMI, at most half as many, that the run's settings allow; 0 if they allow none.

    Minibatches of whole sequences need whole groups of environments in each of the ``num_gmis`` that run.
    """
    gmi = spec.gmi
    group = spec.learning.envs_per_shuffle if spec.network.core != "none" else 1
    for count in range(gmi.envs // 2, 0, -1):
        counts = env_counts(count, num_gmis + len(gmi.left_out), gmi.sizes, gmi.left_out)
        if any(each % group for each in counts):
            continue
        with suppress(ConfigError):
            checked(spec.with_gmi(num_envs=count))
            return count
    return 0


def _sum(iterations: Collection[Mapping[str, float]], name: str) -> float:
    return sum(each.get(name, 0.0) for each in iterations)


def _phases_s(iterations: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Median seconds of each phase of a GMI's own work, of those that every iteration has."""
    return {
        name.removesuffix("_s"): median(each[name] for each in iterations)
        for name in _WORKING
        if iterations and all(name in each for each in iterations)
    }


def _own_work_s(metrics: Mapping[str, float]) -> float:
    """Duration of an iteration without waiting for other GMIs."""
    return max(metrics["iteration_s"] - sum(metrics.get(name, 0.0) for name in _WAITING), 1e-9)
