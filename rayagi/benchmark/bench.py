"""Runs a benchmark of several layouts, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from collectives.compositions import compose, composition_names
from collectives.errors import CompositionError
from collectives.layout import Layout
from collectives.schedule import CollectiveSchedule
from placement.types import Machine
from rayagi.benchmark.measure import (
    BenchmarkCase,
    LayoutMeasurement,
    Members,
    StoppedError,
    TimingBudget,
    measure,
)
from rayagi.benchmark.member import BenchMember
from rayagi.benchmark.processes import MemberProcesses

Start = Callable[[BenchmarkCase], AbstractContextManager[Members]]
"""Starts one ``BenchMember`` per rank of a case, and ends them."""
BeforeEach = Callable[[int, int, str], None]
"""Called with the timings done, their total, and a description of the next; raises StoppedError to end the measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRequest:
    """What to measure."""

    cases: tuple[BenchmarkCase, ...]
    sizes: tuple[int, ...]
    """Bytes of float32."""
    repeats: int
    """How often each composition is timed, interleaved with the others."""
    time_s: float
    """Approximate limit of all timings together; excludes starting. Slow operations still run a few times."""


def measure_all(
    request: BenchmarkRequest, start: Start, before_each: BeforeEach, found: list[LayoutMeasurement]
) -> bool:
    """Measure all cases, and append them to ``found``, which keeps what was measured before an error. Returns whether they
    are complete.

    Raises:
        WrongResultError: a composition reduced wrongly.
        CommunicatorError, BenchmarkError: a member is lost.
    """
    total = sum(case.num_tasks(request.sizes, request.repeats) for case in request.cases)
    done = 0

    def counted(text: str) -> None:
        nonlocal done
        before_each(done, total, text)
        done += 1

    budget = TimingBudget(
        sizes=request.sizes, repeats=request.repeats, slice_s=request.time_s / total, before_each=counted
    )
    try:
        for case in request.cases:
            found.append(LayoutMeasurement(case=case))
            with start(case) as members:
                measure(members, budget, found[-1])
    except StoppedError:
        return False
    return True


def make_case(layout: Layout, wanted: Sequence[str], machine: Machine | None) -> BenchmarkCase:
    """The case of the ``wanted`` compositions that apply to a layout; all that apply if none is named.

    Args:
        layout: of the members, actual or nominal
        wanted: names of compositions, e.g. ``hybrid(1)``
        machine: its GPUs are used, if there are enough for the layout; None: no GPUs

    Raises:
        CompositionError: none of them applies; with the reasons.
    """
    fitting: dict[str, CollectiveSchedule] = {}
    skipped: list[tuple[str, str]] = []
    for name in wanted or composition_names(layout):
        try:
            schedule = compose(name, layout)
        except CompositionError as error:
            skipped.append((name, error.reason))
            continue
        same = [other for other, known in fitting.items() if known.steps == schedule.steps]
        if same and not wanted:
            skipped.append((name, f"the same steps as {same[0]}"))
        else:
            fitting[schedule.composition] = schedule
    if not fitting:
        reasons = "; ".join(dict.fromkeys(reason for _, reason in skipped))
        raise CompositionError(", ".join(name for name, _ in skipped), str(layout), reasons)
    gpus = machine.nodes[0].usable_gpus if machine is not None else ()
    enough = len(layout.nodes) == 1 and len(gpus) >= layout.n
    uuids = tuple(gpu.uuid for gpu in gpus[: layout.n]) if enough else ()
    return BenchmarkCase(layout=layout, compositions=tuple(fitting), skipped=tuple(skipped), gpus=uuids)


def on_this_machine(case: BenchmarkCase) -> AbstractContextManager[Members]:
    """Start a process for each rank on this machine."""
    places = case.layout.places()
    return MemberProcesses(
        [
            partial(BenchMember, rank, case.layout, case.gpus[places[rank][1]] if case.gpus else None)
            for rank in range(case.layout.world_size)
        ]
    )
