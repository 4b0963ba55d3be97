"""The plan: which slices, on which nodes, for which roles, and why. Pure function of machine and request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import floor
from typing import Any, Literal

from placement.backends import get_backend
from placement.backends.base import SliceLimits
from placement.choice import choose_backend
from placement.equal import cores_hold, equal_cores, equal_gpus
from placement.errors import PlanError, counted
from placement.foresight import foreseen
from placement.kinds import OVERLAPPED, Mix, Roles, envs_of, mix_of, noun_of
from placement.sharing import share_cores
from placement.types import BackendName, Machine, Slice
from placement.unequal import cut_cores, cut_gpus, refuse_counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What will run where. GMI ``i`` is ``slices[i]``; slices are ordered by node."""

    template: str
    backend: BackendName
    slices: tuple[Slice, ...]
    kinds: tuple[Roles, ...]
    """Roles of each GMI; they differ in templates whose roles are apart."""
    num_envs: int
    """Environments of one GMI with a simulator; the mean where GMIs are unequal."""
    reason: str
    """Why this backend and these numbers, as a sentence."""
    machine: Machine
    sizes: tuple[float, ...] = ()
    """Of unequal GMIs, as they were asked for: cores, or shares of a GPU. Empty: GMIs are equal."""

    @property
    def num_gmis(self) -> int:
        """GMIs in all."""
        return len(self.slices)

    def roles_of(self, index: int) -> Roles:
        """Roles of one GMI."""
        return self.kinds[index]

    def hosting(self, role: str) -> tuple[int, ...]:
        """Indices of the GMIs that host a role."""
        return tuple(index for index, roles in enumerate(self.kinds) if role in roles)

    @property
    def group(self) -> tuple[int, ...] | None:
        """GMIs that form the group; None: all. Where GMIs do not wait for each other, learners only: others may be lost."""
        return self.hosting("trainer") if self.template in OVERLAPPED else None

    @property
    def envs(self) -> tuple[int, ...]:
        """Environments of each GMI; 0 of those without a simulator."""
        return envs_of(self.kinds, self.num_envs, self.sizes)

    def memory_bytes(self, index: int) -> int:
        """Memory for GMI ``index``: its limit on the GPU where it has one, else an even share of the GPU or node."""
        piece = self.slices[index]
        node = self.machine.node(piece.node)
        for gpu in node.gpus:
            if gpu.uuid == piece.gpu_uuid:
                limit = self._limits(piece).memory_bytes
                if limit is not None:
                    return limit
                return floor(gpu.memory_total_bytes * piece.gpu_fraction)
        return node.memory_total_bytes // sum(other.node == piece.node for other in self.slices)

    def _limits(self, piece: Slice) -> SliceLimits:
        """What was carved, or what will be."""
        if piece.share is not None:
            return get_backend(piece.backend).limits(piece)
        beside = [
            other for other in self.slices if (other.node, other.gpu_uuid) == (piece.node, piece.gpu_uuid)
        ]
        return foreseen(self.machine, beside)[beside.index(piece)]

    def bundles(self) -> list[dict[str, float]]:
        """What to ask Ray for: one bundle per GMI, in slice order."""
        return [bundle_of(piece) for piece in self.slices]

    def strategy(self) -> Literal["STRICT_PACK", "PACK"]:
        """How Ray is to place the bundles: one node where the plan has one, else as few as possible."""
        return "STRICT_PACK" if len({piece.node for piece in self.slices}) == 1 else "PACK"

    def table(self) -> str:
        """The plan as aligned plain text: one line per GMI, then the reason."""
        head = ("GMI", "node", "slice", "roles", "envs", "threads", "memory")
        rows = [head, *(self._row(index) for index in range(self.num_gmis))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        summary = counted(self.num_gmis, "GMI")
        if self.template != "program":
            summary += f", {counted(sum(self.envs), 'environment')}"
        lines.append(f"{self.template} on {self.backend}: {summary}. {self.reason}.")
        return "\n".join(lines)

    def _row(self, index: int) -> tuple[str, ...]:
        piece = self.slices[index]
        memory = f"{self.memory_bytes(index) / 2**30:.1f} GiB"
        roles = "+".join(self.roles_of(index))
        return (
            str(index),
            piece.node,
            piece.label(),
            roles,
            str(self.envs[index]) if "simulator" in self.roles_of(index) else "-",
            str(piece.num_threads),
            memory,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values, for a run folder."""
        return asdict(self) | {"bundles": self.bundles()}


def bundle_of(piece: Slice) -> dict[str, float]:
    """What one slice asks Ray for."""
    bundle = {"CPU": float(piece.num_threads) if piece.num_cpus is None else piece.num_cpus}
    return bundle | {"GPU": piece.gpu_fraction} if piece.gpu_uuid is not None else bundle


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
) -> Plan:
    """Cut ``machine`` into GMIs. The same arguments always give the same plan.

    Args:
        machine: what there is
        backend: ``cpu``, ``direct``, ``mps``, ``mig``, ``green``, or ``auto`` (see ``choose_backend``)
        template: which roles share a GMI
        serving: whether the GMIs act without training: dp_mp then has pairs of a simulator and an agent
        num_gmis: GMIs in all; None: one with a simulator per core (at most 8) on ``cpu`` and the others beside them, every
            GPU's shares on GPUs. Where cores do not suffice for each to have its own, those without a simulator share
        gmis_per_gpu: GMIs on one GPU; None: 1, or what the template needs. GPUs are filled in order where ``num_gmis``
            needs not all
        num_agents: of them GMIs with an agent alone; None: 1
        num_learners: of them GMIs with a trainer and no simulator; None: 1
        num_envs: environments of one GMI with a simulator
        threads_per_gmi: cores of one GMI; None: the node's cores divided evenly
        sizes: of unequal GMIs, each one's cores on ``cpu``, its share of a GPU elsewhere; they decide how many there are

    Raises:
        PlanError: what was asked does not fit; the message says what does.
    """
    counts = {
        "num_gmis": num_gmis,
        "gmis_per_gpu": gmis_per_gpu,
        "num_envs": num_envs,
        "threads_per_gmi": threads_per_gmi,
        "num_agents": num_agents,
        "num_learners": num_learners,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            raise PlanError(f"{name}={value}", "at least 1 is needed", f"Set {name} to 1 or more")
    mix = mix_of(template, serving=serving, num_agents=num_agents, num_learners=num_learners)
    shares = gmis_per_gpu or -(-mix.smallest // max(1, machine.num_gpus))
    if sizes:
        shares = 2 if min(sizes) < 1 else 1
    name, reason = choose_backend(machine, backend, roles=mix.roles, gmis_per_gpu=shares)
    if sizes:
        refuse_counts(counts, len(sizes), on_cores=name == "cpu")
        cut = cut_cores(machine, sizes) if name == "cpu" else cut_gpus(machine, name, sizes, threads_per_gmi)
        slices, how = cut
        kinds = mix.dealt(len(slices))
    elif name == "cpu":
        slices, kinds, how = _on_cores(machine, mix, num_gmis, gmis_per_gpu, threads_per_gmi)
    else:
        wanted = num_gmis or mix.largest(shares * machine.num_gpus)
        slices, how = equal_gpus(machine, name, wanted, shares, threads_per_gmi)
        kinds = mix.dealt(len(slices))
    sharing = get_backend(name)
    slices = [replace(piece, environment=sharing.environment(piece)) for piece in slices]
    foreseen(machine, slices)  # what cannot be carved is refused here, not once everything has started
    return Plan(
        template=template,
        backend=name,
        slices=tuple(slices),
        kinds=tuple(kinds),
        num_envs=num_envs,
        reason=f"{reason}; {how}",
        machine=machine,
        sizes=tuple(sizes or ()),
    )


def _on_cores(
    machine: Machine, mix: Mix, num_gmis: int | None, gmis_per_gpu: int | None, threads: int | None
) -> tuple[list[Slice], list[Roles], str]:
    """Every GMI on cores of its own where they are enough for as many as asked, else on those of the simulators."""
    fits = cores_hold(machine, threads)
    if len(mix.kinds) == 1 or gmis_per_gpu is not None or (num_gmis is not None and num_gmis <= fits):
        slices, how = equal_cores(machine, num_gmis, gmis_per_gpu, threads)
        return slices, mix.dealt(len(slices)), how
    hosts = None if num_gmis is None else mix.counts(num_gmis)[0]
    if hosts is not None and hosts > fits:
        most = mix.with_hosts(fits)
        raise PlanError(
            f"num_gmis={num_gmis}",
            f"{counted(hosts, noun_of(mix.kinds[0]))} need a core each, and there is room for {fits}",
            f"Set num_gmis to {sum(most)} or less" if fits else "Set threads_per_gmi lower",
        )
    slices, how = equal_cores(machine, hosts, None, threads, called=noun_of(mix.kinds[0]))
    shared, kinds, sharing = share_cores(
        slices, mix.kinds, mix.with_hosts(len(slices)), overlapped=mix.overlapped
    )
    return shared, kinds, f"{how}; {sharing}"
