"""Watches the GMIs of a run, tells what it notices, and replaces the session where that is allowed and worth it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import Any

from actors.protocols import IterationResult
from placement.backends.base import SliceHealth
from placement.errors import PartitionError, SliceLostError, counted
from placement.plan import PlacementPlan
from rayagi.config.spec import GmiSpec, RunSpec
from rayagi.coordinator.decisions import Decision, Finding, GmiHealth, RunHealth, decide
from rayagi.coordinator.session import Session
from rayagi.run.limits import Position

WINDOW = 20
"""Iterations over which speed and memory are judged."""
SHARE_CHECK_INTERVAL_S = 20.0
"""Between two looks at the shares of GPUs, through the carvers on their hosts."""
MAX_RECOVERIES = 3
"""Of lost shares, without a checkpoint between them: then their loss is not an accident."""
_WAITING = ("sync_s", "exchange_s", "wait_s")
"""Metrics that say how long a GMI waited for others."""


class RunHealthMonitor:
    """Implements rayagi.run.loop_types.HealthMonitor over one session after another."""

    def __init__(
        self,
        spec: RunSpec,
        session: Session,
        *,
        reopen: Callable[[RunSpec], Session],
        log: Callable[[str], None],
        save_spec: Callable[[RunSpec], None],
        planned_steps_per_s: float | None = None,
        follow_up: Callable[[Decision], str] = lambda decision: "start with --replan, or resume with it",
        window: int = WINDOW,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Only looks, until it is asked to replan.

        Args:
            spec: of the run; ``spec.gmi.replan`` says whether more than telling is allowed
            session: open
            reopen: opens a session of another spec
            tell: for the reader of the run
            save_spec: notes the spec of a new plan, once a checkpoint of it is there to go on from
            planned_steps_per_s: all GMIs' steps per second that the first plan promised; None where nobody predicted it
            follow_up: what the reader does to follow a proposal
            window: iterations that are judged together
            clock: seconds, from anywhere
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
        """Judge what was collected last; what is new is told."""
        for results in zip(*self._session.collected, strict=True):
            for index, (speed, memory) in enumerate(_speeds_and_memory(results, self._session.plan)):
                self._speeds[index].append(speed)
                if memory is not None:
                    self._memory[index].append(memory)
        self._ask_shares()
        decision = decide(self._health())
        self._findings = decision.findings
        if decision.action == "nothing":
            return
        if decision.action == "replan":
            self._pending_decision = decision
        self._log(f"Iteration {position.iteration:,}: {decision.reason}.{self._next_plan_text(decision)}")

    @property
    def replan_pending(self) -> bool:
        """Whether a decision waits for a checkpoint."""
        return self._pending_decision is not None

    def replan(self, state: Mapping[str, Any]) -> Session:
        """End the session, and open one by the new plan that goes on from ``state``; its environments start anew.

        Raises:
            RuntimeError: no decision waits.
            Exception: as opening a session does. The old one has ended.
        """
        if self._pending_decision is None:
            raise RuntimeError("nothing was decided")
        before = sum(self._session.plan.envs)
        self._planned = None  # that was of the old plan
        self._spec = self._unsaved_spec = replanned_spec(
            self._spec, self._session.plan, self._pending_decision
        )
        self._session.close()
        self._session = self._reopen(self._spec)
        after = sum(self._session.plan.envs)
        self._session.load_state_dict(_without_env_states(state))
        self._begin(self._session)
        self._log(
            f"Going on with {counted(self._session.plan.num_gmis, 'GMI')} and {after} environments in all"
            + (
                f" instead of {before}: the batch is {after / before:.3g} times as large"
                if after != before
                else ""
            )
            + ". Environments start anew."
        )
        return self._session

    def recover(self, lost: SliceLostError, state: Mapping[str, Any] | None) -> Session:
        """Cut the GPUs anew, start all GMIs anew on them, and go on from ``state``; None: from the beginning.

        The session that lost a share has ended: its GMIs are gone, and what it had made on the GPUs is undone.

        Raises:
            SliceLostError: ``lost``, where ``MAX_RECOVERIES`` came to nothing: no checkpoint was written since.
            Exception: as opening a session does.
        """
        self._recoveries += 1
        if self._recoveries > MAX_RECOVERIES:
            lost.add_note(
                f"It was tried {counted(MAX_RECOVERIES, 'time')} without reaching another checkpoint."
            )
            raise lost
        whence = "the beginning, since there is no checkpoint yet" if state is None else "the last checkpoint"
        self._log(
            f"{', '.join(lost.slices)}: {lost.problem.rstrip('.')}. All GMIs are started anew on GPUs cut anew, "
            f"and go on from {whence} (attempt {self._recoveries} of {MAX_RECOVERIES})"
        )
        try:
            self._session = self._reopen(self._spec)
        except Exception as error:
            error.add_note(f"This was while the run recovered: {lost}")
            raise
        if state is not None:
            same = self._unsaved_spec is None  # else it is of the plan before: with other environments
            self._session.load_state_dict(state if same else _without_env_states(state))
        self._begin(self._session)
        return self._session

    def on_checkpoint(self) -> None:
        """From now on a resume goes on with the present plan."""
        self._recoveries = 0
        if self._unsaved_spec is not None:
            self._save_spec(self._unsaved_spec)
            self._unsaved_spec = None

    def _begin(self, session: Session) -> None:
        """Nothing is known of this session yet."""
        count = session.plan.num_gmis
        self._speeds = [deque[float](maxlen=self._window) for _ in range(count)]
        self._memory = [deque[float](maxlen=self._window) for _ in range(count)]
        self._shares: list[SliceHealth | None] = [None] * count
        self._shares_due_s = self._clock() + SHARE_CHECK_INTERVAL_S
        self._findings = frozenset()
        self._pending_decision = None

    def _ask_shares(self) -> None:
        """Now and then, since GMIs have nothing to do meanwhile. A host that does not answer says nothing new."""
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
                    memory_bytes=tuple(memory),
                    memory_limit_bytes=plan.memory_bytes(index),
                    driver_bytes=None if share is None else share.memory_bytes,
                    share=share,
                )
                for index, (speeds, memory, share) in enumerate(
                    zip(self._speeds, self._memory, self._shares, strict=True)
                )
            ),
            num_envs=plan.num_envs,
            window=self._window,
            planned_steps_per_s=None if self._planned is None else self._planned / plan.num_gmis,
            may_replan=self._spec.gmi.replan,
            findings=self._findings,
        )

    def _next_plan_text(self, decision: Decision) -> str:
        if decision.num_gmis == 0:
            return ""
        plan = f"{counted(decision.num_gmis, 'GMI')} with {counted(decision.num_envs, 'environment')} each"
        if decision.action == "replan":
            return f" At the next checkpoint the run goes on with {plan}."
        return f" To go on with {plan}, {self._follow_up(decision)}."


def _without_env_states(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"shared": state["shared"], "num_gmis": state["num_gmis"]}


def replanned_spec(spec: RunSpec, plan: PlacementPlan, decision: Decision) -> RunSpec:
    """The spec of the decided plan: fewer GMIs, where they were, or fewer environments."""
    gmi: GmiSpec = replace(spec.gmi, num_envs=decision.num_envs)
    if decision.num_gmis < plan.num_gmis:
        if plan.backend == "cpu":
            gmi = replace(gmi, num_gmis=decision.num_gmis, slices=None)
        else:  # the shares stay; the last ones are given back
            shares = tuple(gmi_slice.gpu_fraction for gmi_slice in plan.slices[: decision.num_gmis])
            gmi = replace(gmi, num_gmis=None, gmis_per_gpu=None, slices=shares)
    return replace(spec, gmi=gmi)


def _speeds_and_memory(
    results: Sequence[IterationResult], plan: PlacementPlan
) -> list[tuple[float, float | None]]:
    """Each GMI's steps per second of its own work and its memory, of one iteration.

    Unequal GMIs are to take as long as each other, so each counts as many steps as they have on average. GMIs without a
    simulator make no steps, and cannot be compared: they count as usual, and only their memory is watched.
    """
    simulating = [result.metrics for result in results if "env_steps" in result.metrics]
    steps = sum(metrics["env_steps"] for metrics in simulating) / len(simulating)
    usual = median(steps / _own_work_s(metrics) for metrics in simulating)
    memory = "resident_bytes" if plan.backend == "cpu" else "device_bytes"
    return [
        (
            steps / _own_work_s(result.metrics) if "env_steps" in result.metrics else usual,
            result.metrics.get(memory),
        )
        for result in results
    ]


def _own_work_s(metrics: Mapping[str, float]) -> float:
    """Of an iteration, without waiting for others."""
    return max(metrics["iteration_s"] - sum(metrics.get(name, 0.0) for name in _WAITING), 1e-9)
