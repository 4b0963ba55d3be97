"""Chooses the schedule of a group: the requested one, the only possible one, or the cheapest by measurement."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import cache, partial
from typing import TYPE_CHECKING

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
from collectives.schedule import CollectiveSchedule, Primitive, Step
from collectives.transports.base import Transport
from collectives.tuning import ScheduleTuner

if TYPE_CHECKING:  # it imports this module
    from collectives.transport_factory import GroupTransportFactory

TYPICAL_BYTES = 440_000
"""Size of the first choice, before the actual buckets are known: Ant's float32 gradients in the preprint's Table 7."""


def choose_schedule(
    transport_factory: GroupTransportFactory,
    members: Sequence[Member],
    rank: int,
    composition: str,
    device: torch.device,
    timeout_s: float,
) -> tuple[CollectiveSchedule, str, ScheduleTuner | None]:
    """Choose the schedule for these members, the same on all of them; also why, and its tuner where it may change.

    Members without a GPU use ``ip_only``: shared memory inside a host, then across hosts. On GPUs the primitives are probed,
    the steps of all compositions are timed, and then the chosen composition as a whole. During training the tuner chooses
    again for the actual bucket (``ScheduleTuner``). [unverified on GPU]

    Raises:
        CompositionError: unknown composition, or it does not apply to the layout.
    """
    layout = Layout.from_placement([(member.host_id, member.device) for member in members])
    if composition != "auto":
        return compose(composition, layout), "it was requested", None
    if device.type == "cpu":
        return compose("ip_only", layout), "the only composition without GPUs", None
    everyone = tuple(range(len(members)))
    across = len(layout.nodes) > 1
    with closing(
        transport_factory.scoped("control").transport("net" if across else "ip", everyone)
    ) as control:
        usable = supported_primitives(transport_factory, layout, rank, control, device, timeout_s)
        plan = plan_cheapest(transport_factory, layout, rank, control, device, usable)
    return plan.schedule, plan.reason, ScheduleTuner(plan)


def supported_primitives(
    transport_factory: GroupTransportFactory,
    layout: Layout,
    rank: int,
    control: Transport,
    device: torch.device,
    timeout_s: float,
) -> set[Primitive]:
    """The primitives that work here, by probing; ``net`` is always included. All members call it."""
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
    objections = probe_primitives(control, local_capabilities(device), candidates, timeout_s / 2)
    return {"net", *(primitive for primitive in groups if not objections[primitive])}


def plan_cheapest(
    transport_factory: GroupTransportFactory,
    layout: Layout,
    rank: int,
    control: Transport,
    device: torch.device,
    usable: set[Primitive],
    runs: int = RUNS,
) -> CompositionPlan:
    """The cheapest plan for ``TYPICAL_BYTES``: by a model of separately timed steps, corrected by timing whole schedules.

    All members call it and get the same plan.
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
                for step, connection in connected:
                    run_step(step, connection, bucket, "sum")
                if device.type == "cuda":  # the reductions are only queued
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
        # Time the chosen schedule as a whole and choose again, until the choice stays.
        for _ in plan.candidates:
            updated = plan.record_measurement(timed(plan.schedule.steps, TYPICAL_BYTES))
            settled, plan = updated.chosen == plan.chosen, updated
            if settled:
                break
        return plan
