"""The papers' cost model of compositions: the projection from measured unit costs.

Symbols: n (preprint: g) devices, m (preprint: t) GMIs on each, S (M_p) bytes of gradients, B1 bytes/s between processes
through the host, B2 bytes/s between devices. Both papers neglect the final broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collectives.errors import counted
from collectives.layout import Layout
from collectives.schedule import CollectiveSchedule, Primitive, Step


def all_reduce_s(members: int, nbytes: float, bandwidth: float) -> float:
    """The standard all-reduce of both papers, 2 (members - 1) S / (members B), in seconds."""
    return 2 * (members - 1) * nbytes / (members * bandwidth)


def scaled_s(cost_s: float, measured_members: int, members: int) -> float:
    """Scale a measured cost to another number of members, by the ratio of the all-reduce formulas.

    For ``ip_only`` this is the paper's Cost(a) = (nm - 1) / (m (n - 1)) Cost_ip. With one device, n = 1, the paper's factor
    divides by zero: measure two GMIs of it instead.

    Raises:
        ValueError: fewer than two measured members.
    """
    if measured_members < 2:
        raise ValueError(
            f"a cost among {counted(measured_members, 'member')} says nothing about {members}; measure at least two"
        )
    return cost_s * all_reduce_s(members, 1, 1) / all_reduce_s(measured_members, 1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCost:
    """Measured all-reduce of the bucket: Cost_ip or Cost_rp of GMI-DRL §3.2.1."""

    members: int
    """n devices with one GMI each; two GMIs if there is one device."""
    seconds: float
    """Mean of 100 runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """Projected cost of a schedule by GMI-DRL's model, in seconds."""

    derived_s: float
    """By the paper's formulas, scaled from the unit costs."""
    published_s: float
    """By the paper's estimates as printed; differs for hybrid only."""


def unit_group(primitive: Primitive, layout: Layout) -> tuple[int, ...]:
    """Ranks among which the unit cost of ``primitive`` is measured; fewer than two if the primitive does not apply.

    ip and rp: one GMI on each device of the host with most devices; if no host has two devices, ip takes two GMIs of the
    largest device. device: two GMIs of the largest device. net: one GMI of each host.
    """
    pair = max(layout.devices, key=len)[:2]
    if primitive == "device":
        return pair
    if primitive == "net":
        return tuple(host[0] for host in layout.hosts)
    spread = tuple(device[0] for device in max(layout.nodes, key=len))
    return pair if primitive == "ip" and len(spread) == 1 else spread


def project(schedule: CollectiveSchedule, units: Mapping[Primitive, UnitCost]) -> Projection:
    """Project the cost by the papers' model, for any layout: the sum over the steps that reduce.

    Rings of a step run in parallel and cost Cost_rp. A step of another primitive scales with the members of its largest
    group. For equal devices on one host these are the papers' formulas with B1 and B2 eliminated.

    Raises:
        KeyError: a primitive of the schedule has no unit cost.
    """
    reducing = [step for step in schedule.steps if step.op != "broadcast"]
    derived = [_step_s(step, units[step.primitive]) for step in reducing]
    published = list(derived)
    if schedule.composition.startswith("hybrid"):
        for index, step in enumerate(reducing):
            if step.primitive == "ip":
                # As printed, (k/n + m - k) Cost_ip + Cost_rp: proportional to the members, (n (m - k) + k) / n.
                unit = units["ip"]
                published[index] = max(map(len, step.groups)) / unit.members * unit.seconds
    return Projection(derived_s=sum(derived), published_s=sum(published))


def _step_s(step: Step, unit: UnitCost) -> float:
    if step.primitive == "rp":
        return unit.seconds
    return scaled_s(unit.seconds, unit.members, max(map(len, step.groups)))
