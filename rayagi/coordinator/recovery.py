"""Recovery of a decoupled session: restarts lost GMIs while the others continue, with state from snapshots."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from actors.errors import GmiLostError, GmiSilentError
from actors.gmi import ProgramFactory, WorkerInfo, WorkloadFactory
from actors.groups import restart
from actors.protocols import IterationResult, StateDict
from placement.allocation import assign_moved
from placement.backends import get_backend
from placement.inventory import cluster_machine
from placement.plan import PlacementPlan
from placement.ray_groups import is_alive, is_placed, move, no_other_place
from rayagi.config.spec import RunSpec
from rayagi.coordinator.cluster import START_TIMEOUT_S
from rayagi.coordinator.deployment import Deployment
from rayagi.coordinator.pending_calls import PendingCalls
from rayagi.coordinator.sample_accounting import SampleAccounting, SampleCounts, WorkerSampleCounts

MAX_RESTARTS = 3
"""Restarts of one GMI without progress; after that its loss is considered permanent."""


class Recovery:
    """Restarts lost GMIs on the same bundles, or on another node if theirs has left the cluster.

    - A collector continues with new episodes and the published parameters.
    - Learners hold the same state and all-reduce, so if one is lost, all are restarted. They get the newest parameters from
      the collectors' parameter store, and optimiser and statistics from the last snapshot. Experience that was sent to them
      and not released is delivered again.
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
        self._spec, self._deployment, self._pending_calls = spec, deployment, pending_calls
        self.plan = plan
        """With the nodes that restarted GMIs are on now."""
        self._group, self._factory, self._log = deployment.group, factory, log
        self.collectors, self.learners = plan.hosting("simulator"), plan.hosting("trainer")
        self._generation = 0
        self._snapshot: StateDict = {}
        """Shared state of the learners."""
        self._reported: dict[int, StateDict] = {}
        """Last local state of each learner."""
        self._locals: dict[int, StateDict] = {}
        """Last local state of each collector."""
        self._rollouts: Counter[int] = Counter()
        """Rollouts of each collector."""
        self._reported_steps: Counter[int] = Counter()
        """Environment steps that each collector's process has reported."""
        self._steps_of_lost: dict[int, int] = {}
        """Those of lost processes, by origin: reported, or learned of through the learners."""
        self._restarts_without_progress: Counter[int] = Counter()
        self._node_ids = {worker.index: worker.node_id for worker in deployment.workers}
        """Ray's node of each GMI's process, as it has reported it."""
        self._lost_on: dict[int, str] = {}
        """Node of each GMI's last loss that has counted, until the next one."""
        self._starting: dict[int, StateDict] = {}
        """GMIs whose new process is not there yet, and the state with which it is to go on."""
        self._unplaced_since_s: float | None = None
        self._accounting = SampleAccounting()
        self.restarts = 0
        """Number of restarted GMIs so far."""
        self.is_lower_bound = False
        """Whether learners were lost after a collector, or with one. Nobody can then tell what that collector sent last if
        it had not reported it, and the learners had not reported its arrival."""

    def record_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Store the last reported state of a GMI."""
        if index in self.learners:
            self._snapshot = dict(state.get("shared", self._snapshot))
            self._reported[index] = state["local"]
        else:
            if index in self._locals and self._origin(index) != state["local"]["sample_counts"]["origin"]:
                self._reported_steps[index] = 0  # another process, or one that has loaded a state
            self._locals[index] = state["local"]

    def record_progress(self, index: int, results: Sequence[IterationResult]) -> None:
        """Record the rollouts or updates that a GMI has finished."""
        self._restarts_without_progress[index] = 0
        if index in self.collectors:
            self._rollouts[index] = results[-1].iteration + 1
            self._reported_steps[index] += sum(int(result.metrics["env_steps"]) for result in results)

    def unreported_steps(self) -> int:
        """Environment steps, not returned before, that lost collectors had sent and not reported: learners have them.

        Each learner reports the rows that it has received from each origin. See ``is_lower_bound``.
        """
        found = 0
        for origin, known in self._steps_of_lost.items():
            rows = self._accounting.rows_from_lost(origin, self._learner_counts())
            more = max(0, rows * self._spec.learning.rollout_length - known)
            self._steps_of_lost[origin] += more
            found += more
        return found

    def _origin(self, index: int) -> int:
        origin: int = self._locals[index]["sample_counts"]["origin"]
        return origin

    def restart_lost(self, lost: Exception, index: int) -> None:
        """Restart a GMI; if it is a learner, all learners. Does not wait: the restart is a pending call.

        Raises:
            Exception: ``lost``, after too many restarts without progress.
        """
        indices = self.learners if index in self.learners else (index,)
        is_new = self._is_new_loss(index)
        for each in indices:
            self._pending_calls.discard(each)
            if is_new:
                self._lost_on[each] = self._node_ids[each]
                self._restarts_without_progress[each] += 1
            if self._restarts_without_progress[each] > MAX_RESTARTS:
                raise lost
        loss = lost.loss if isinstance(lost, GmiLostError) else str(lost)
        self._log(f"{loss}. {'It is' if index in self.collectors else 'All learners are'} restarted")
        if index in self._locals:
            self._steps_of_lost.setdefault(self._origin(index), self._reported_steps.pop(index, 0))
        for each in indices:
            restart(self._group, each, self.plan, self._deployment.reservation)
        self.restarts += len(indices)
        if index in self.collectors:
            self._await_process(index, self._collector_state(index))
            return
        self._generation += 1
        state = self._learner_state()
        for each in indices:
            self._await_process(each, state)
            # The first goes on with the lags of all: what learners report is added up.
            state = {**state, "local": {"lags": {}}}

    def _is_new_loss(self, index: int) -> bool:
        """Whether a GMI's loss is another one, and not that of its successor on a node that was being lost already.

        Of a node that ends, first a process is lost, or the peer of a learner's, and what is started there in its place
        until Ray knows that the node is gone.
        """
        node_id = self._lost_on.pop(index, None)
        return node_id is None or node_id != self._node_ids[index] or is_alive(node_id)

    def find_places(self) -> None:
        """Ask for another node for starting GMIs whose own is gone; end the wait if none has room for them.

        Raises:
            ReservationError: Ray has had no place for one for ``gmi.reserve_timeout_s``.
        """
        reservation = self._deployment.reservation
        unplaced = [index for index in self._starting if not is_placed(reservation, index)]
        if not unplaced:
            self._unplaced_since_s = None
            return
        self._unplaced_since_s = self._unplaced_since_s or time.monotonic()
        waited_s = time.monotonic() - self._unplaced_since_s
        if waited_s > self._spec.gmi.reserve_timeout_s:
            raise no_other_place(
                " and ".join(str(self._group.identities[index]) for index in unplaced), waited_s
            )
        # Ray itself moves bundles of a Tune trial; and those that were moved once.
        if reservation.owned and not get_backend(self.plan.backend).changes_host:
            for index in (index for index in unplaced if index not in reservation.moved):
                move(reservation, self.plan, index)
                self._pending_calls.discard(index)
                restart(self._group, index, self.plan, reservation)
                self._await_process(index, self._starting[index])

    def is_starting(self, index: int) -> bool:
        """Whether a restarted GMI's process was not there yet: ``build`` follows its first answer."""
        return index in self._starting

    def build(self, index: int, worker: WorkerInfo) -> None:
        """Let a restarted GMI enter its slice, on the node that it is on, and go on. Does not wait.

        Raises:
            PlanError: it has no slice there, as of ``assign_moved``.
            InventoryError: a node that has joined the cluster does not respond.
        """
        self.plan = assign_moved(self._plan_with(worker.node_id), index, worker.node_id, worker.gpu_ids)
        self._node_ids[index] = worker.node_id
        identities = self._group.identities
        identities[index] = replace(identities[index], slice=self.plan.slices[index])
        self._build(index, self._starting.pop(index))

    def _plan_with(self, node_id: str) -> PlacementPlan:
        """The plan, whose machine has this node even if it has joined the cluster after the run began."""
        nodes = self.plan.machine.nodes
        if any(node.ray_node_id in (None, node_id) for node in nodes):
            return self.plan
        found = [node for node in cluster_machine(START_TIMEOUT_S).nodes if node.ray_node_id == node_id]
        names = {node.name for node in nodes}  # of a host that is back, too
        new = [
            replace(node, name=f"{node.name}-{node_id[:6]}") if node.name in names else node for node in found
        ]
        return replace(self.plan, machine=replace(self.plan.machine, nodes=(*nodes, *new)))

    def _await_process(self, index: int, state: StateDict) -> None:
        """Wait for the new process of a GMI, which then goes on from ``state``."""
        self._starting[index] = state
        self._pending_calls.add(
            index, [self._group.handles[index].worker_info.remote()], "restarting", "restart"
        )

    def _build(self, index: int, state: StateDict) -> None:
        gmi, settings = self._group.handles[index], self._spec.gmi
        refs = [gmi.enter.remote(self.plan.slices[index])]
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
        refs.append(gmi.state_dict.remote(shared=False))
        self._pending_calls.add(index, refs, "restarting", "restart")

    def _collector_state(self, index: int) -> StateDict:
        state: StateDict = {"shared": {"iteration": self._rollouts[index]}}
        if index in self._locals:
            state["local"] = {**self._locals[index], "rollouts": self._rollouts[index]}
        return state

    def _learner_state(self) -> StateDict:
        """The last snapshot with the newest parameters; also records the sample counts of the lost learners."""
        # 1. Ask the living collectors for their counts and parameters. 2. Account for what the lost learners released.
        living = [index for index in self.collectors if not self._pending_calls.is_busy(index, "restart")]
        states = self._states(living)
        self._accounting.record_lost_learners(
            [state["local"]["sample_counts"] for state in states], self._learner_counts()
        )
        if self._steps_of_lost or len(states) < len(self.collectors):
            self.is_lower_bound = True
        lags, shared = self.lags(), dict(self._snapshot)
        # 3. Parameters: the newest that any collector has, if newer than the snapshot's.
        newest = max(
            (state["shared"] for state in states), key=lambda known: known["iteration"], default=None
        )
        if newest is not None and newest["iteration"] > shared["iteration"]:
            # Schedules count the updates since the snapshot, at the mean steps of an update until then.
            done = max(1, shared["iteration"])
            shared["env_steps"] = shared["env_steps"] * newest["iteration"] // done
            shared["iteration"] = newest["iteration"]
            shared["learner"] = {**shared["learner"], **newest["learner"]}
            if "obs_normaliser" in newest:
                shared["obs_normaliser"] = newest["obs_normaliser"]
        self._reported = {}
        return {"shared": shared, "local": {"lags": lags}}

    def _states(self, indices: Sequence[int]) -> list[StateDict]:
        """States of the given collectors; those that are lost are left out."""
        found: list[StateDict] = []
        for index, ref in zip(
            indices, self._group.ask(lambda index, gmi: gmi.state_dict.remote(), indices), strict=True
        ):
            try:
                found += self._group.answers([ref], "the newest parameters", START_TIMEOUT_S, [index])
            except (GmiLostError, GmiSilentError):  # its pending call reports the loss too
                continue
        return found

    def _learner_counts(self) -> list[WorkerSampleCounts]:
        return [report["sample_counts"] for report in self._reported.values()]

    def sample_counts(self, collectors: Sequence[WorkerSampleCounts]) -> SampleCounts:
        """Sample counts; consistent while all GMIs are idle."""
        return self._accounting.sample_counts(collectors, self._learner_counts())

    def lags(self) -> dict[int, int]:
        """Policy lag in updates -> rollout rows that were learned from."""
        total: Counter[int] = Counter()
        for report in self._reported.values():
            total.update(report["lags"])
        return dict(sorted(total.items()))
