"""Chooses the schedule of a group: the requested one, the only possible one, or the cheapest by measurement."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from collectives.alphabeta import AlphaBetaModel
from collectives.compiler import machine
from collectives.composed import run_step
from collectives.compositions import compose
from collectives.errors import ProfileError
from collectives.files import cache_folder, replacing
from collectives.layout import Layout
from collectives.objects import exchange
from collectives.planner import CompositionPlan, plan_composition
from collectives.primitive_probe import PrimitiveProbe, local_capabilities, probe_primitives
from collectives.profile import RUNS, CostProfile, StepShape, mean_s, measure, steps_to_measure
from collectives.rendezvous import PROTOCOL, Member
from collectives.schedule import CollectiveSchedule, Primitive, Step
from collectives.transports.base import Transport
from collectives.tuning import ScheduleTuner

if TYPE_CHECKING:  # it imports this module
    from collectives.transport_factory import GroupTransportFactory

_logger = logging.getLogger(__name__)
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


def load_or_measure_profile(
    control: Transport,
    device: torch.device,
    layout: Layout,
    usable: Collection[Primitive],
    measure: Callable[[], CostProfile],
) -> CostProfile:
    """The profile in rank 0's cache for these machines and this layout; on a miss it is measured now and cached.

    All members of ``control`` call it, and ``measure``, and get the same profile.
    """
    path = cache_folder("profiles") / f"{_key(control, device, layout, usable)}.json"
    kept = exchange(control, _read(path, layout, usable).encode() if control.rank == 0 else b"")[0]
    if kept:
        return CostProfile.from_json(kept.decode(), str(path))
    profile = measure()
    if control.rank == 0:
        _write(path, profile)
    return profile


def _key(control: Transport, device: torch.device, layout: Layout, usable: Collection[Primitive]) -> str:
    """Digest of everything that costs depend on: all members' machines, the layout, the usable primitives."""
    own = [machine(), str(os.cpu_count()), torch.__version__, str(PROTOCOL)]
    if device.type == "cuda":
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
        own += [torch.cuda.get_device_name(device), str(torch.version.cuda), share]
    digest = hashlib.sha256("\0".join(own).encode()).digest()
    parts = [b"".join(exchange(control, digest)), repr(layout.mpl).encode(), repr(layout.nodes).encode()]
    return hashlib.sha256(b"\0".join([*parts, *sorted(name.encode() for name in usable)])).hexdigest()[:32]


def _read(path: Path, layout: Layout, usable: Collection[Primitive]) -> str:
    """The cached profile, if it has all that the planner needs; else empty."""
    if not path.exists():
        return ""
    try:
        profile = CostProfile.load(path)
        AlphaBetaModel.fit(profile)
        needed = {StepShape.from_step(step, layout) for step in steps_to_measure(layout, usable)}
        if not needed <= {point.shape for point in profile.points}:
            raise ProfileError(str(path), "it lacks steps that are needed here")
        return profile.to_json()
    except ProfileError as error:
        _logger.warning("%s: %s; the machine is measured again", path, error.reason)
        return ""


def _write(path: Path, profile: CostProfile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside:
            profile.save(beside)
    except OSError as error:
        _logger.warning("the profile of this machine cannot be saved: %s; the next run measures again", error)
