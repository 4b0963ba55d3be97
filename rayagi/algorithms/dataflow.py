"""How experience flows where collectors and learners are apart: who sends to whom, and how much an update takes."""

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
"""How long a GMI that is asked on its own waits for another before it comes back with nothing, so that it can be asked
something else."""
MAX_SLOTS = 3
"""Rollouts that a collector may have under way: one is filled, one learned from, one between them evens out their paces.
More would only be older when their turn comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataflowTopology:
    """Between the collectors and the learners of a run, each counted from 0."""

    collectors: tuple[int, ...]
    """Indices of the GMIs with an agent."""
    learners: tuple[int, ...]
    """Indices of the GMIs with a trainer."""
    envs: tuple[int, ...]
    """Environments of each collector: its own, or of the GMIs whose simulators it acts for (dp_mp)."""
    lockstep: bool
    """Whether an update takes one rollout of every collector: the synchronous templates, and those that wait."""
    free_running: bool
    """Whether GMIs are asked one by one, and come back when they would wait: ``decoupled``."""
    slots: int
    """Rollouts that a collector may have under way, the one that it is filling included."""
    max_lag: int | None
    """Updates that experience may be behind to be learned from; None: whatever its age."""
    rollouts_per_update: int

    @classmethod
    def for_gmi(cls, spec: RunSpec, identity: GmiIdentity) -> Self:
        """That of the run that a GMI belongs to."""
        collectors, assignment = identity.hosting("agent"), RoleAssignment.for_gmi(identity, spec.gmi)
        learning, free_running = spec.learning, spec.gmi.template in OVERLAPPED_TEMPLATES
        bound, stale, rollouts = 0, "wait", None
        if isinstance(learning, AsynchronousSpec) and free_running:
            bound, stale, rollouts = learning.max_lag, learning.on_stale, learning.rollouts_per_update
        lockstep = stale == "wait" or bound == 0
        return cls(
            collectors=collectors,
            learners=identity.hosting("trainer"),
            envs=tuple(assignment.envs_per_gmi(index) for index in collectors),
            lockstep=lockstep,
            free_running=free_running,
            slots=min(bound + 1, MAX_SLOTS) if lockstep else MAX_SLOTS,
            max_lag=None if stale == "correct" and not lockstep else bound,
            rollouts_per_update=rollouts or len(collectors),
        )

    def served_simulators(self, learner: int) -> range:
        """Collectors whose parameters come from a learner and, in step, whose rollouts go there."""
        return served_simulators(learner, len(self.learners), len(self.collectors))

    def learner_of(self, collector: int) -> int:
        """The inverse."""
        return next(
            index for index in range(len(self.learners)) if collector in self.served_simulators(index)
        )

    def producer_of(self, collector: int) -> int:
        """Its number in the channels: modulo the number of learners, that of its learner, as a Migrator routes."""
        learner = self.learner_of(collector)
        return (collector - self.served_simulators(learner).start) * len(self.learners) + learner

    def rows(self, learner: int) -> int:
        """Environments whose steps a learner takes in an update: of its collectors, or its share of what an update takes."""
        if self.lockstep:
            return sum(self.envs[collector] for collector in self.served_simulators(learner))
        total = self.rollouts_per_update * sum(self.envs) // len(self.collectors)
        return total // len(self.learners) + (learner < total % len(self.learners))

    @property
    def total_rows(self) -> int:
        """Of all learners."""
        return sum(map(self.rows, range(len(self.learners))))

    def first_env(self, collector: int) -> int:
        """Environments before a collector's own; at the end, how many there are."""
        return sum(self.envs[:collector])

    def learner_group(self, communicator: Communicator) -> Communicator | None:
        """The group that reduces gradients: what learners alone were given, or one within that of all GMIs.

        Every GMI calls it; None for those that are not in it.
        """
        return communicator if self.free_running else communicator.group(self.learners)
