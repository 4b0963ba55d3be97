"""Dataflow topology of separate collectors and learners: routes, channel slots, and samples per update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from actors.gmi import GmiIdentity
from collectives.communicator import Communicator
from placement.role_layout import OVERLAPPED_TEMPLATES, served_simulators
from rayagi.algorithms.role_assignment import RoleAssignment
from rayagi.config.learning import AsynchronousSpec
from rayagi.config.spec import RunSpec

EXPERIENCE_CHANNEL = "experience"
"""Name of the channel set between collectors and learners."""
POLL_TIMEOUT_S = 0.5
"""Longest wait of a free-running GMI before ``iterate`` returns an empty result, so that it can serve other calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataflowTopology:
    """Collectors and learners of a run, each counted from 0, and how rollouts flow between them."""

    collectors: tuple[int, ...]
    """Indices of the GMIs with an agent."""
    learners: tuple[int, ...]
    """Indices of the GMIs with a trainer."""
    envs: tuple[int, ...]
    """Environments of each collector: its own, or those of the simulators that it acts for (dp_mp)."""
    lockstep: bool
    """Whether an update takes one rollout of every collector: synchronous templates, and ``on_stale = "wait"``."""
    free_running: bool
    """Whether GMIs iterate independently and return when they would block: ``decoupled``."""
    slots: int
    """Outstanding rollouts per collector, including the one being filled."""
    max_lag: int | None
    """Largest policy lag of experience that is trained on, in updates; None: no bound."""
    rollouts_per_update: int

    @classmethod
    def for_gmi(cls, spec: RunSpec, identity: GmiIdentity) -> Self:
        """The topology of the run of this GMI."""
        collectors, assignment = identity.hosting("agent"), RoleAssignment.for_gmi(identity, spec.gmi)
        learning, free_running = spec.learning, spec.gmi.template in OVERLAPPED_TEMPLATES
        bound, stale, rollouts = 0, "wait", None
        if isinstance(learning, AsynchronousSpec) and free_running:
            bound, stale, rollouts = learning.max_lag, learning.on_stale, learning.rollouts_per_update
        lockstep = stale == "wait" or bound == 0
        per_update = rollouts or len(collectors)
        return cls(
            collectors=collectors,
            learners=identity.hosting("trainer"),
            envs=tuple(assignment.envs_per_gmi(index) for index in collectors),
            lockstep=lockstep,
            free_running=free_running,
            slots=bound + 1 if lockstep else _slots(bound, per_update, len(collectors)),
            max_lag=None if stale == "correct" and not lockstep else bound,
            rollouts_per_update=per_update,
        )

    def served_simulators(self, learner: int) -> range:
        """Collectors that take parameters from a learner and, in lockstep, send their rollouts to it."""
        return served_simulators(learner, len(self.learners), len(self.collectors))

    def learner_of(self, collector: int) -> int:
        """The learner of a collector: the inverse of ``served_simulators``."""
        return next(
            index for index in range(len(self.learners)) if collector in self.served_simulators(index)
        )

    def producer_of(self, collector: int) -> int:
        """Producer number of a collector. Modulo the number of learners it is its learner: the Migrator's routing rule."""
        learner = self.learner_of(collector)
        return (collector - self.served_simulators(learner).start) * len(self.learners) + learner

    def rows(self, learner: int) -> int:
        """Rows (environments) that a learner trains on per update: its collectors', or its share of all."""
        if self.lockstep:
            return sum(self.envs[collector] for collector in self.served_simulators(learner))
        total = self.rollouts_per_update * sum(self.envs) // len(self.collectors)
        return total // len(self.learners) + (learner < total % len(self.learners))

    @property
    def total_rows(self) -> int:
        """Rows per update of all learners."""
        return sum(map(self.rows, range(len(self.learners))))

    def first_env(self, collector: int) -> int:
        """Global index of a collector's first environment; for the number of collectors, the total."""
        return sum(self.envs[:collector])

    def learner_group(self, communicator: Communicator) -> Communicator | None:
        """The communicator that reduces gradients: the given one if only learners share it, else a subgroup of it.

        Collective: every GMI calls it. None for GMIs that are not learners.
        """
        return communicator if self.free_running else communicator.group(self.learners)


def _slots(bound: int, per_update: int, collectors: int) -> int:
    """Slots of a collector at its own pace: what ``bound`` updates take, so that one that is an update late is within it.

    At least one more than an update takes: it collects while the learner learns.
    """
    return max(per_update // collectors + 1, bound * per_update // collectors)
