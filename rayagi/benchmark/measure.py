"""Measures one layout: profiles the steps, checks the compositions, and times them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from collectives.compositions import compose
from collectives.layout import Layout
from collectives.profile import RUNS, ProfilePoint, StepShape, steps_to_measure
from collectives.rendezvous import Rendezvous
from collectives.schedule import Primitive


class BenchmarkError(RuntimeError):
    """A measurement failed."""


class MemberEndedError(BenchmarkError):
    """A member's process ended, or did not answer in time."""

    def __init__(self, rank: int, asked: str, happened: str) -> None:
        super().__init__(rank, asked, happened)
        self.rank, self.asked, self.happened = rank, asked, happened

    def __str__(self) -> str:
        return f"rank {self.rank} was asked to {self.asked} and {self.happened}"


class WrongResultError(BenchmarkError):
    """A composition reduced wrongly, so it is not timed."""


LATENCY_BYTES = 4096
"""Additional size of the profile, dominated by latency."""


class Members(Protocol):
    """One ``BenchMember`` per rank, and the rendezvous that they ``join``."""

    rendezvous: Rendezvous

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all members in parallel; returns the results, by rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkCase:
    """The compositions to measure on one layout."""

    layout: Layout
    compositions: tuple[str, ...]
    """Names of those that apply to the layout."""
    skipped: tuple[tuple[str, str], ...]
    """Names of those that do not, with the reason."""
    gpus: tuple[str, ...] = ()
    """GPU UUID of each device. Empty: devices are nominal, and all processes share this machine's cores."""

    @property
    def primitives(self) -> set[Primitive]:
        """Primitives of the compositions."""
        return set[Primitive]().union(*(compose(name, self.layout).primitives for name in self.compositions))

    def num_tasks(self, sizes: Sequence[int], repeats: int) -> int:
        """Number of timings."""
        steps = len(steps_to_measure(self.layout, self.primitives))
        return steps * len(profile_sizes(sizes)) + len(self.compositions) * len(sizes) * repeats


@dataclass(kw_only=True, slots=True)
class LayoutMeasurement:
    """Measurements of a layout so far."""

    case: BenchmarkCase
    points: list[ProfilePoint] = field(default_factory=list)
    repeats: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """By composition and bytes: mean seconds of consecutive operations on the slowest member, of each repeat."""
    transports: dict[str, str] = field(default_factory=dict)
    """By composition: description of rank 0's communicator, with its transports."""
    unavailable: list[tuple[str, str]] = field(default_factory=list)
    """Compositions whose primitives do not work here, with the reason."""


class StoppedError(Exception):
    """The user stopped the benchmark; the measurements so far are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingBudget:
    """Time limit of each timing, and the progress callback."""

    sizes: tuple[int, ...]
    """Bytes of float32."""
    repeats: int
    slice_s: float
    """For one timing; slow operations still run a few times."""
    before_each: Callable[[str], None]
    """Called with a description of the next timing; raises StoppedError to end the measurement."""

    def seconds(self, timed: Callable[[int], Sequence[float]], known_s: float | None = None) -> float:
        """Mean seconds on the slowest member, over as many runs as fit the time limit.

        ``known_s`` is an estimate of one run; without it two runs give one.
        """
        one_s = max(timed(2)) if known_s is None else known_s
        runs = min(RUNS, int(0.8 * self.slice_s / max(one_s, 1e-7)))  # a fifth is for warm-up
        return max(timed(max(runs, 3)))


def measure(members: Members, budget: TimingBudget, measurement: LayoutMeasurement) -> None:
    """Profile the steps of ``measurement.case``, check every composition at every size, and time them interleaved.

    Raises:
        StoppedError: from ``budget``; ``measurement`` keeps the results so far.
        WrongResultError: a composition reduced wrongly.
        CommunicatorError, BenchmarkError: a member is lost.
    """
    usable = set.intersection(*members.ask("join", members.rendezvous, max(*budget.sizes, LATENCY_BYTES)))
    _profile(members, budget, measurement, usable)
    names = []
    for name in measurement.case.compositions:
        missing = compose(name, measurement.case.layout).primitives - usable
        if missing:
            measurement.unavailable.append((name, f"{', '.join(sorted(missing))} does not work here"))
        else:
            names.append(name)
            measurement.transports[name] = members.ask("open", name)[0]
    for name in names:
        for nbytes in budget.sizes:
            _check(members, name, nbytes, measurement.case.layout)
    for repeat in range(budget.repeats):
        for nbytes in budget.sizes:
            # Rotate the order in each repeat, so that no composition always follows the same other one.
            first = repeat % len(names) if names else 0
            for name in names[first:] + names[:first]:
                budget.before_each(f"{measurement.case.layout} {name}")
                known = measurement.repeats.setdefault((name, nbytes), [])
                timed = partial(members.ask, "time", name, nbytes)
                known.append(budget.seconds(timed, min(known, default=None)))


def _profile(
    members: Members, budget: TimingBudget, measurement: LayoutMeasurement, usable: set[Primitive]
) -> None:
    layout = measurement.case.layout
    for step in steps_to_measure(layout, usable & measurement.case.primitives):
        for nbytes in profile_sizes(budget.sizes):
            budget.before_each(f"{layout} {step.op} by {step.primitive}")
            seconds = budget.seconds(partial(members.ask, "time_step", step, nbytes))
            measurement.points.append(ProfilePoint(StepShape.from_step(step, layout), nbytes, seconds))
    members.ask("end_steps")


def _check(members: Members, name: str, nbytes: int, layout: Layout) -> None:
    checked = members.ask("check", name, nbytes)
    wrongly = f"{name} on {layout} reduced {nbytes} bytes wrongly"
    differing = [rank for rank, answer in enumerate(checked) if answer.digest != checked[0].digest]
    if differing:
        raise WrongResultError(f"{wrongly}: ranks {differing} ended with other bits than rank 0")
    if checked[0].wrong:
        raise WrongResultError(f"{wrongly}: {checked[0].wrong} elements differ from the float64 sum")


def profile_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Bytes at which steps are timed: at least two sizes, which the fit needs."""
    all_sizes = {LATENCY_BYTES, *sizes}
    return tuple(sorted(all_sizes if len(all_sizes) > 1 else all_sizes | {100 * LATENCY_BYTES}))
