"""Which schedule a group runs: the one that was asked for, the only one there is, or the cheapest as measured here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch

from collectives.alphabeta import AlphaBetaModel
from collectives.composed import run_step
from collectives.compositions import compose
from collectives.layout import Layout
from collectives.planner import CompositionPlan, plan_composition
from collectives.primitive_probe import PrimitiveProbe, local_capabilities, probe_primitives
from collectives.profile import RUNS, mean_s, measure
from collectives.profile_cache import load_or_measure_profile
from collectives.rendezvous import Member
from collectives.schedule import Primitive, Schedule, Step
from collectives.transports.base import Transport
from collectives.tuning import ScheduleTuner

TYPICAL_BYTES = 440_000
"""What the first choice is made for, before a bucket was seen: Ant's float32 gradients in the preprint's Table 7."""


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """What a group runs."""

    schedule: Schedule
    reason: str
    tuner: ScheduleTuner | None = None
    """Chooses again by what reductions cost; None where nothing else could be chosen, or one was asked for."""


class ScopedTransportFactory(Protocol):
    """What choosing needs of a member's wires."""

    def transport(self, primitive: Primitive, ranks: tuple[int, ...]) -> Transport:
        """The primitive among these ranks."""
        ...

    def scoped(self, name: str) -> ScopedTransportFactory:
        """Wires whose transports are others."""
        ...


def choose_schedule(
    transport_factory: ScopedTransportFactory,
    members: Sequence[Member],
    rank: int,
    composition: str,
    device: torch.device,
    timeout_s: float,
) -> ScheduleChoice:
    """The schedule for these members, the same on all of them, and why.

    Members without a GPU have one way only: shared memory inside a host, then across hosts. For others each primitive
    is tried, the steps of each composition are timed, and then the chosen one as a whole; training chooses again, for its
    own bucket (``ScheduleTuner``). [unverified on GPU]

    Raises:
        CompositionError: there is no such composition, or it does not apply to where the members are.
    """
    layout = Layout.from_placement([(member.host_id, member.device) for member in members])
    if composition != "auto":
        return ScheduleChoice(compose(composition, layout), "it was asked for")
    if device.type == "cpu":
        return ScheduleChoice(compose("ip_only", layout), "the only way without GPUs")
    everyone = tuple(range(len(members)))
    across = len(layout.nodes) > 1
    with closing(
        transport_factory.scoped("control").transport("net" if across else "ip", everyone)
    ) as control:
        usable = supported_primitives(transport_factory, layout, rank, control, device, timeout_s)
        plan = plan_cheapest(transport_factory, layout, rank, control, device, usable)
    return ScheduleChoice(plan.schedule, plan.reason, ScheduleTuner(plan))


def supported_primitives(
    transport_factory: ScopedTransportFactory,
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
    probe = transport_factory.scoped("probe")
    candidates: dict[Primitive, PrimitiveProbe] = {
        primitive: PrimitiveProbe(members=ranks, open=partial(probe.transport, primitive, ranks))
        for primitive, ranks in groups.items()
    }
    probe_results = probe_primitives(control, local_capabilities(device), candidates, timeout_s / 2)
    return {"net", *(primitive for primitive in groups if probe_results[primitive].supported)}


def plan_cheapest(
    transport_factory: ScopedTransportFactory,
    layout: Layout,
    rank: int,
    control: Transport,
    device: torch.device,
    usable: set[Primitive],
    runs: int = RUNS,
) -> CompositionPlan:
    """What costs least for ``TYPICAL_BYTES``: by a model of steps that are timed once, confronted with whole schedules now.

    All members call it, and come to the same plan.
    """
    with ExitStack() as opened:
        profiling = transport_factory.scoped("profile")

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
                    run_step(step, way, bucket, "sum")
                if device.type == "cuda":  # else only queued
                    torch.cuda.current_stream(device).synchronize()

            cost = torch.tensor([mean_s(take_part, runs=runs) if own else 0.0], dtype=torch.float64)
            control.all_reduce(cost, "max")
            return cost.item()

        profile = load_or_measure_profile(
            control,
            device,
            layout,
            usable,
            lambda: measure(
                layout, usable, lambda step, nbytes: timed([step], nbytes), machine="machines like these"
            ),
        )
        plan = plan_composition(layout, TYPICAL_BYTES, AlphaBetaModel.fit(profile), usable)
        for _ in plan.candidates:
            confronted = plan.record_measurement(timed(plan.schedule.steps, TYPICAL_BYTES))
            settled, plan = confronted.chosen == plan.chosen, confronted
            if settled:
                break
        return plan
