"""Which schedule a group runs: the one that was asked for, the only one there is, or the cheapest as measured here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Protocol

import torch

from collectives.alphabeta import AlphaBeta
from collectives.available import Candidate, available, this_process
from collectives.available import Primitive as Tried
from collectives.composed import perform
from collectives.compositions import compose
from collectives.layout import Layout
from collectives.planner import make_plan
from collectives.profile import RUNS, mean_s, measure
from collectives.rendezvous import Member
from collectives.schedule import Primitive, Schedule, Step
from collectives.transports.base import Transport

TYPICAL_BYTES = 440_000
"""What the choice is made for: Ant's float32 gradients in the preprint's Table 7."""


class Connecting(Protocol):
    """What choosing needs of a member's wires."""

    def transport(self, primitive: Primitive, ranks: tuple[int, ...]) -> Transport:
        """The primitive among these ranks."""
        ...

    def apart(self, name: str) -> Connecting:
        """Wires whose transports are others."""
        ...


def choose(
    wires: Connecting,
    members: Sequence[Member],
    rank: int,
    composition: str,
    device: torch.device,
    timeout_s: float,
) -> Schedule:
    """The schedule for these members, the same on all of them.

    Members without a GPU have one way only: shared memory inside a host, then across hosts. Of others each primitive
    is tried, and each composition's steps are timed. [unverified on GPU]

    Raises:
        CompositionError: there is no such composition, or it does not apply to where the members are.
    """
    layout = Layout.placed([(member.host_id, member.device) for member in members])
    if composition != "auto":
        return compose(composition, layout)
    if device.type == "cpu":
        return compose("ip_only", layout)
    everyone = tuple(range(len(members)))
    across = len(layout.nodes) > 1
    with closing(wires.apart("control").transport("net" if across else "ip", everyone)) as control:
        usable = offered(wires, layout, rank, control, device, timeout_s)
        return cheapest(wires, layout, rank, control, device, usable)


def offered(
    wires: Connecting,
    layout: Layout,
    rank: int,
    control: Transport,
    device: torch.device,
    timeout_s: float,
) -> set[Primitive]:
    """The primitives that work here; across hosts there is only one. All members call it."""
    node, _ = layout.places()[rank]
    mine = next(ranks for ranks in layout.devices if rank in ranks)
    ring = tuple(ranks[0] for ranks in layout.nodes[node])
    groups: dict[Primitive, tuple[int, ...]] = {
        "ip": layout.hosts[node],
        "device": mine,
        "rp": ring if rank in ring else (),
    }
    trial = wires.apart("trial")
    candidates: dict[Tried, Candidate] = {
        primitive: Candidate(members=ranks, open=partial(trial.transport, primitive, ranks))
        for primitive, ranks in groups.items()
    }
    verdicts = available(control, this_process(device), candidates, timeout_s / 2)
    return {"net", *(primitive for primitive in groups if verdicts[primitive].offered)}


def cheapest(
    wires: Connecting,
    layout: Layout,
    rank: int,
    control: Transport,
    device: torch.device,
    usable: set[Primitive],
    runs: int = RUNS,
) -> Schedule:
    """The schedule of least cost for ``TYPICAL_BYTES`` by a model of steps that are timed now. All members call it."""
    profiling = wires.apart("profile")
    transports: dict[tuple[Primitive, tuple[int, ...]], Transport] = {}

    def timed(step: Step, nbytes: int) -> float:
        """Mean seconds of the step on its slowest member."""
        group = step.group_of(rank)
        cost = torch.zeros(1, dtype=torch.float64)
        if group is not None:
            key = (step.primitive, group)
            if key not in transports:
                transports[key] = profiling.transport(*key)
            bucket = torch.zeros(nbytes // 4, device=device)
            cost[0] = mean_s(partial(perform, step, transports[key], bucket, "sum"), runs=runs)
        control.all_reduce(cost, "max")
        return cost.item()

    try:
        profile = measure(layout, usable, timed, machine="this one, at the start of the group")
    finally:
        for transport in transports.values():
            transport.close()
    return make_plan(layout, TYPICAL_BYTES, AlphaBeta.fit(profile), usable).schedule
