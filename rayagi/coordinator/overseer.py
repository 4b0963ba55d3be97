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
from placement.backends.base import Health
from placement.errors import CarvingError, SliceLostError, counted
from placement.plan import Plan
from rayagi.config.spec import GmiSpec, RunSpec
from rayagi.coordinator.decisions import Decision, GmiHealth, Notice, RunHealth, decide
from rayagi.coordinator.session import Session
from rayagi.run.limits import Position

WINDOW = 20
"""Iterations over which speed and memory are judged."""
SHARES_EVERY_S = 20.0
"""Between two looks at the shares of GPUs, through the carvers on their hosts."""
MOST_RECOVERIES = 3
"""Of lost shares, without a checkpoint between them: then their loss is not an accident."""
_WAITING = ("sync_s", "exchange_s", "wait_s")
"""Metrics that say how long a GMI waited for others."""


class RunOverseer:
    """Implements rayagi.run.loop_types.Overseer over one session after another."""

    def __init__(
        self,
        spec: RunSpec,
        session: Session,
        *,
        reopen: Callable[[RunSpec], Session],
        tell: Callable[[str], None],
        keep: Callable[[RunSpec], None],
        planned_steps_per_s: float | None = None,
        way_on: Callable[[Decision], str] = lambda decision: "start with --replan, or resume with it",
        window: int = WINDOW,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Only looks, until it is asked to replan.

        Args:
            spec: of the run; ``spec.gmi.replan`` says whether more than telling is allowed
            session: open
            reopen: opens a session of another spec
            tell: for the reader of the run
            keep: notes the spec of a new plan, once a checkpoint of it is there to go on from
            planned_steps_per_s: all GMIs' steps per second that the first plan promised; None where nobody predicted it
            way_on: what the reader does to follow a proposal
            window: iterations that are judged together
            clock: seconds, from anywhere
        """
        self._spec, self._session = spec, session
        self._reopen, self._tell, self._keep = reopen, tell, keep
        self._way_on = way_on
        self._planned, self._window, self._clock = planned_steps_per_s, window, clock
        self._to_keep: RunSpec | None = None
        self._recoveries = 0
        self._noticed: frozenset[Notice] = frozenset()
        self._due: Decision | None = None
        self._begin(session)

    def look(self, position: Position) -> None:
        """Judge what was collected last; what is new is told."""
        for results in zip(*self._session.collected, strict=True):
            for index, (speed, memory) in enumerate(_readings(results, self._session.plan)):
                self._speeds[index].append(speed)
                if memory is not None:
                    self._memory[index].append(memory)
        self._ask_shares()
        decision = decide(self._health())
        self._noticed = decision.noticed
        if decision.action == "nothing":
            return
        if decision.action == "replan":
            self._due = decision
        self._tell(f"Iteration {position.iteration:,}: {decision.reason}.{self._outlook(decision)}")

    @property
    def wants_to_replan(self) -> bool:
        """Whether a decision waits for a checkpoint."""
        return self._due is not None

    def replan(self, state: Mapping[str, Any]) -> Session:
        """End the session, and open one by the new plan that goes on from ``state``; its environments start anew.

        Raises:
            RuntimeError: no decision waits.
            Exception: as opening a session does. The old one has ended.
        """
        if self._due is None:
            raise RuntimeError("nothing was decided")
        before = sum(self._session.plan.envs)
        self._planned = None  # that was of the old plan
        self._spec = self._to_keep = replanned(self._spec, self._session.plan, self._due)
        self._session.close()
        self._session = self._reopen(self._spec)
        after = sum(self._session.plan.envs)
        self._session.load_state_dict(_without_environments(state))
        self._begin(self._session)
        self._tell(
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
            SliceLostError: ``lost``, where ``MOST_RECOVERIES`` came to nothing: no checkpoint was written since.
            Exception: as opening a session does.
        """
        self._recoveries += 1
        if self._recoveries > MOST_RECOVERIES:
            lost.add_note(
                f"It was tried {counted(MOST_RECOVERIES, 'time')} without reaching another checkpoint."
            )
            raise lost
        whence = "the beginning, since there is no checkpoint yet" if state is None else "the last checkpoint"
        self._tell(
            f"{', '.join(lost.slices)}: {lost.problem.rstrip('.')}. All GMIs are started anew on GPUs cut anew, "
            f"and go on from {whence} (attempt {self._recoveries} of {MOST_RECOVERIES})"
        )
        try:
            self._session = self._reopen(self._spec)
        except Exception as error:
            error.add_note(f"This was while the run recovered: {lost}")
            raise
        if state is not None:
            same = self._to_keep is None  # else it is of the plan before: with other environments
            self._session.load_state_dict(state if same else _without_environments(state))
        self._begin(self._session)
        return self._session

    def saved(self) -> None:
        """From now on a resume goes on with the present plan."""
        self._recoveries = 0
        if self._to_keep is not None:
            self._keep(self._to_keep)
            self._to_keep = None

    def _begin(self, session: Session) -> None:
        """Nothing is known of this session yet."""
        count = session.plan.num_gmis
        self._speeds = [deque[float](maxlen=self._window) for _ in range(count)]
        self._memory = [deque[float](maxlen=self._window) for _ in range(count)]
        self._shares: list[Health | None] = [None] * count
        self._shares_due_s = self._clock() + SHARES_EVERY_S
        self._noticed = frozenset()
        self._due = None

    def _ask_shares(self) -> None:
        """Now and then, since GMIs have nothing to do meanwhile. A host that does not answer says nothing new."""
        if self._clock() < self._shares_due_s:
            return
        self._shares_due_s = self._clock() + SHARES_EVERY_S
        with suppress(CarvingError):
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
            noticed=self._noticed,
        )

    def _outlook(self, decision: Decision) -> str:
        if decision.num_gmis == 0:
            return ""
        plan = f"{counted(decision.num_gmis, 'GMI')} with {counted(decision.num_envs, 'environment')} each"
        if decision.action == "replan":
            return f" At the next checkpoint the run goes on with {plan}."
        return f" To go on with {plan}, {self._way_on(decision)}."


def _without_environments(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"shared": state["shared"], "num_gmis": state["num_gmis"]}


def replanned(spec: RunSpec, plan: Plan, decision: Decision) -> RunSpec:
    """The spec of the decided plan: fewer GMIs, where they were, or fewer environments."""
    gmi: GmiSpec = replace(spec.gmi, num_envs=decision.num_envs)
    if decision.num_gmis < plan.num_gmis:
        if plan.backend == "cpu":
            gmi = replace(gmi, num_gmis=decision.num_gmis, slices=None)
        else:  # the shares stay; the last ones are given back
            shares = tuple(piece.gpu_fraction for piece in plan.slices[: decision.num_gmis])
            gmi = replace(gmi, num_gmis=None, gmis_per_gpu=None, slices=shares)
    return replace(spec, gmi=gmi)


def _readings(results: Sequence[IterationResult], plan: Plan) -> list[tuple[float, float | None]]:
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
