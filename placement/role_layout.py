"""Role layout: the worker types of a template, the number of GMIs of each type, and the simulators that each serves.

Worker types of GMI-DRL §3.1.1, Figures 5 and 6: *collectors* (simulator and agent), *learners* (trainer, with the agent in
e_at), *simulators*, *agents*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement.errors import PlanError, counted
from placement.unequal_slices import env_counts

Roles = tuple[str, ...]

TRAINING_WORKER_TYPES: dict[str, tuple[Roles, ...]] = {
    "dp_only": (("simulator", "agent", "trainer"),),
    "dp_mp": (("simulator",), ("agent",), ("trainer",)),
    "e_at": (("simulator",), ("agent", "trainer")),
    "ea_t": (("simulator", "agent"), ("trainer",)),
    "decoupled": (("simulator", "agent"), ("trainer",)),
    "offline": (("replay", "agent", "trainer"),),
    "program": (("program",),),
}
"""Template -> roles of each worker type, the type with the simulator first (Figure 6). Two simulate
nothing: ``offline`` learns from recorded data, of which each GMI holds a shard; ``program`` is a user's own workload
(rayagi.programs)."""

SERVING_WORKER_TYPES: dict[str, tuple[Roles, ...]] = {
    "dp_mp": (("simulator",), ("agent",)),
    "mp_dp": (("simulator",), ("agent",)),
    "dp_only": (("simulator", "agent"),),
}
"""The same for the serving templates, which act and do not train (Figure 5). dp_mp: each simulator has its own agent in
another GMI. mp_dp: simulators share agents."""

MOST_SENDERS = 256
"""MAX_PRODUCERS of collectives.experience.file_layout: GMIs that send rollouts to a trainer, or steps to an agent."""

OVERLAPPED_TEMPLATES = {"decoupled"}
"""Templates whose worker types work at the same time. In the others they alternate."""


def gmis_hosting(role: str, worker_types: Sequence[Roles]) -> tuple[int, ...]:
    """Indices of the GMIs that host a role. ``worker_types``: the roles of each GMI."""
    return tuple(index for index, roles in enumerate(worker_types) if role in roles)


def worker_type_name(roles: Roles) -> str:
    """Name of the worker type with these roles, for messages."""
    names = {("simulator", "agent"): "collector", ("simulator",): "simulator", ("agent",): "agent"}
    return names.get(roles, "learner" if "trainer" in roles and "simulator" not in roles else "GMI")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleLayout:
    """The worker types of one template, and the number of GMIs of those without a simulator."""

    worker_types: tuple[Roles, ...]
    """Roles of each worker type, the type with the simulator first."""
    other_counts: tuple[int, ...]
    """GMIs of each type but the first; with ``paired``, one per simulator."""
    paired: bool = False
    """Whether each GMI of the second type serves one of the first: serving with dp_mp."""
    overlapped: bool = False
    """Whether the types work at the same time. Otherwise they alternate."""

    @property
    def roles(self) -> Roles:
        """Every role of the template."""
        return tuple(role for roles in self.worker_types for role in roles)

    @property
    def min_gmis(self) -> int:
        """The smallest number of GMIs that this layout can run with."""
        return max(self.other_counts, default=1) + sum(self.other_counts)

    def usable_gmis(self, most: int) -> int:
        """The largest usable number of GMIs up to ``most``: an even number with ``paired``."""
        return most - most % 2 if self.paired else most

    def counts_for_simulators(self, number: int) -> tuple[int, ...]:
        """GMIs of each type, given the ``number`` of GMIs with a simulator.

        Raises:
            PlanError: another type has more GMIs.
        """
        most = max(self.other_counts, default=0)
        if number < most and not self.paired:
            roles = self.worker_types[1 + self.other_counts.index(most)]
            host = worker_type_name(self.worker_types[0])
            raise PlanError(
                f"{counted(most, worker_type_name(roles))} with {counted(number, host)}",
                f"each needs a {host} to work for",
                f"Ask for fewer {worker_type_name(roles)}s, or for more GMIs",
            )
        return (number, *((number,) if self.paired else self.other_counts))

    def counts(self, num_gmis: int) -> tuple[int, ...]:
        """GMIs of each type, given the total ``num_gmis``.

        Raises:
            PlanError: there are too few GMIs, or an odd number with ``paired``.
        """
        if self.paired and (num_gmis % 2 or not num_gmis):
            raise PlanError(
                f"num_gmis={num_gmis}",
                "dp_mp serves with pairs of a simulator and an agent",
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
        """Roles of each of ``num_gmis`` GMIs: type by type; pairs are adjacent."""
        counts = self.counts(num_gmis)
        if self.paired:
            return list(self.worker_types) * counts[0]
        return [roles for roles, number in zip(self.worker_types, counts, strict=True) for _ in range(number)]


def make_role_layout(
    template: str, *, serving: bool = False, num_agents: int | None = None, num_learners: int | None = None
) -> RoleLayout:
    """Build the role layout of a template.

    Args:
        template: its name
        serving: whether the GMIs act without training
        num_agents: GMIs that host an agent only; None: 1
        num_learners: GMIs with a trainer and no simulator; None: 1

    Raises:
        PlanError: the template is unknown, or it has no worker type for a given number.
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
    """The simulators that GMI ``index`` of ``number`` GMIs of another type serves: a contiguous range of even size."""
    # [ceil(index * s / n), ceil((index + 1) * s / n)) with s simulators and n = number
    return range(-(-index * num_simulators // number), -(-(index + 1) * num_simulators // number))


def envs_per_gmi(
    worker_types: Sequence[Roles], num_envs: int, sizes: Sequence[float] = ()
) -> tuple[int, ...]:
    """Environments of each GMI: ``num_envs`` per GMI with a simulator, or in proportion to its size; 0 for the others.

    Args:
        worker_types: roles of each GMI
        num_envs: environments of one GMI with a simulator; the mean if sizes are given
        sizes: relative size of each GMI; empty: all are equal
    """
    hosts = [index for index, roles in enumerate(worker_types) if "simulator" in roles]
    counts = env_counts(num_envs, len(hosts), [sizes[index] for index in hosts] if sizes else ())
    envs = dict(zip(hosts, counts, strict=True))
    return tuple(envs.get(index, 0) for index in range(len(worker_types)))
