"""Placement plan: the slice, node and roles of every GMI, with the reason. A pure function of machine and request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import fsum
from typing import Any, Literal, NamedTuple

from placement.backend_choice import UnusedGpu, choose_backend, without_gpus
from placement.backends import Backend, get_backend
from placement.backends.base import SliceLimits
from placement.colocation import colocate_on_cores
from placement.equal_slices import equal_core_slices, equal_gpu_slices, gpu_fractions, max_gmis_on_cores
from placement.errors import PlanError, counted
from placement.role_layout import (
    MOST_SENDERS,
    OVERLAPPED_TEMPLATES,
    RoleLayout,
    Roles,
    envs_per_gmi,
    gmis_hosting,
    make_role_layout,
    worker_type_name,
)
from placement.text import aligned
from placement.types import BackendName, Machine, Slice
from placement.unequal_slices import (
    reject_conflicting_counts,
    unequal_core_slices,
    unequal_gpu_slices,
    without,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementPlan:
    """Assignment of GMIs to slices. GMI ``i`` runs on ``slices[i]``; equal slices are ordered by node."""

    template: str
    backend: BackendName
    slices: tuple[Slice, ...]
    worker_types: tuple[Roles, ...]
    """Roles of each GMI."""
    num_envs: int
    """Environments of one GMI with a simulator; the mean if GMIs are unequal."""
    envs: tuple[int, ...]
    """Environments of each GMI; 0 for those without a simulator."""
    reason: str
    """Why this backend and these numbers, as a sentence."""
    machine: Machine
    sizes: tuple[float, ...] = ()
    """Requested sizes of unequal GMIs: cores, or shares of a GPU. Empty: GMIs are equal."""
    left_out: tuple[Slice, ...] = ()
    """Slices of the GMIs that were left out. No GMI of the plan uses them."""
    unused: tuple[UnusedGpu, ...] = ()
    """GPUs of the machine that cannot be used. No GMI of the plan may be given one."""

    @property
    def num_gmis(self) -> int:
        """Total number of GMIs."""
        return len(self.slices)

    def roles_of(self, index: int) -> Roles:
        """Roles of one GMI."""
        return self.worker_types[index]

    def hosting(self, role: str) -> tuple[int, ...]:
        """Indices of the GMIs that host a role."""
        return gmis_hosting(role, self.worker_types)

    @property
    def group(self) -> tuple[int, ...] | None:
        """GMIs of the collective group; None: all. Overlapped templates: the learners only, since collectors may be lost."""
        return self.hosting("trainer") if self.template in OVERLAPPED_TEMPLATES else None

    def without_mps(self) -> PlacementPlan:
        """The same GMIs on the same fractions of GPUs, which they share by the driver's time slicing (``direct``).

        Raises:
            PlanError: a GPU admits only one process without MPS, and has several GMIs.
        """
        direct = get_backend("direct")
        slices = [replace(each, backend=direct.name, environment={}) for each in self.slices]
        predict_limits(self.machine, slices)
        return replace(
            self,
            backend=direct.name,
            slices=tuple(replace(each, environment=direct.environment(each)) for each in slices),
            reason=f"{self.reason}; direct instead, since mps failed",
        )

    def memory_bytes(self, index: int) -> int:
        """Memory for GMI ``index``: its limit on the GPU if it has one, else an even share of the GPU or node."""
        gmi_slice = self.slices[index]
        node = self.machine.node(gmi_slice.node)
        for gpu in node.gpus:
            if gpu.uuid == gmi_slice.gpu_uuid:
                limit = self._limits(gmi_slice).memory_bytes
                if limit is not None:
                    return limit
                here = (each for each in self.slices if each.gpu_uuid == gpu.uuid)
                return gpu.share_bytes(gmi_slice.gpu_fraction, fsum(each.gpu_fraction for each in here))
        return node.memory_total_bytes // sum(other.node == gmi_slice.node for other in self.slices)

    def _limits(self, gmi_slice: Slice) -> SliceLimits:
        """The limits of the allocated share; before partitioning, the predicted ones."""
        if gmi_slice.share is not None:
            return get_backend(gmi_slice.backend).limits(gmi_slice)
        same_gpu = [
            other
            for other in self.slices
            if (other.node, other.gpu_uuid) == (gmi_slice.node, gmi_slice.gpu_uuid)
        ]
        return predict_limits(self.machine, same_gpu)[same_gpu.index(gmi_slice)]

    def bundles(self) -> list[dict[str, float]]:
        """Ray bundles: one per GMI, in slice order."""
        return [bundle_of(gmi_slice) for gmi_slice in self.slices]

    def bundle_order(self) -> list[int]:
        """GMIs in the order in which Ray has to reserve their bundles: those of one GPU one after the other.

        Ray places each bundle on a used GPU if it fits there, else on a free one. In this order the GMIs of a GPU open at
        most one free GPU, which has room for all of them, so every plan fits. In another order it may not: of
        0.4 + 0.4 + 0.6 + 0.6 on two GPUs, the first two would take one GPU.
        """
        places = [(each.node, each.gpu_uuid or f"no GPU, {index}") for index, each in enumerate(self.slices)]
        first = {place: index for index, place in reversed(list(enumerate(places)))}
        return sorted(range(self.num_gmis), key=lambda index: first[places[index]])

    def strategy(self) -> Literal["STRICT_PACK", "PACK"]:
        """Ray placement strategy: one node if the plan has one, else as few nodes as possible."""
        return "STRICT_PACK" if len({gmi_slice.node for gmi_slice in self.slices}) == 1 else "PACK"

    def table(self) -> str:
        """The plan as aligned plain text: one line per GMI, then the reason, then one line per GPU that cannot be used."""
        head = ("GMI", "node", "slice", "roles", "envs", "threads", "memory")
        lines = aligned([head, *(self._row(index) for index in range(self.num_gmis))])
        summary = counted(self.num_gmis, "GMI")
        if self.hosting("simulator"):
            summary += f", {counted(sum(self.envs), 'environment')}"
        lines.append(f"{self.template} on {self.backend}: {summary}. {self.reason}.")
        lines += [gpu.text() for gpu in self.unused]
        return "\n".join(lines)

    def _row(self, index: int) -> tuple[str, ...]:
        gmi_slice = self.slices[index]
        memory = f"{self.memory_bytes(index) / 2**30:.1f} GiB"
        roles = "+".join(self.roles_of(index))
        return (
            str(index),
            gmi_slice.node,
            gmi_slice.label(),
            roles,
            str(self.envs[index]) if "simulator" in self.roles_of(index) else "-",
            str(gmi_slice.num_threads),
            memory,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values, for a run folder."""
        return asdict(self) | {"bundles": self.bundles()}


def bundle_of(gmi_slice: Slice) -> dict[str, float]:
    """The Ray bundle of one slice."""
    bundle = {"CPU": float(gmi_slice.num_threads) if gmi_slice.num_cpus is None else gmi_slice.num_cpus}
    return bundle | {"GPU": gmi_slice.gpu_fraction} if gmi_slice.gpu_uuid is not None else bundle


def make_plan(
    machine: Machine,
    *,
    backend: str = "auto",
    template: str = "dp_only",
    serving: bool = False,
    num_gmis: int | None = None,
    gmis_per_gpu: int | None = None,
    num_agents: int | None = None,
    num_learners: int | None = None,
    num_envs: int,
    threads_per_gmi: int | None = None,
    sizes: Sequence[float] | None = None,
    left_out: Sequence[int] = (),
) -> PlacementPlan:
    """Partition ``machine`` into GMIs. Deterministic.

    Args:
        machine: inventory of the nodes
        backend: ``cpu``, ``direct``, ``mps``, ``mig``, ``green``, or ``auto`` (see ``choose_backend``)
        template: which roles share a GMI
        serving: whether the GMIs act without training: dp_mp then has pairs of a simulator and an agent
        num_gmis: GMIs in total. None on ``cpu``: one simulator per core (at most 8), the other types colocated on their
            cores. None on GPUs: every share of every GPU. With too few cores, GMIs without a simulator share cores
        gmis_per_gpu: GMIs on one GPU; None: 1, or what the template needs. GPUs are filled in order
        num_agents: number of GMIs that host an agent only; None: 1
        num_learners: number of GMIs with a trainer and no simulator; None: 1
        num_envs: environments of one GMI with a simulator
        threads_per_gmi: cores of one GMI; None: the node's cores divided evenly
        sizes: of unequal GMIs: cores on ``cpu``, shares of a GPU elsewhere. Their number is the number of GMIs
        left_out: GMIs of this plan that are not started, by index. The others keep their slices and environments

    Raises:
        PlanError: the request does not fit; the message says what does.
    """
    numbers = {
        "num_gmis": num_gmis,
        "gmis_per_gpu": gmis_per_gpu,
        "num_envs": num_envs,
        "threads_per_gmi": threads_per_gmi,
        "num_agents": num_agents,
        "num_learners": num_learners,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise PlanError(f"{name}={value}", "at least 1 is needed", f"Set {name} to 1 or more")
    layout = make_role_layout(template, serving=serving, num_agents=num_agents, num_learners=num_learners)
    request = _Request(num_gmis, gmis_per_gpu, threads_per_gmi, tuple(sizes or ()))
    choice = _choose(machine, backend, layout, request)
    divide = _in_sizes if request.sizes else _on_gpus if choice.backend.divides_gpus else _on_cores
    slices, worker_types, how = divide(choice, layout, request)
    _refuse_many_senders(worker_types)
    plan = PlacementPlan(
        template=template,
        backend=choice.backend.name,
        slices=tuple(replace(each, environment=choice.backend.environment(each)) for each in slices),
        worker_types=tuple(worker_types),
        num_envs=num_envs,
        envs=envs_per_gmi(worker_types, num_envs, request.sizes),
        reason=f"{choice.reason}; {how}",
        machine=machine,
        sizes=request.sizes,
        unused=choice.unused,
    )
    if left_out:
        plan = _leave_out(plan, left_out)
    # Raises PlanError for an impossible partition before anything starts.
    predict_limits(machine, plan.slices)
    return plan


class _Request(NamedTuple):
    """How the machine is to be divided, as for ``make_plan``. Empty ``sizes``: equal GMIs."""

    num_gmis: int | None
    gmis_per_gpu: int | None
    threads_per_gmi: int | None
    sizes: tuple[float, ...]

    def shares(self, layout: RoleLayout, num_gpus: int) -> int:
        """GMIs on one GPU: as asked, or enough for the template. With sizes it only matters whether GMIs share GPUs."""
        if self.sizes:
            return 2 if min(self.sizes) < 1 else 1
        return self.gmis_per_gpu or -(-layout.min_gmis // max(1, num_gpus))


class _Choice(NamedTuple):
    """The backend with the reason for it, and what it divides: the machine without the GPUs that it cannot use.

    Equal GMIs are ``shares`` on one GPU; ``fractions``: UUID of each GPU -> fractions of it for them.
    """

    backend: Backend
    reason: str
    machine: Machine
    unused: tuple[UnusedGpu, ...]
    shares: int
    fractions: Mapping[str, Sequence[float]]


_Division = tuple[Sequence[Slice], Sequence[Roles], str]
"""Slice and roles of each GMI, and the reason for their number and sizes as a clause."""


def _choose(machine: Machine, backend: str, layout: RoleLayout, request: _Request) -> _Choice:
    """Leave out GPUs until the chosen backend can divide all that are left."""
    unused: list[UnusedGpu] = []
    while True:
        # Counted anew each time: fewer GPUs need more shares each for the template's GMIs.
        shares = request.shares(layout, machine.num_gpus)
        name, reason, refused = choose_backend(machine, backend, roles=layout.roles, gmis_per_gpu=shares)
        chosen, fractions = get_backend(name), dict[str, tuple[float, ...]]()
        if not refused and not request.sizes and chosen.divides_gpus:
            fractions, refused = gpu_fractions(machine, name, shares, request.gmis_per_gpu, request.num_gmis)
        if not refused:
            return _Choice(chosen, reason, machine, tuple(unused), shares, fractions)
        unused += refused
        machine = without_gpus(machine, refused)


def _in_sizes(choice: _Choice, layout: RoleLayout, request: _Request) -> _Division:
    """Unequal GMIs, of cores or of GPUs."""
    on_gpus, threads = choice.backend.divides_gpus, request.threads_per_gmi
    numbers = {"num_gmis": request.num_gmis, "gmis_per_gpu": request.gmis_per_gpu}
    # On cores, the sizes are the threads.
    reject_conflicting_counts(
        numbers if on_gpus else numbers | {"threads_per_gmi": threads}, len(request.sizes)
    )
    if on_gpus:
        slices, how = unequal_gpu_slices(choice.machine, choice.backend.name, request.sizes, threads)
    else:
        slices, how = unequal_core_slices(choice.machine, request.sizes)
    return slices, layout.assign_roles(len(slices)), how


def _on_gpus(choice: _Choice, layout: RoleLayout, request: _Request) -> _Division:
    """Equal GMIs on shares of GPUs."""
    count = request.num_gmis or layout.usable_gmis(sum(map(len, choice.fractions.values())))
    slices, how = equal_gpu_slices(
        choice.machine, choice.backend.name, choice.fractions, count, choice.shares, request.threads_per_gmi
    )
    return slices, layout.assign_roles(len(slices)), how


def _on_cores(choice: _Choice, layout: RoleLayout, request: _Request) -> _Division:
    """Each GMI on its own cores if there are enough; else the other types on the simulators' cores."""
    machine, num_gmis, threads = choice.machine, request.num_gmis, request.threads_per_gmi
    fits = max_gmis_on_cores(machine, threads)
    own_cores = num_gmis is not None and num_gmis <= fits
    if len(layout.worker_types) == 1 or request.gmis_per_gpu is not None or own_cores:
        slices, how = equal_core_slices(machine, num_gmis, request.gmis_per_gpu, threads)
        return slices, layout.assign_roles(len(slices)), how
    name = worker_type_name(layout.worker_types[0])
    hosts = None if num_gmis is None else layout.counts(num_gmis)[0]
    if hosts is not None and hosts > fits:
        most = layout.counts_for_simulators(fits)
        raise PlanError(
            f"num_gmis={num_gmis}",
            f"{counted(hosts, name)} need a core each, and {fits} fit",
            f"Set num_gmis to {sum(most)} or less" if fits else "Set threads_per_gmi lower",
        )
    slices, how = equal_core_slices(machine, hosts, None, threads, called=name)
    shared, worker_types, sharing = colocate_on_cores(
        slices, layout.worker_types, layout.counts_for_simulators(len(slices)), overlapped=layout.overlapped
    )
    return shared, worker_types, f"{how}; {sharing}"


def _refuse_many_senders(worker_types: Sequence[Roles]) -> None:
    collectors = sum("agent" in roles and "trainer" not in roles for roles in worker_types)
    if any("trainer" in roles for roles in worker_types) and collectors > MOST_SENDERS:
        raise PlanError(
            f"{counted(collectors, 'GMI')} that collect experience for trainers in others",
            f"a trainer takes rollouts of at most {MOST_SENDERS}",
            "Use fewer GMIs with more environments each, or the template dp_only",
        )
    simulators = sum("simulator" in roles and "agent" not in roles for roles in worker_types)
    agents = sum("agent" in roles and "simulator" not in roles for roles in worker_types)
    if agents and simulators > MOST_SENDERS * agents:
        raise PlanError(
            f"{counted(simulators, 'simulator')} with {counted(agents, 'agent')}",
            f"an agent acts for at most {MOST_SENDERS}",
            "Use fewer GMIs with more environments each, more GMIs with an agent, or the template dp_only",
        )


def _leave_out(plan: PlacementPlan, left_out: Sequence[int]) -> PlacementPlan:
    """The plan without these GMIs; the others keep their slices and environments, and are numbered anew.

    Raises:
        PlanError: the GMIs are not alike, there is no such GMI, or none would be left.
    """
    asked = f"left_out={list(left_out)}"
    if plan.template != "dp_only":
        raise PlanError(
            asked, f"it is for dp_only, whose GMIs are alike, not for {plan.template}", "Leave it out"
        )
    there = range(plan.num_gmis)
    if not set(left_out) < set(there):
        raise PlanError(
            asked,
            f"the plan has {counted(plan.num_gmis, 'GMI')}, and at least one has to be left",
            f"Give indices from 0 to {there[-1]}, and not all of them",
        )
    names = ", ".join(f"{index} ({plan.slices[index].label()})" for index in sorted(left_out))
    return replace(
        plan,
        slices=without(plan.slices, left_out),
        worker_types=without(plan.worker_types, left_out),
        envs=without(plan.envs, left_out),
        sizes=without(plan.sizes, left_out),
        left_out=tuple(plan.slices[index] for index in sorted(left_out)),
        reason=f"{plan.reason}; of its {counted(plan.num_gmis, 'GMI')} without {names}",
    )


def predict_limits(machine: Machine, slices: Sequence[Slice]) -> tuple[SliceLimits, ...]:
    """Predict the limits of each slice, in order. ``slices`` must contain all slices of each GPU.

    Raises:
        PlanError: a GPU cannot be partitioned into these sizes; the text says what would fit.
    """
    by_gpu: dict[tuple[str, str], list[int]] = {}
    for index, gmi_slice in enumerate(slices):
        if gmi_slice.gpu_uuid is not None:
            by_gpu.setdefault((gmi_slice.node, gmi_slice.gpu_uuid), []).append(index)
    limits = [SliceLimits() for _ in slices]
    for (node_name, uuid), indices in by_gpu.items():
        node = machine.node(node_name)
        backend = get_backend(slices[indices[0]].backend)
        for gpu in node.gpus:
            if gpu.uuid == uuid:
                sizes = [slices[index].gpu_fraction for index in indices]
                for index, limit in zip(indices, backend.predict_limits(node, gpu, sizes), strict=True):
                    limits[index] = limit
    return tuple(limits)
