"""The plan: which slices, on which nodes, for which roles, and why. Pure function of machine and request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import floor
from typing import Any, Literal

from placement.backends import get_backend
from placement.backends.base import SliceLimits
from placement.choice import choose_backend
from placement.errors import PlanError, counted
from placement.foresight import foreseen
from placement.types import FRACTION_STEP, BackendName, Machine, Node, Slice
from placement.unequal import cut_cores, cut_gpus, env_counts, refuse_counts

ROLES: dict[str, tuple[str, ...]] = {
    "dp_only": ("simulator", "agent", "trainer"),
    "program": ("program",),
}
"""Which roles each GMI of a template hosts. dp_only: all of them (GMI-DRL §3.1.1, Figure 6b). program: a workload of the
user's own (rayagi.programs), without environments."""

MAX_DEFAULT_GMIS = 8
"""CPU GMIs when the user names no number: beyond this, gradient exchange eats what another process adds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What will run where. GMI ``i`` is ``slices[i]``; slices are ordered by node."""

    template: str
    backend: BackendName
    slices: tuple[Slice, ...]
    num_envs: int
    """Environments of one GMI; the mean where GMIs are unequal."""
    reason: str
    """Why this backend and these numbers, as a sentence."""
    machine: Machine
    sizes: tuple[float, ...] = ()
    """Of unequal GMIs, as they were asked for: cores, or shares of a GPU. Empty: GMIs are equal."""

    @property
    def num_gmis(self) -> int:
        """GMIs in all."""
        return len(self.slices)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of every GMI."""
        return ROLES[self.template]

    @property
    def envs(self) -> tuple[int, ...]:
        """Environments of each GMI."""
        return env_counts(self.num_envs, self.num_gmis, self.sizes)

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
        roles = "+".join(self.roles)
        return (
            str(index),
            piece.node,
            piece.label(),
            roles,
            "-" if self.template == "program" else str(self.envs[index]),
            str(piece.num_threads),
            memory,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values, for a run folder."""
        return asdict(self) | {"roles": self.roles, "bundles": self.bundles()}


def bundle_of(piece: Slice) -> dict[str, float]:
    """What one slice asks Ray for."""
    bundle = {"CPU": float(piece.num_threads)}
    return bundle | {"GPU": piece.gpu_fraction} if piece.gpu_uuid is not None else bundle


def make_plan(
    machine: Machine,
    *,
    backend: str = "auto",
    template: str = "dp_only",
    num_gmis: int | None = None,
    gmis_per_gpu: int | None = None,
    num_envs: int,
    threads_per_gmi: int | None = None,
    sizes: Sequence[float] | None = None,
) -> Plan:
    """Cut ``machine`` into GMIs. The same arguments always give the same plan.

    Args:
        machine: what there is
        backend: ``cpu``, ``direct``, ``mps``, ``mig``, ``green``, or ``auto`` (see ``choose_backend``)
        template: which roles share a GMI
        num_gmis: GMIs in all; None: one per core (at most 8) on ``cpu``, every GPU's shares on GPUs
        gmis_per_gpu: GMIs on one GPU; None: 1. GPUs are filled in order where ``num_gmis`` needs not all
        num_envs: environments of one GMI
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
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            raise PlanError(f"{name}={value}", "at least 1 is needed", f"Set {name} to 1 or more")
    if template not in ROLES:
        raise PlanError(f"template={template!r}", f"the templates are {', '.join(ROLES)}", "Use one of them")
    shares = (2 if min(sizes) < 1 else 1) if sizes else gmis_per_gpu or 1
    name, reason = choose_backend(machine, backend, roles=ROLES[template], gmis_per_gpu=shares)
    if sizes:
        refuse_counts(counts, len(sizes), on_cores=name == "cpu")
        cut = cut_cores(machine, sizes) if name == "cpu" else cut_gpus(machine, name, sizes, threads_per_gmi)
        slices, how = cut
    elif name == "cpu":
        slices, how = _cut_cores(machine, num_gmis, gmis_per_gpu, threads_per_gmi)
    else:
        slices, how = _cut_gpus(machine, name, num_gmis, gmis_per_gpu, threads_per_gmi)
    sharing = get_backend(name)
    slices = [replace(piece, environment=sharing.environment(piece)) for piece in slices]
    foreseen(machine, slices)  # what cannot be carved is refused here, not once everything has started
    return Plan(
        template=template,
        backend=name,
        slices=tuple(slices),
        num_envs=num_envs,
        reason=f"{reason}; {how}",
        machine=machine,
        sizes=tuple(sizes or ()),
    )


def _cut_cores(
    machine: Machine, num_gmis: int | None, gmis_per_gpu: int | None, threads: int | None
) -> tuple[list[Slice], str]:
    if gmis_per_gpu is not None:
        raise PlanError(
            f"gmis_per_gpu={gmis_per_gpu}",
            f"the cpu backend cuts cores, and there {_are(machine.num_gpus, 'GPU')}",
            "Use num_gmis instead",
        )
    cores = [len(node.usable_cores) for node in machine.nodes]
    fits = sum(count // (threads or 1) for count in cores)
    if fits == 0 or (num_gmis is not None and num_gmis > fits):
        raise _too_many_for_cores(machine, num_gmis or 1, threads, fits)
    count = num_gmis if num_gmis is not None else min(fits, MAX_DEFAULT_GMIS)
    per_node = spread_over_nodes(cores, count, threads or 1)
    slices: list[Slice] = []
    for node, share in zip(machine.nodes, per_node, strict=True):
        if share:
            width = threads or len(node.usable_cores) // share
            slices += [
                Slice(node=node.name, backend="cpu", cores=part, num_threads=width)
                for part in _deal(node, share, width)
            ]
    return slices, _explain_cores(machine, slices, asked=num_gmis is not None)


def _cut_gpus(
    machine: Machine, name: BackendName, num_gmis: int | None, gmis_per_gpu: int | None, threads: int | None
) -> tuple[list[Slice], str]:
    shares = gmis_per_gpu or 1
    fits = shares * machine.num_gpus
    if num_gmis is not None and num_gmis > fits:
        needed = -(-num_gmis // machine.num_gpus)
        raise PlanError(
            f"num_gmis={num_gmis}",
            f"{counted(machine.num_gpus, 'GPU')} with gmis_per_gpu={shares} gives {counted(fits, 'GMI')}",
            f"Set num_gmis={fits} or gmis_per_gpu={needed}",
        )
    count = num_gmis if num_gmis is not None else fits
    fraction = floor(1 / shares / FRACTION_STEP + 1e-9) * FRACTION_STEP
    slices: list[Slice] = []
    for node in machine.nodes:
        uuids = [gpu.uuid for gpu in node.usable_gpus for _ in range(shares)][: count - len(slices)]
        if not uuids:
            continue
        width = threads or len(node.usable_cores) // len(uuids)
        if width * len(uuids) > len(node.usable_cores) or width == 0:
            raise _too_few_cores_beside_gpus(node, len(uuids), threads)
        slices += [
            Slice(
                node=node.name,
                backend=name,
                cores=part,
                num_threads=width,
                gpu_uuid=uuid,
                gpu_fraction=round(fraction, 4),
            )
            for part, uuid in zip(_deal(node, len(uuids), width), uuids, strict=True)
        ]
    used = len({piece.gpu_uuid for piece in slices})
    return slices, f"{counted(shares, 'GMI')} per GPU on {used} of {counted(machine.num_gpus, 'GPU')}"


def spread_over_nodes(cores: list[int], count: int, width: int) -> list[int]:
    """Share ``count`` GMIs of at least ``width`` cores among nodes: the poorest GMI gets the most cores.

    One GMI at a time to the node where it gets the largest share, the earlier node on a tie: synchronous GMIs
    wait for the slowest. Returns GMIs per node. ``count`` must fit.
    """
    shares = [0] * len(cores)
    for _ in range(count):
        open_nodes = [i for i, have in enumerate(cores) if have >= width * (shares[i] + 1)]
        best = max(open_nodes, key=lambda i: (cores[i] / (shares[i] + 1), -i))
        shares[best] += 1
    return shares


def _deal(node: Node, share: int, width: int) -> list[tuple[int, ...]]:
    """``share`` disjoint runs of ``width`` of the node's cores; empty where its cores are only counted."""
    if not node.pinnable:
        return [()] * share
    cores = node.usable_cores
    return [cores[i * width : (i + 1) * width] for i in range(share)]


def _explain_cores(machine: Machine, slices: list[Slice], *, asked: bool) -> str:
    used = sum(piece.num_threads for piece in slices)
    why = "as many GMIs as asked" if asked else f"one GMI per core, at most {MAX_DEFAULT_GMIS}"
    rest = machine.num_cores - used
    left = f", {counted(rest, 'core')} left for Ray and the driver" if rest else ""
    return f"{why}, {counted(used, 'core')} shared evenly{left}"


def _too_many_for_cores(machine: Machine, num_gmis: int, threads: int | None, fits: int) -> PlanError:
    each = f" with threads_per_gmi={threads}" if threads is not None else ""
    asked = f"num_gmis={num_gmis}{each}"
    where = counted(len(machine.nodes), "node")
    limit = f"there {_are(machine.num_cores, 'core')} on {where}, enough for {counted(fits, 'GMI')}{each}"
    logical = sum(node.ray_cpus or 0 for node in machine.nodes)
    if logical > machine.num_cores:
        limit += f" (Ray was started with {logical:g} CPUs, more than the cores that exist)"
    if fits:
        return PlanError(
            asked, limit, f"Set num_gmis to {fits} or less" + (" or threads_per_gmi lower" if each else "")
        )
    most = max((len(node.usable_cores) for node in machine.nodes), default=0)
    return PlanError(
        asked, limit, f"Set threads_per_gmi to {most} or less" if most else "Give Ray at least one CPU"
    )


def _too_few_cores_beside_gpus(node: Node, share: int, threads: int | None) -> PlanError:
    cores = len(node.usable_cores)
    each = threads or 1
    way_out = (
        f"Use at most {cores // each} GMIs on the node"
        if cores >= each
        else f"Set threads_per_gmi to {cores} or less"
    )
    return PlanError(
        f"{counted(share, 'GMI')} of {counted(each, 'core')} each on node {node.name}",
        f"it has {counted(cores, 'core')}",
        way_out,
    )


def _are(number: int, noun: str) -> str:
    return f"{'is' if number == 1 else 'are'} {counted(number, noun)}"
