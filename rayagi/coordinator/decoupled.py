"""Decoupled session: collectors and learners are free-running, and lost GMIs are restarted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from actors.errors import GmiLostError, GmiSilentError
from actors.ping import PING_INTERVAL_S
from actors.protocols import IterationResult, StateDict
from collectives.errors import CommunicatorError
from placement.errors import counted
from placement.role_layout import OVERLAPPED_TEMPLATES
from rayagi.config.learning import AsynchronousSpec
from rayagi.config.spec import RunSpec
from rayagi.coordinator.cluster import ITERATION_TIMEOUT_S, raise_if_lost
from rayagi.coordinator.pending_calls import CompletedCall, PendingCalls
from rayagi.coordinator.sample_accounting import SampleCounts
from rayagi.coordinator.session import Session
from rayagi.monitoring.catalogue import merge

if TYPE_CHECKING:  # as in session.py
    from rayagi.coordinator.deployment import Deployment

SNAPSHOT_INTERVAL_S = 10.0
"""Interval between snapshots of the learners' state, from which lost learners are restored."""
SLICE_CHECK_INTERVAL_S = 10.0
"""Interval between health checks of the GPU shares."""
_MAX_ATTEMPTS = 3
"""Attempts at a call to several GMIs, if one of them is lost and has to be restarted."""


def session_of(spec: RunSpec, *, log: Callable[[str], None] | None = None, **options: Any) -> Session:
    """Create the session for a run's template; nothing starts before it is entered.

    Args:
        spec: the run
        log: as of ``Session.log``; None: its module's logger
        options: arguments of ``Session``
    """
    is_overlapped = spec.gmi.template in OVERLAPPED_TEMPLATES
    session = DecoupledSession(spec, **options) if is_overlapped else Session(spec, **options)
    if log is not None:
        session.log = log
    return session


class DecoupledSession(Session):
    """GMI-DRL §3.1.1, Figure 6d: serving and training at the same time.

    Every GMI has one outstanding request while ``collect`` waits. An iteration is one update of the learners, with the
    rollouts that collectors finished in the meantime. A lost GMI is restarted while the others continue; its successor takes
    over its channel endpoints and the experience in flight to it. An exception of a program ends the session.
    """

    def _begin(self, deployment: Deployment) -> None:
        # Imported here: it needs torch, which the session imports in the background while Ray starts.
        from rayagi.coordinator.recovery import Recovery

        self._pending_calls = PendingCalls(deployment.group, self._spec.gmi.collective_timeout_s)
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
        """Request updates. The GMIs are called in small batches while ``collect`` waits."""
        if num_iterations < 1:
            raise ValueError(f"num_iterations={num_iterations}: at least 1 is needed")
        self._open()
        self._pending.append((num_iterations, []))
        self._ask_idle()

    def collect(self, timeout_s: float | None = None) -> list[IterationResult]:
        """Wait for the oldest submitted request; one result per update, merged over learners and collectors.

        Can be called again after Ctrl-C.

        Raises:
            GmiLostError: a GMI was lost too often. The session has ended.
            GmiSilentError: no GMI makes progress. The session has ended.
            Exception: an exception of a program. The session has ended.
        """
        if not self._pending:
            raise RuntimeError("nothing was submitted")
        count = self._pending[0][0]
        begin = time.monotonic()
        deadline = begin + (timeout_s or ITERATION_TIMEOUT_S * count)
        try:
            while min(map(len, self._updates.values())) < count:
                with self._closing_on_error(counted(count, "update")):
                    self._step(deadline, count)
        except KeyboardInterrupt as error:
            if time.monotonic() - begin > PING_INTERVAL_S:  # the user may have waited in vain
                busy = filter(self._pending_calls.is_busy, range(self.plan.num_gmis))
                self._open().note_positions(error, list(busy))
            raise
        self._pending.popleft()
        return self._announced_notes(self._merged(count))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; discards outstanding results. Without ``local``, environments are reset."""
        self._open()
        with self._closing_on_error("outstanding requests before a state is loaded"):
            self._wait_while(self._is_any_busy)
        self._rollouts.clear()
        for updates in self._updates.values():
            updates.clear()
        super().load_state_dict(state)
        self._states()

    def experience(self) -> dict[str, Any]:
        """Experience statistics so far: sample counts, policy lags of the learned rows, restarts of GMIs, and whether rows
        sent and environment steps are a lower bound (``Recovery.is_lower_bound``)."""
        counts, learning = self.sample_counts(), self._spec.learning
        assert isinstance(learning, AsynchronousSpec)
        return {
            "rows": asdict(counts) | {"missing": counts.missing},
            "lags": {str(lag): rows for lag, rows in self._recovery.lags().items()},
            "bound": None if learning.on_stale == "correct" and learning.max_lag else learning.max_lag,
            "restarts": self._recovery.restarts,
            "is_lower_bound": self._recovery.is_lower_bound,
        }

    def sample_counts(self) -> SampleCounts:
        """Rows of experience, counted while all GMIs are idle."""
        self._open()
        with self._closing_on_error("outstanding requests before the count"):
            self._wait_while(self._is_any_busy)
        states = self._states()
        return self._recovery.sample_counts(
            [states[index]["local"]["sample_counts"] for index in self._collectors]
        )

    def _step(self, deadline: float, count: int) -> None:
        """Call idle GMIs, check the slices, and handle completed calls."""
        self._ask_idle()
        # A failed share only stops the GMIs of its own GPU, so it has to be checked for.
        if time.monotonic() >= self._slice_check_due_s:
            self._raise_if_slices_lost()
            self._slice_check_due_s = time.monotonic() + SLICE_CHECK_INTERVAL_S
        self._handle_all_completed()
        if self._pending_calls.idle_s() > self._spec.gmi.collective_timeout_s or time.monotonic() > deadline:
            done = min(map(len, self._updates.values()))
            asked = f"{counted(count, 'update')}, of which {done} are done; every GMI responds, but waits for others"
            raise GmiSilentError("the run", asked, self._pending_calls.idle_s())

    def _ask_idle(self) -> None:
        """Send one request to each idle GMI: collectors while updates are pending, learners for the missing updates."""
        wanted = sum(count for count, _ in self._pending)
        group = self._open()
        for index in (*self._learners, *self._collectors):
            missing = wanted - len(self._updates[index]) if index in self._updates else wanted
            if self._pending_calls.is_busy(index) or missing <= 0:
                continue
            gmi = group.handles[index]
            size = self._pending_calls.iterations_per_call(index)
            if index in self._collectors:
                self._pending_calls.add(index, [gmi.iterate.remote(size)], "rollouts", num_iterations=size)
                continue
            with_snapshot = index == self._learners[0] and time.monotonic() >= self._snapshot_due_s
            if with_snapshot:
                self._snapshot_due_s = time.monotonic() + SNAPSHOT_INTERVAL_S
            calls = [gmi.iterate.remote(min(size, missing)), gmi.state_dict.remote(shared=with_snapshot)]
            self._pending_calls.add(index, calls, "updates", num_iterations=size)

    def _handle_all_completed(self) -> None:
        """Wait for the next completed calls, and handle them."""
        raise_if_lost()
        for completed in self._pending_calls.wait(timeout_s=1.0):
            # Else it has been restarted since, because of another's loss in this list.
            if not self._pending_calls.is_busy(completed.index):
                self._handle_completed(completed)
        self._recovery.find_places()

    def _handle_completed(self, completed: CompletedCall) -> None:
        """Store the results of a completed call, or restart the GMI that was lost."""
        index = completed.index
        if completed.failure is not None:
            self._replace_lost(completed.failure, index)
            return
        if completed.kind == "restart" and self._recovery.is_starting(index):
            self._update_worker(index, completed.answers[0])
            self._recovery.build(index, completed.answers[0])
            self._plan = self._recovery.plan
            return
        if completed.kind == "restart":
            self._recovery.record_state(index, completed.answers[-1])
            self.log(f"{self._open().identities[index]} goes on")
            return
        mark = "env_steps" if index in self._collectors else "train_samples"
        results = [result for result in completed.answers[0] if mark in result.metrics]
        self._pending_calls.record_results(index, results)
        if results:
            self._recovery.record_progress(index, results)
        if index in self._collectors:
            self._rollouts += results
        else:
            self._updates[index].extend(results)
            self._recovery.record_state(index, completed.answers[1])

    def _replace_lost(self, failure: Exception, index: int) -> None:
        """Restart a lost GMI. A learner whose all-reduce failed because of another counts as lost too.

        Raises:
            SliceLostError: its share of a GPU was lost, so it cannot be restarted there.
            Exception: ``failure``, if it is no loss of a GMI or happened too often.
        """
        if not isinstance(failure, GmiLostError) and not (
            isinstance(failure, CommunicatorError) and index in self._learners
        ):
            raise failure
        self._raise_if_slices_lost()
        self._recovery.restart_lost(failure, index)
        # All learners restart from one state: drop the updates that only some of them have reported.
        if index in self._learners:
            count = min(map(len, self._updates.values()))
            for updates in self._updates.values():
                while len(updates) > count:
                    updates.pop()

    def _merged(self, count: int) -> list[IterationResult]:
        """Merge the next updates; the collectors' rollouts are distributed over them evenly, in order.

        Steps of rollouts that a lost collector has sent, and not reported, count with the others.
        """
        rollouts, self._rollouts = self._rollouts, []
        steps = (
            int(sum(result.metrics["env_steps"] for result in rollouts)) + self._recovery.unreported_steps()
        )
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
        """State of every GMI, after pending restarts; excludes experience in flight."""
        self._open()
        states = super()._states()
        for index, state in enumerate(states):
            self._recovery.record_state(index, state)
        return states

    def _ask(self, question: Callable[[int, Any], Any], asked: str, of: Sequence[int]) -> list[Any]:
        """Call several GMIs; returns their results in order. If one is lost, all are called again after its restart."""
        for _ in range(_MAX_ATTEMPTS):
            with self._closing_on_error(asked):
                group = self._open()
                # A call would queue behind what runs, and that has limits of its own: a GMI that hangs is restarted.
                self._wait_while(lambda: any(map(self._pending_calls.is_busy, of)))
                try:
                    return group.answers(group.ask(question, of), asked, ITERATION_TIMEOUT_S, of)
                except GmiLostError as error:
                    self._replace_lost(error, error.index)
        raise GmiSilentError("the run", f"{asked}, {_MAX_ATTEMPTS} times", 0.0)

    def _is_any_busy(self) -> bool:
        """Whether a GMI has an outstanding request."""
        return any(map(self._pending_calls.is_busy, range(self.plan.num_gmis)))

    def _wait_while(self, pending: Callable[[], bool]) -> None:
        """Handle completed calls as long as ``pending``."""
        while pending():
            self._handle_all_completed()
