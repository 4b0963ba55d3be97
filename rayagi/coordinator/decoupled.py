"""A session whose GMIs work at their own pace: collectors collect, learners learn, and what is lost is replaced."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actors.errors import GmiLostError, GmiSilentError
from actors.protocols import IterationResult, StateDict
from collectives.errors import CommunicatorError
from placement.role_layout import OVERLAPPED_TEMPLATES
from rayagi.config.spec import RunSpec
from rayagi.coordinator.pending_calls import CompletedCall, PendingCalls
from rayagi.coordinator.sample_accounting import SampleCounts
from rayagi.coordinator.session import Session
from rayagi.coordinator.time_limits import ITERATION_TIMEOUT_S
from rayagi.monitoring.catalogue import merge

if TYPE_CHECKING:  # as in session.py
    from rayagi.coordinator.deployment import Deployment

_logger = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_S = 10.0
"""Between two looks at what learners hold, from which a learner that is lost is rebuilt."""
SLICE_CHECK_INTERVAL_S = 10.0
"""Between two looks at whether the shares of GPUs still stand."""
_MAX_ATTEMPTS = 3
"""Of a question that several must answer, while one that is lost is replaced."""


def session_of(spec: RunSpec, *, log: Callable[[str], None] | None = None, **options: Any) -> Session:
    """The session that a run's template needs; nothing starts before it is entered.

    Args:
        spec: the run
        tell: for the reader of the run, of GMIs that were lost and replaced; None: the log
        options: as ``Session`` takes them
    """
    if spec.gmi.template not in OVERLAPPED_TEMPLATES:
        return Session(spec, **options)
    session = DecoupledSession(spec, **options)
    session.log = log or _logger.warning
    return session


class DecoupledSession(Session):
    """GMI-DRL §3.1.1, Figure 6d: serving and training at the same time.

    Every GMI has one request under way while results are waited for. An iteration is an update of the learners, with what
    collectors did meanwhile. A GMI that is lost is started anew while the others go on; its place in the channels, and what
    was on its way to it, pass to its successor. What a program raises ends the session.
    """

    log: Callable[[str], None] = staticmethod(_logger.warning)

    def _begin(self, deployment: Deployment) -> None:
        from rayagi.coordinator.recovery import Recovery

        self._pending_calls = PendingCalls(deployment.group)
        self._recovery = Recovery(
            spec=self._spec,
            plan=self.plan,
            deployment=deployment,
            pending_calls=self._pending_calls,
            factory=self._program_factory(),
            log=self.log,
        )
        self._collectors, self._learners = self._recovery.collectors, self._recovery.learners
        self._updates: dict[int, deque[IterationResult]] = {index: deque() for index in self._learners}
        self._rollouts: list[IterationResult] = []
        self._snapshot_due_s = 0.0
        self._slice_check_due_s = time.monotonic() + SLICE_CHECK_INTERVAL_S
        self._states()

    def submit(self, num_iterations: int) -> None:
        """Want so many updates. GMIs are asked for them little by little, while ``collect`` waits."""
        if num_iterations < 1:
            raise ValueError(f"num_iterations={num_iterations}: at least 1 is needed")
        self._open()
        self._pending.append((num_iterations, []))
        self._ask_idle()

    def collect(self, timeout_s: float | None = None) -> list[IterationResult]:
        """Wait for the oldest submitted request; one result per update: learners merged, and what collectors did since.

        Interrupted by Ctrl-C, it can be called again.

        Raises:
            GmiLostError: a GMI is lost again and again. The session has ended.
            GmiSilentError: nothing comes of anyone. The session has ended.
            Exception: what a program raised, as itself. The session has ended.
        """
        if not self._pending:
            raise RuntimeError("nothing was submitted")
        count = self._pending[0][0]
        deadline = time.monotonic() + (timeout_s or ITERATION_TIMEOUT_S * count)
        while min(map(len, self._updates.values())) < count:
            self._call_closing_on_error(lambda: self._step(deadline, count), f"{count} updates")
        self._pending.popleft()
        return self._merged(count)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; what is on its way is given up. Without ``local``, environments start anew."""
        self._open()
        self._call_closing_on_error(self._wait_until_idle, "what was asked before a state is loaded")
        self._rollouts.clear()
        for updates in self._updates.values():
            updates.clear()
        super().load_state_dict(state)
        self._states()

    def experience(self) -> dict[str, Any]:
        """What became of the experience so far: counts, ages of what was learned from, GMIs that were started anew."""
        counts = self.sample_counts()
        return {
            "rows": {
                "sent": counts.sent,
                "taken": counts.taken,
                "dropped": counts.dropped,
                "in_flight": counts.in_flight,
                "lost": counts.lost,
                "missing": counts.missing,
            },
            "lags": {str(lag): rows for lag, rows in self._recovery.lags().items()},
            "restarts": self._recovery.restarts,
        }

    def sample_counts(self) -> SampleCounts:
        """Rows of experience, counted while nobody works."""
        self._open()
        self._call_closing_on_error(self._wait_until_idle, "what was asked before it is counted")
        states = self._states()
        return self._recovery.sample_counts([states[index]["local"]["books"] for index in self._collectors])

    def _step(self, deadline: float, count: int) -> None:
        """Ask who is idle, and take in what has ended."""
        self._ask_idle()
        if (
            time.monotonic() >= self._slice_check_due_s
        ):  # the GMIs of other GPUs go on where one GPU's share fails
            self._raise_if_slices_lost()
            self._slice_check_due_s = time.monotonic() + SLICE_CHECK_INTERVAL_S
        for completed in self._pending_calls.wait(timeout_s=1.0):
            self._handle_completed(completed)
        if self._pending_calls.idle_s() > self._spec.gmi.collective_timeout_s or time.monotonic() > deadline:
            done = min(map(len, self._updates.values()))
            asked = (
                f"{count} updates, of which {done} came, though every GMI answers that it waits for others"
            )
            raise GmiSilentError("the run", asked, self._pending_calls.idle_s())

    def _ask_idle(self) -> None:
        """One request for each GMI that has none: collectors while updates are wanted, learners for what is missing."""
        wanted = sum(count for count, _ in self._pending)
        group = self._open()
        for index in (*self._learners, *self._collectors):
            missing = wanted - len(self._updates[index]) if index in self._updates else wanted
            if self._pending_calls.is_busy(index) or missing <= 0:
                continue
            gmi = group.handles[index]
            size = self._pending_calls.iterations_per_call(index)
            if index in self._collectors:
                self._pending_calls.add(index, [gmi.iterate.remote(size)], "rollouts")
                continue
            with_snapshot = index == self._learners[0] and time.monotonic() >= self._snapshot_due_s
            if with_snapshot:
                self._snapshot_due_s = time.monotonic() + SNAPSHOT_INTERVAL_S
            calls = [gmi.iterate.remote(min(size, missing)), gmi.state_dict.remote(shared=with_snapshot)]
            self._pending_calls.add(index, calls, "updates")

    def _handle_completed(self, completed: CompletedCall) -> None:
        """Keep what a request brought, or replace who was lost in it."""
        index = completed.index
        if completed.failure is not None:
            self._replace_lost(completed.failure, index)
            return
        if completed.kind == "restart":
            self._update_worker(index, completed.answers[0])
            self.log(f"{self._open().identities[index]} goes on")
            return
        mark = "env_steps" if index in self._collectors else "train_samples"
        results = [result for result in completed.answers[0] if mark in result.metrics]
        self._pending_calls.record_results(index, results)
        if results:
            self._recovery.record_progress(index, results[-1].iteration)
        if index in self._collectors:
            self._rollouts += results
        else:
            self._updates[index].extend(results)
            self._recovery.record_state(index, completed.answers[1])

    def _replace_lost(self, failure: Exception, index: int) -> None:
        """Whoever is lost; a learner that lost another in a reduction is as good as lost itself.

        Raises:
            SliceLostError: its share of a GPU was lost under it: there is nothing to start a successor on.
            Exception: ``failure``, where it is no loss, or came too often.
        """
        if not isinstance(failure, GmiLostError) and not (
            isinstance(failure, CommunicatorError) and index in self._learners
        ):
            raise failure
        self._raise_if_slices_lost()
        self._recovery.restart_lost(failure, index)
        if (
            index in self._learners
        ):  # they go on from one state: what some of them told of more does not count
            count = min(map(len, self._updates.values()))
            for updates in self._updates.values():
                while len(updates) > count:
                    updates.pop()

    def _merged(self, count: int) -> list[IterationResult]:
        """The next updates; what collectors did meanwhile is dealt to them evenly, in order."""
        rollouts, self._rollouts = self._rollouts, []
        steps = int(sum(result.metrics["env_steps"] for result in rollouts))
        merged = []
        for place in range(count):
            update = merge([replace(self._updates[index].popleft(), iteration=0) for index in self._learners])
            own = rollouts[place * len(rollouts) // count : (place + 1) * len(rollouts) // count]
            whole = merge([update, *(replace(result, iteration=0) for result in own)])
            metrics = {"episodes": 0.0, **whole.metrics, "iteration_s": update.metrics["iteration_s"]}
            metrics["env_steps"] = float(steps * (place + 1) // count - steps * place // count)
            merged.append(replace(whole, metrics=metrics))
        return merged

    def _states(self) -> list[StateDict]:
        """As they are once nobody is lost; experience that is on its way is not in them."""
        self._open()
        states = super()._states()
        for index, state in enumerate(states):
            self._recovery.record_state(index, state)
        return states

    def _ask(self, question: Callable[[int, Any], Any], asked: str, of: Sequence[int]) -> list[Any]:
        """Answers of GMIs, in order; where one is lost, all are asked again once it is replaced."""
        answers: list[Any] = []

        def ask() -> bool:
            group = self._open()
            self._wait_for_restarts()
            try:
                answers[:] = group.answers(group.ask(question, of), asked, ITERATION_TIMEOUT_S, of)
            except GmiLostError as error:
                self._replace_lost(error, error.index)
                return False
            return True

        for _ in range(_MAX_ATTEMPTS):
            if self._call_closing_on_error(ask, asked):
                return answers
        raise GmiSilentError("the run", f"{asked}, {_MAX_ATTEMPTS} times", 0.0)

    def _wait_for_restarts(self) -> None:
        """Wait for GMIs that are being started anew."""
        while self._pending_calls.has_restarts():
            for completed in self._pending_calls.wait(timeout_s=1.0):
                self._handle_completed(completed)

    def _wait_until_idle(self) -> None:
        """Wait until nobody works."""
        while any(map(self._pending_calls.is_busy, range(self.plan.num_gmis))):
            for completed in self._pending_calls.wait(timeout_s=1.0):
                self._handle_completed(completed)

    def _call_closing_on_error(self, work: Callable[[], Any], asked: str) -> Any:
        """``work``; whatever it raises ends the session."""
        with self._closing_on_error(asked):
            return work()
