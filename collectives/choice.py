"""Which schedule a group runs: the one that was asked for, the only one there is, or the cheapest as measured here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch

from collectives.alphabeta import AlphaBeta
from collectives.available import Candidate, available, this_process
from collectives.available import Primitive as Tried
from collectives.composed import perform
from collectives.compositions import compose
from collectives.kept_profiles import kept_or_measured
from collectives.layout import Layout
from collectives.planner import Plan, make_plan
from collectives.profile import RUNS, mean_s, measure
from collectives.rendezvous import Member
from collectives.schedule import Primitive, Schedule, Step
from collectives.transports.base import Transport
from collectives.tuning import Tuner

TYPICAL_BYTES = 440_000
"""What the first choice is made for, before a bucket was seen: Ant's float32 gradients in the preprint's Table 7."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a group runs."""

    schedule: Schedule
    reason: str
    tuner: Tuner | None = None
    """Chooses again by what reductions cost; None where nothing else could be chosen, or one was asked for."""


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
) -> Choice:
    """The schedule for these members, the same on all of them, and why.

    Members without a GPU have one way only: shared memory inside a host, then across hosts. For others each primitive
    is tried, the steps of each composition are timed, and then the chosen one as a whole; training chooses again, for its
    own bucket (``Tuner``). [unverified on GPU]

    Raises:
        CompositionError: there is no such composition, or it does not apply to where the members are.
    """
    layout = Layout.placed([(member.host_id, member.device) for member in members])
    if composition != "auto":
        return Choice(compose(composition, layout), "it was asked for")
    if device.type == "cpu":
        return Choice(compose("ip_only", layout), "the only way without GPUs")
    everyone = tuple(range(len(members)))
    across = len(layout.nodes) > 1
    with closing(wires.apart("control").transport("net" if across else "ip", everyone)) as control:
        usable = offered(wires, layout, rank, control, device, timeout_s)
        plan = cheapest(wires, layout, rank, control, device, usable)
    return Choice(plan.schedule, plan.reason, Tuner(plan))


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
) -> Plan:
    """What costs least for ``TYPICAL_BYTES``: by a model of steps that are timed once, confronted with whole schedules now.

    All members call it, and come to the same plan.
    """
    with ExitStack() as opened:
        profiling = wires.apart("profile")

        @cache
        def transport(primitive: Primitive, ranks: tuple[int, ...]) -> Transport:
            return opened.enter_context(closing(profiling.transport(primitive, ranks)))

        def timed(steps: Sequence[Step], nbytes: int) -> float:
            """Mean seconds of the steps, one after another, on the slowest member."""
            own = [(step, group) for step in steps if (group := step.group_of(rank)) is not None]
            connected = [(step, transport(step.primitive, group)) for step, group in own]
            bucket = torch.zeros(nbytes // 4, device=device)

            def take_part() -> None:
                for step, way in connected:
                    perform(step, way, bucket, "sum")
                if device.type == "cuda":  # else only queued
                    torch.cuda.current_stream(device).synchronize()

            cost = torch.tensor([mean_s(take_part, runs=runs) if own else 0.0], dtype=torch.float64)
            control.all_reduce(cost, "max")
            return cost.item()

        profile = kept_or_measured(
            control,
            device,
            layout,
            usable,
            lambda: measure(
                layout, usable, lambda step, nbytes: timed([step], nbytes), machine="machines like these"
            ),
        )
        plan = make_plan(layout, TYPICAL_BYTES, AlphaBeta.fit(profile), usable)
        for _ in plan.candidates:
            confronted = plan.confront(timed(plan.schedule.steps, TYPICAL_BYTES))
            settled, plan = confronted.chosen == plan.chosen, confronted
            if settled:
                break
        return plan
