"""Session: deploys a plan's GMIs, sends them requests from the driver, and undoes the deployment at the end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from actors.errors import GmiLostError, GmiSilentError
from actors.protocols import EvaluationResult, IterationResult, StateDict
from placement.backends.base import SliceHealth
from placement.capacity import planned_node_ids
from placement.errors import PartitionError, PlanError, ReservationError, SliceError, SliceLostError, counted
from placement.inventory import cluster_machine, local_machine
from placement.partitioner import recover_this_host
from placement.plan import PlacementPlan
from placement.ray_groups import plan_beside_others
from placement.types import Machine
from rayagi.config.spec import RunSpec
from rayagi.coordinator.cluster import (
    BUILD_TIMEOUT_S,
    ITERATION_TIMEOUT_S,
    START_TIMEOUT_S,
    connected,
    environment_in_common,
    import_in_background,
    leave_if_lost,
    named_loss,
    raise_if_lost,
    starts_local,
)
from rayagi.coordinator.lost_ray import RayLostError
from rayagi.monitoring.catalogue import merge
from rayagi.planning import plan_of
from rayagi.run.checkpoints import replay_name

if TYPE_CHECKING:  # they need torch, which is imported while Ray starts
    from actors.gmi import ProgramFactory, WorkerInfo, WorkloadFactory
    from actors.groups import GmiGroup
    from actors.partitioners import Partitioners
    from rayagi.coordinator.deployment import Deployment

SLOWEST_FACTOR = 5.0
"""A request may take so many times what the slowest iteration took, and what its own should take."""
GROWN = 1.5
"""Growth of a GMI's resident memory since its first iteration that is mentioned where a GMI is lost."""
MOST_SIZES = 4
"""GMIs whose memory is mentioned then."""

_logger = logging.getLogger(__name__)
_open_sessions: set[object] = set()
"""Of this process, by their tokens: those that nobody has closed still hold what they have reserved."""


def states_of_gmis(state: Mapping[str, Any], envs: tuple[int, ...]) -> list[StateDict]:
    """Each GMI's part of a session's state; with ``local`` if the GMIs have the environments of then."""
    shared = {"shared": state["shared"]}
    same = state["num_gmis"] == len(envs) and tuple(state.get("envs", envs)) == envs
    if "local" not in state or not same:
        return [dict(shared) for _ in envs]
    parts = [{**shared, "local": local} for local in state["local"]]
    for index, folder in state.get("replays", {}).items():
        parts[index]["replay"] = folder
    return parts


class SessionClosedError(RuntimeError):
    """A call to a session that has ended."""

    def __str__(self) -> str:
        return f"this session has ended ({self.args[0]}); open a new one and load the last checkpoint"


class Session:
    """Plan, reserve, start, connect and build on entry; then train, evaluate, save; undo in reverse on exit.

    ::

        with Session(spec, on_plan=lambda plan: print(plan.table())) as session:
            results = session.train(10)

    Any failure of a GMI ends the session, since the replicas are no longer equal. If its share of a GPU has failed, the
    error is SliceLostError, also if the GMI only hangs. Not thread-safe.
    """

    log: Callable[[str], None] = staticmethod(_logger.warning)
    """Called with what GMIs say to the user (``IterationResult.notes``), and with what happens to them."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        ray_address: str | None = None,
        factory: ProgramFactory | WorkloadFactory | None = None,
        make_plan: Callable[[Machine], PlacementPlan] | None = None,
        run_name: str | None = None,
        on_plan: Callable[[PlacementPlan], None] | None = None,
        dashboard: bool = False,
    ) -> None:
        """Nothing starts before the session is entered.

        Args:
            spec: the run
            ray_address: host:port of a cluster; None: RAY_ADDRESS, else a local cluster
            factory: builds each GMI's program; None: the template's, with its metrics exported through Ray
            make_plan: plans for the machine; None: a training plan from the spec
            run_name: tag of the exported metrics; None: the environment's id
            on_plan: called with the plan before anything is reserved
            dashboard: whether a local cluster starts Ray's dashboard
        """
        self._spec, self._ray_address, self._factory = spec, ray_address, factory
        self._make_plan = make_plan or (lambda machine: plan_of(spec, machine))
        self._run_name = run_name or spec.env.id
        self._on_plan, self._dashboard = on_plan, dashboard
        self._undo, self._token = ExitStack(), object()
        self._group: GmiGroup | None = None
        self._partitioners: Partitioners | None = None
        self._ended = "it was not opened"
        self._pending: deque[tuple[int, list[Any]]] = deque()
        self._slowest_s = 0.0
        """Duration of the slowest iteration so far; 0 before the first one that learned."""
        self._recent_s = 0.0
        """Mean duration of the iterations of the last request."""
        self._plan: PlacementPlan | None = None
        self.workers: tuple[WorkerInfo, ...] = ()
        """Node and process of each GMI, as it reports them."""
        self.collected: tuple[tuple[IterationResult, ...], ...] = ()
        """Results of each GMI for the last collected request: ``[GMI][iteration]``."""
        self._first_bytes: list[float] = []
        """Resident memory of each GMI after its first iteration."""

    @property
    def plan(self) -> PlacementPlan:
        """The plan, with the nodes that Ray allocated."""
        if self._plan is None:
            raise SessionClosedError(self._ended)
        return self._plan

    def __enter__(self) -> Self:
        """Open the session.

        Raises:
            ClusterUnreachableError: Ray does not respond.
            PlanError, ReservationError: the plan does not fit.
            PartitionError, SliceError: a GPU could not be partitioned, or a process not confined to its share.
            RayLostError: Ray has ended.
            GmiLostError, GmiSilentError: a GMI did not start.
            Exception: an error of building the program in a GMI.
        """
        with ExitStack() as undo:
            early = self._planned_here() if starts_local(self._ray_address) else None
            with import_in_background("torch"):
                undo.enter_context(
                    connected(
                        self._ray_address,
                        dashboard=self._dashboard,
                        environment=environment_in_common(early) if early else None,
                    )
                )
            with named_loss(), _noting_open_sessions():
                deployment = self._deployed(early, undo)
            self._undo = undo.pop_all()
        self._group, self._ended = deployment.group, ""
        _open_sessions.add(self._token)
        self._begin(deployment)
        return self

    def _planned_here(self) -> PlacementPlan:
        recover_this_host()  # as on each node of a cluster that runs already
        return self._planned(local_machine())

    def _begin(self, deployment: Deployment) -> None:
        """Called once the GMIs are built."""

    def train(self, num_iterations: int) -> list[IterationResult]:
        """Run iterations on all GMIs; returns one merged result per iteration.

        Raises:
            RuntimeError: a submitted request was not collected yet.
        """
        self._raise_if_pending()
        self.submit(num_iterations)
        return self.collect()

    @property
    def is_pending(self) -> bool:
        """Whether a submitted request was not collected yet."""
        return bool(self._pending)

    def submit(self, num_iterations: int) -> None:
        """Request iterations of all GMIs without waiting, so that the GMIs never wait for the driver."""
        if num_iterations < 1:
            raise ValueError(f"num_iterations={num_iterations}: at least 1 is needed")
        refs = self._open().ask(lambda index, gmi: gmi.iterate.remote(num_iterations))
        self._pending.append((num_iterations, refs))

    def collect(self, timeout_s: float | None = None) -> list[IterationResult]:
        """Wait for the oldest submitted request; one result per iteration, merged over GMIs.

        Can be called again after Ctrl-C. ``timeout_s`` overrides the default limit: ``gmi.hang_timeout_s`` beyond five times
        the slowest iteration so far, or what the request should take; an hour for a first iteration.

        Raises:
            RayLostError: Ray has ended. The session has, too.
            SliceLostError: a GMI's share of a GPU has failed. The session has ended.
            GmiLostError, GmiSilentError: a GMI was lost. The session has ended.
            Exception: an exception of a GMI. The session has ended.
        """
        if not self._pending:
            raise RuntimeError("nothing was submitted")
        num_iterations, refs = self._pending[0]
        try:
            per_gmi: list[list[IterationResult]] = self._answers(
                refs, counted(num_iterations, "training iteration"), timeout_s or self._pending_limit_s()
            )
        except GmiSilentError as error:
            if timeout_s is None:
                error.add_note("Where an iteration may take so long, raise gmi.hang_timeout_s.")
            raise
        self._pending.popleft()
        self._record_durations(per_gmi)
        self.collected = tuple(map(tuple, per_gmi))
        self._first_bytes = self._first_bytes or _bytes_held(self.collected, 0)
        return self._announced_notes([merge(results) for results in zip(*per_gmi, strict=True)])

    def _announced_notes(self, results: list[IterationResult]) -> list[IterationResult]:
        for note in dict.fromkeys(note for result in results for note in result.notes):
            self.log(note)
        return results

    def _pending_limit_s(self) -> float:
        """Time limit of the submitted iterations. 0 without any."""
        count = sum(count for count, _ in self._pending)
        hang_s = self._spec.gmi.hang_timeout_s
        if not count or not self._slowest_s:  # a first iteration may compile
            return count * max(ITERATION_TIMEOUT_S, hang_s)
        return hang_s + SLOWEST_FACTOR * max(self._slowest_s, count * self._recent_s)

    def _record_durations(self, per_gmi: Sequence[Sequence[IterationResult]]) -> None:
        """Record how long iterations take. Those that only fill a replay say nothing of the later ones."""
        own_s = [
            max(result.metrics.get("iteration_s", 0.0) for result in results)
            for results in zip(*per_gmi, strict=True)
            if all(result.metrics.get("gradient_steps", 1.0) > 0 for result in results)
        ]
        if own_s:
            self._slowest_s = max(self._slowest_s, *own_s)
            self._recent_s = sum(own_s) / len(own_s)

    def evaluate(self, num_episodes: int, *, seed: int = 0) -> EvaluationResult:
        """Run episodes with the policy's mode, distributed over the GMIs with an agent; results in GMI order."""
        if num_episodes < 1:
            raise ValueError(f"num_episodes={num_episodes}: at least 1 is needed")
        counts = split_evenly(num_episodes, self.plan.hosting("agent"))
        # Distinct seeds, so that GMIs do not run the same episodes.
        seeds = {index: seed + sum(list(counts.values())[:place]) for place, index in enumerate(counts)}
        parts: list[EvaluationResult] = self._ask(
            lambda index, gmi: gmi.evaluate.remote(counts[index], seeds[index]),
            f"evaluation of {counted(num_episodes, 'episode')}",
            tuple(counts),
        )
        return EvaluationResult(
            episode_returns=[value for part in parts for value in part.episode_returns],
            episode_lengths=[value for part in parts for value in part.episode_lengths],
            num_cut=sum(part.num_cut for part in parts),
        )

    def run(self, *args: Any, timeout_s: float = ITERATION_TIMEOUT_S, **kwargs: Any) -> list[Any]:
        """Call ``gmi_run`` of all GMIs' workloads in parallel (rayagi.programs); returns the results in GMI order.

        Raises:
            GmiLostError, GmiSilentError: a GMI was lost, or did not respond within ``timeout_s``. The session has ended.
            Exception: an exception of a workload. The session has ended.
        """
        refs = self._open().ask(lambda index, gmi: gmi.run.remote(args, kwargs))
        return self._answers(refs, "its main routine", timeout_s)

    def rebuild(self, factory: ProgramFactory | WorkloadFactory) -> None:
        """Replace every GMI's program, in the same processes on the same slices; the old state is discarded.

        Raises:
            RuntimeError: a submitted request was not collected yet.
            GmiLostError, GmiSilentError: a GMI was lost. The session has ended.
            Exception: an error of building the program in a GMI. The session has ended.
        """
        self._raise_if_pending()
        refs = self._open().ask(lambda index, gmi: gmi.build.remote(factory))
        self._answers(refs, "building another program", BUILD_TIMEOUT_S)
        self._slowest_s = self._recent_s = 0.0

    def state_dict(self) -> StateDict:
        """The state after all submitted iterations.

        ``{"shared": state that all GMIs have in common, "local": [state of each GMI], "num_gmis": number of GMIs,
        "envs": environments of each GMI}``
        """
        states = self._states()
        return {
            "shared": states[self.plan.hosting("trainer")[0]]["shared"],
            "local": [state["local"] for state in states],
            "num_gmis": len(states),
            "envs": self.plan.envs,
        }

    def save_replays(self, folder: Path) -> dict[int, str]:
        """Write the replays of the GMIs that have one into a folder that all hosts see, each into one of its own.

        Returns:
            By GMI, why its replay could not be written; '' if it was.
        """
        found = self._ask(
            # Absolute: on a cluster GMIs have another working directory.
            lambda index, gmi: gmi.save_replay.remote(str(folder.absolute() / replay_name(index))),
            "saving its replay",
            range(self.plan.num_gmis),
        )
        return {index: reason for index, reason in enumerate(found) if reason is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; results of submitted requests are discarded.

        Without ``local``, or with other numbers of GMIs or environments, these are reset.
        """
        group = self._open()
        states = states_of_gmis(state, self.plan.envs)
        refs = group.ask(lambda index, gmi: gmi.load_state_dict.remote(states[index]))
        self._answers(refs, "loading a state", self._limit_s())
        self._pending.clear()

    def health(self) -> list[SliceHealth]:
        """Health and memory of each GMI's share of its GPU; empty without partitioned GPUs.

        Raises:
            PartitionError: a host does not respond.
        """
        self._open()
        return [] if self._partitioners is None else self._partitioners.health()

    def close(self) -> None:
        """Stop the GMIs, release the reservation, and shut Ray down if it was started here. Idempotent."""
        self._end("it was closed")

    def __exit__(self, *error: object) -> None:
        self.close()

    def _deployed(self, early: PlacementPlan | None, undo: ExitStack) -> Deployment:
        """Deploy the early plan, or one for the cluster: once more if others took its nodes after it was made."""
        plan = early or self._planned_on_cluster()
        try:
            return self._deployed_as_possible(plan, undo)
        except ReservationError as error:
            if early is not None or error.waited_s == 0:
                raise
            again = self._planned_on_cluster()
            if planned_node_ids(again) == planned_node_ids(plan):
                raise
            return self._deployed_as_possible(again, undo)

    def _deployed_as_possible(self, plan: PlacementPlan, undo: ExitStack) -> Deployment:
        """Deploy a plan and build its programs; without MPS if ``auto`` has chosen it and it fails."""
        try:
            return self._deployed_and_built(plan, undo)
        except (PartitionError, SliceError) as error:
            if self._spec.gmi.backend != "auto" or plan.backend != "mps":
                raise
            try:
                instead = plan.without_mps()
            except PlanError:
                raise error from None
            said = " ".join([str(error), *getattr(error, "__notes__", ())])
        self.log(
            f"With MPS it failed: {said} Since gmi.backend is auto, the run goes on with direct: "
            "GMIs share a GPU by turns, and nothing limits their memory there"
        )
        return self._deployed_and_built(self._announced(instead), undo)

    def _deployed_and_built(self, plan: PlacementPlan, undo: ExitStack) -> Deployment:
        """Deploy a plan, and build its programs; a failure undoes it, and leaves Ray."""
        # Imported here: it loads torch, which takes longer than to refuse a session.
        from rayagi.coordinator.deployment import deploy, join_and_build

        with ExitStack() as own:
            deployment = deploy(
                plan, task=self._spec.env.id, run=self._run_name, gmi=self._spec.gmi, undo=own
            )
            self._plan, self.workers = deployment.plan, deployment.workers
            self._partitioners = deployment.partitioners
            join_and_build(deployment.group, self._spec.gmi, self._program_factory())
            undo.push(own.pop_all())
        return deployment

    def _planned_on_cluster(self) -> PlacementPlan:
        # First recovers each node, else a GPU that a killed run has left looks as if somebody used it.
        machine = cluster_machine(START_TIMEOUT_S, recover_this_host)
        if self._spec.gmi.left_out:  # its numbers count GMIs by node, so the order of nodes has to stay
            return self._planned(machine)
        return self._announced(plan_beside_others(self._make_plan, machine))

    def _planned(self, machine: Machine) -> PlacementPlan:
        return self._announced(self._make_plan(machine))

    def _announced(self, plan: PlacementPlan) -> PlacementPlan:
        if self._on_plan is not None:
            self._on_plan(plan)
        return plan

    def _program_factory(self) -> ProgramFactory | WorkloadFactory:
        """The factory of each GMI's program; that of a training run exports its metrics through Ray."""
        if self._factory is not None:
            return self._factory
        # Imported here, as above.
        from rayagi.algorithms.factory import training_factory
        from rayagi.monitoring.exporting import exporting

        return partial(exporting, training_factory(self._spec), self._run_name)

    def _open(self) -> GmiGroup:
        if self._group is None:
            raise SessionClosedError(self._ended)
        return self._group

    def _raise_if_pending(self) -> None:
        if self._pending:
            raise RuntimeError(
                f"collect {counted(len(self._pending), 'submitted request')} first; use collect()"
            )

    def _limit_s(self) -> float:
        """Time limit of a request that queues behind the pending iterations."""
        return ITERATION_TIMEOUT_S + self._pending_limit_s()

    def _answers(
        self, refs: list[Any], asked: str, limit_s: float, of: Sequence[int] | None = None
    ) -> list[Any]:
        group = self._open()
        with self._closing_on_error(asked):
            raise_if_lost()  # GMIs may still answer, until Ray ends this process
            return group.answers(refs, asked, limit_s, of, self._raise_if_lost)

    def _ask(self, question: Callable[[int, Any], Any], asked: str, of: Sequence[int]) -> list[Any]:
        """Call some GMIs after all submitted iterations; returns the results in order."""
        return self._answers(self._open().ask(question, of), asked, self._limit_s(), of)

    def _states(self) -> list[StateDict]:
        """State of every GMI; only the first one with a trainer includes the shared part."""
        trainer = self.plan.hosting("trainer")[0]
        return self._ask(
            lambda index, gmi: gmi.state_dict.remote(shared=index == trainer),
            "its state",
            range(self.plan.num_gmis),
        )

    @contextmanager
    def _closing_on_error(self, asked: str) -> Iterator[None]:
        """End the session on any exception. If Ray was lost or a share has failed, raise that instead of its consequence."""
        try:
            with named_loss():
                yield
        except Exception as error:
            if isinstance(error, GmiLostError) and (grown := self._grown_memory()):
                error.add_note(grown)
            try:
                if not isinstance(error, SliceLostError | RayLostError):
                    self._raise_if_slices_lost()
            except SliceLostError as lost:
                raise lost from error
            finally:
                self._end(f"{type(error).__name__} in {asked}")
            raise

    def _grown_memory(self) -> str:
        """The memory of the GMIs, as a sentence, if that of one has grown by more than half: the lost one may be another."""
        held = sorted(
            zip(_bytes_held(self.collected, -1), self._first_bytes, range(len(self.collected)), strict=False),
            reverse=True,
        )
        if not any(last > GROWN * first for last, first, _ in held):
            return ""
        sizes = (
            f"GMI {index} {last / 2**20:,.0f} MiB ({first / 2**20:,.0f} at first)"
            for last, first, index in held[:MOST_SIZES]
        )
        return (
            f"Resident memory before that: {', '.join(sizes)}. Where it grows without end, an environment keeps what it "
            "should free, and fewer environments only delay the end."
        )

    def _update_worker(self, index: int, worker: WorkerInfo) -> None:
        """Record the new process of a restarted GMI."""
        self.workers = tuple(worker if place == index else kept for place, kept in enumerate(self.workers))
        self._open().pings.add(index, worker.ping_address)
        if self._partitioners is not None:
            self._partitioners.update_pid(index, worker.pid)

    def _raise_if_lost(self) -> None:
        """Raise RayLostError if Ray was lost, SliceLostError if a share of a GPU has failed."""
        raise_if_lost()
        self._raise_if_slices_lost()

    def _raise_if_slices_lost(self) -> None:
        """Raise SliceLostError if a share of a GPU has failed.

        A host that does not respond is ignored: the caller's wait has its own time limit.
        """
        if self._partitioners is None:
            return
        with suppress(PartitionError):
            lost = {
                f"GMI {index} {self.plan.slices[index].label()}": health.text
                for index, health in enumerate(self._partitioners.health())
                if health.state == "lost"
            }
            if lost:
                raise SliceLostError(tuple(lost), "; ".join(dict.fromkeys(lost.values())))

    def _end(self, reason: str) -> None:
        leave_if_lost()  # or what follows would wait for it
        self._ended = self._ended or reason
        _open_sessions.discard(self._token)
        self._group = self._partitioners = None
        self._pending.clear()
        self._undo.close()


@contextmanager
def _noting_open_sessions() -> Iterator[None]:
    """Say that other sessions of this program hold resources: in a notebook, those of earlier cells."""
    try:
        yield
    except ReservationError as error:
        if _open_sessions:
            others = counted(len(_open_sessions), "other session")
            error.add_note(
                f"This program has {others} open: algo.stop() or session.close() frees what it holds."
            )
        raise


def _bytes_held(collected: Sequence[Sequence[IterationResult]], which: int) -> list[float]:
    """Resident memory of each GMI after the first or last iteration of a request; 0: not reported."""
    return [results[which].metrics.get("resident_bytes", 0.0) for results in collected]


def split_evenly(total: int, among: Sequence[int]) -> dict[int, int]:
    """Divide ``total`` evenly; the first GMIs get the remainder, and those with zero are left out."""
    counts = {index: total // len(among) + (place < total % len(among)) for place, index in enumerate(among)}
    return {index: count for index, count in counts.items() if count}
