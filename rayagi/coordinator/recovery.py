"""GMIs that are lost are started anew while the others go on: what their successors go on from, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.errors import GmiLostError, GmiSilentError
from actors.gmi import ProgramFactory, WorkloadFactory
from actors.groups import restart
from actors.protocols import StateDict
from placement.plan import PlacementPlan
from rayagi.config.spec import RunSpec
from rayagi.coordinator.deployment import Deployment
from rayagi.coordinator.pending_calls import PendingCalls
from rayagi.coordinator.sample_accounting import SampleAccounting, SampleCounts, WorkerSampleCounts
from rayagi.coordinator.time_limits import START_TIMEOUT_S

MAX_RESTARTS = 3
"""Of one GMI, without anything coming of it: then its loss is not an accident."""


class Recovery:
    """Starts successors on the same bundles.

    A collector's goes on with new episodes, and with the parameters that are published. Learners hold the same, and reduce
    together: where one is lost, all are started anew. They get the newest parameters, from the board that collectors still
    have, and the optimiser and statistics of the last snapshot. What had been sent to them and not released comes again.
    """

    def __init__(
        self,
        *,
        spec: RunSpec,
        plan: PlacementPlan,
        deployment: Deployment,
        pending_calls: PendingCalls,
        factory: ProgramFactory | WorkloadFactory,
        log: Callable[[str], None],
    ) -> None:
        self._spec, self._plan, self._deployment, self._pending_calls = spec, plan, deployment, pending_calls
        self._group, self._factory, self._log = deployment.group, factory, log
        self.collectors, self.learners = plan.hosting("simulator"), plan.hosting("trainer")
        self._generation = 0
        self._snapshot: StateDict = {}
        """What learners hold alike."""
        self._reported: dict[int, StateDict] = {}
        """What each learner said last that is its own."""
        self._locals: dict[int, StateDict] = {}
        """What each collector said last that is its own."""
        self._rollouts: Counter[int] = Counter()
        """That each collector has made."""
        self._restarts_without_progress: Counter[int] = Counter()
        self._accounting = SampleAccounting()
        self.restarts = 0
        """GMIs that were started anew so far."""

    def record_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Remember what a GMI said of its state."""
        if index in self.learners:
            self._snapshot = dict(state.get("shared", self._snapshot))
            self._reported[index] = state["local"]
        else:
            self._locals[index] = state["local"]

    def record_progress(self, index: int, iteration: int) -> None:
        """Something came of a GMI: its rollout or update of this number, from 0."""
        self._restarts_without_progress[index] = 0
        if index in self.collectors:
            self._rollouts[index] = iteration + 1

    def restart_lost(self, lost: Exception, index: int) -> None:
        """Start a successor; with a learner, of all learners. Does not wait for it: it lands among the flights.

        Raises:
            Exception: ``lost``, where that has been tried too often.
        """
        indices = self.learners if index in self.learners else (index,)
        for each in indices:
            self._pending_calls.discard(each)
            self._restarts_without_progress[each] += 1
            if self._restarts_without_progress[each] > MAX_RESTARTS:
                raise lost
        self._log(
            f"{lost}. It is started anew"
            if index in self.collectors
            else f"{lost}. Learners are started anew"
        )
        for each in indices:
            restart(self._group, each, self._plan, self._deployment.reservation)
        self.restarts += len(indices)
        if index in self.collectors:
            self._build(index, self._collector_state(index))
            return
        self._generation += 1
        state = self._learner_state()
        for each in indices:
            self._build(each, state)

    def _build(self, index: int, state: StateDict) -> None:
        gmi, settings = self._group.handles[index], self._spec.gmi
        refs = [gmi.worker_info.remote(), gmi.enter.remote(self._plan.slices[index])]
        if self._group.identities[index].joins_group:
            refs.append(
                gmi.join_through.remote(
                    timeout_s=settings.collective_timeout_s,
                    transport=settings.transport,
                    composition=settings.composition,
                    generation=self._generation,
                )
            )
        refs += [gmi.build.remote(self._factory), gmi.load_state_dict.remote(state)]
        self._pending_calls.add(index, refs, "starting anew", "restart")

    def _collector_state(self, index: int) -> StateDict:
        state: StateDict = {"shared": {"iteration": self._rollouts[index]}}
        if index in self._locals:
            state["local"] = {**self._locals[index], "rollouts": self._rollouts[index]}
        return state

    def _learner_state(self) -> StateDict:
        """The last snapshot with the newest parameters; also closes the books of the learners that are gone."""
        living = [index for index in self.collectors if not self._pending_calls.is_busy(index, "restart")]
        states = self._states(living)
        self._accounting.record_lost_learners(
            [state["local"]["books"] for state in states], self._learner_counts()
        )
        lags = dict[int, int]()
        for report in self._reported.values():
            lags = dict(Counter(lags) + Counter(report["lags"]))
        shared = dict(self._snapshot)
        newest = max(
            (state["shared"] for state in states), key=lambda known: known["iteration"], default=None
        )
        if newest is not None and newest["iteration"] > shared["iteration"]:
            shared["iteration"] = newest["iteration"]
            shared["learner"] = {**shared["learner"], **newest["learner"]}
            if "obs_normaliser" in newest:
                shared["obs_normaliser"] = newest["obs_normaliser"]
        self._reported = {}
        return {"shared": shared, "local": {"lags": lags}}

    def _states(self, indices: Sequence[int]) -> list[StateDict]:
        """Of collectors that live."""
        found: list[StateDict] = []
        for index, ref in zip(
            indices, self._group.ask(lambda index, gmi: gmi.state_dict.remote(), indices), strict=True
        ):
            try:
                found += self._group.answers([ref], "the newest parameters", START_TIMEOUT_S, [index])
            except (GmiLostError, GmiSilentError):  # what is under way of it says so too
                continue
        return found

    def _learner_counts(self) -> list[WorkerSampleCounts]:
        return [report["books"] for report in self._reported.values()]

    def sample_counts(self, collectors: Sequence[WorkerSampleCounts]) -> SampleCounts:
        """Counts of experience; while nobody works, they add up."""
        return self._accounting.sample_counts(collectors, self._learner_counts())

    def lags(self) -> dict[int, int]:
        """Rollout rows that were learned from, by the updates that their policy was behind."""
        total: Counter[int] = Counter()
        for report in self._reported.values():
            total.update(report["lags"])
        return dict(sorted(total.items()))
