"""Kinds of GMIs: which roles each GMI of a template hosts, how many there are of each kind, and who shares with whom.

GMI-DRL §3.1.1, Figures 5 and 6: *collectors* (simulator and agent), *learners* (trainer, with the agent in e_at),
*simulators*, *agents*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement.errors import PlanError, counted
from placement.templates import ASYNCHRONOUS, SERVING, SYNCHRONOUS
from placement.unequal_slices import env_counts

Roles = tuple[str, ...]

TRAINING_WORKER_TYPES: dict[str, tuple[Roles, ...]] = {
    template.name: template.gmis for template in (*SYNCHRONOUS, *ASYNCHRONOUS)
} | {"program": (("program",),)}
"""Roles of each kind of GMI; the kind with the simulator first. program: a workload of the user's own (rayagi.programs),
without environments."""

SERVING_WORKER_TYPES: dict[str, tuple[Roles, ...]] = {template.name: template.gmis for template in SERVING}
"""The same of the templates that serve: they act and do not train."""

OVERLAPPED_TEMPLATES = {template.name for template in ASYNCHRONOUS}
"""Templates whose kinds work at the same time; in the others, one waits while the other works."""


def worker_type_name(roles: Roles) -> str:
    """What a GMI of these roles is called."""
    names = {("simulator", "agent"): "collector", ("simulator",): "simulator", ("agent",): "agent"}
    return names.get(roles, "learner" if "trainer" in roles and "simulator" not in roles else "GMI")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleLayout:
    """The kinds of GMIs of one template, and how many there are of those without a simulator."""

    worker_types: tuple[Roles, ...]
    """Of each kind, the one with the simulator first."""
    other_counts: tuple[int, ...]
    """GMIs of each kind but the first; of pairs, one for each simulator."""
    paired: bool = False
    """Whether each GMI of the second kind serves one of the first: serving with dp_mp."""
    overlapped: bool = False
    """Whether the kinds work at the same time; else one waits while the other works."""

    @property
    def roles(self) -> Roles:
        """Every role of the template."""
        return tuple(role for roles in self.worker_types for role in roles)

    @property
    def min_gmis(self) -> int:
        """The fewest GMIs that work."""
        return max(self.other_counts, default=1) + sum(self.other_counts)

    def usable_gmis(self, most: int) -> int:
        """As many GMIs as can be used of ``most``."""
        return most - most % 2 if self.paired else most

    def counts_for_simulators(self, number: int) -> tuple[int, ...]:
        """GMIs of each kind, with so many of those with a simulator.

        Raises:
            PlanError: there are more of another kind.
        """
        most = max(self.other_counts, default=0)
        if number < most and not self.paired:
            roles = self.worker_types[1 + self.other_counts.index(most)]
            host = worker_type_name(self.worker_types[0])
            raise PlanError(
                f"{counted(most, worker_type_name(roles))} beside {counted(number, host)}",
                f"each needs a {host} to work for",
                f"Ask for fewer {worker_type_name(roles)}s, or for more GMIs",
            )
        return (number, *((number,) if self.paired else self.other_counts))

    def counts(self, num_gmis: int) -> tuple[int, ...]:
        """GMIs of each kind, of so many in all.

        Raises:
            PlanError: they are too few, or do not make pairs.
        """
        if self.paired and (num_gmis % 2 or not num_gmis):
            raise PlanError(
                f"num_gmis={num_gmis}",
                "dp_mp serves by pairs of a simulator and an agent",
                "Give an even number",
            )
        if num_gmis < self.min_gmis:
            wanted = [
                counted(number, worker_type_name(roles))
                for roles, number in zip(
                    self.worker_types,
                    (self.min_gmis - sum(self.other_counts), *self.other_counts),
                    strict=True,
                )
            ]
            raise PlanError(
                f"{counted(num_gmis, 'GMI')}",
                f"the template needs {' and '.join(wanted)}",
                f"Set num_gmis to {self.min_gmis} or more",
            )
        return self.counts_for_simulators(num_gmis // 2 if self.paired else num_gmis - sum(self.other_counts))

    def assign_roles(self, num_gmis: int) -> list[Roles]:
        """Roles of each of so many GMIs with slices of their own: kind by kind; pairs are neighbours."""
        counts = self.counts(num_gmis)
        if self.paired:
            return list(self.worker_types) * counts[0]
        return [roles for roles, number in zip(self.worker_types, counts, strict=True) for _ in range(number)]


def make_role_layout(
    template: str, *, serving: bool = False, num_agents: int | None = None, num_learners: int | None = None
) -> RoleLayout:
    """The kinds of GMIs of a template.

    Args:
        template: its name
        serving: whether the GMIs act without training
        num_agents: GMIs with an agent alone; None: 1
        num_learners: GMIs with a trainer and no simulator; None: 1

    Raises:
        PlanError: there is no such template for that work, or a number was given of a kind that it does not have.
    """
    known = SERVING_WORKER_TYPES if serving else TRAINING_WORKER_TYPES
    if template not in known:
        work = "for serving " if serving else ""
        raise PlanError(
            f"template={template!r}", f"the templates {work}are {', '.join(known)}", "Use one of them"
        )
    worker_types = known[template]
    paired = serving and template == "dp_mp"
    learners = [roles for roles in worker_types[1:] if "trainer" in roles]
    agents = [roles for roles in worker_types[1:] if roles == ("agent",) and not paired]
    for name, value, having in (("num_agents", num_agents, agents), ("num_learners", num_learners, learners)):
        if value is not None and not having:
            texts = " and ".join("+".join(roles) for roles in worker_types)
            raise PlanError(
                f"{name}={value}",
                f"the GMIs of {template} are {texts}{', in pairs' * paired}",
                f"Leave {name} out",
            )
    others = tuple((num_learners if roles in learners else num_agents) or 1 for roles in worker_types[1:])
    return RoleLayout(
        worker_types=worker_types,
        other_counts=others,
        paired=paired,
        overlapped=template in OVERLAPPED_TEMPLATES,
    )


def served_simulators(index: int, number: int, num_simulators: int) -> range:
    """Which of the GMIs with a simulator the GMI ``index`` of ``number`` of another kind works for: an even run of them."""
    return range(-(-index * num_simulators // number), -(-(index + 1) * num_simulators // number))


def envs_per_gmi(
    worker_types: Sequence[Roles], num_envs: int, sizes: Sequence[float] = ()
) -> tuple[int, ...]:
    """Environments of each GMI: ``num_envs`` of each with a simulator, or by their sizes; 0 of the others.

    Args:
        kinds: roles of each GMI
        num_envs: environments of one GMI with a simulator; the mean where they are unequal
        sizes: of all GMIs; empty: they are equal
    """
    hosts = [index for index, roles in enumerate(worker_types) if "simulator" in roles]
    counts = env_counts(num_envs, len(hosts), [sizes[index] for index in hosts] if sizes else ())
    envs = dict(zip(hosts, counts, strict=True))
    return tuple(envs.get(index, 0) for index in range(len(worker_types)))
