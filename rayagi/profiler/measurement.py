"""Measures the cost of the profiler's hooks in a program: runs it in turns without a profiler and with one kind of hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import mean, stdev

from collectives.errors import counted
from rayagi.profiler.calibration import (
    FEWEST_ROUNDS,
    LARGEST_SPREAD,
    PROCESS,
    Calibration,
    CalibrationBlock,
    CalibrationError,
    delta_calibration,
    largest_spread,
    relative_spread,
)
from rayagi.profiler.layout import ACTIVITY, ANNOTATION, CALL, HOOKS
from rayagi.profiler.program_runs import ProgramRunner, Run, Variant
from rayagi.profiler.schedule import SKIPPED_TURNS

MOST_ROUNDS = 12
LARGEST_COSTS_NS = {CALL: 1_000.0, ANNOTATION: 5_000.0, ACTIVITY: 5_000.0}
"""What an event can cost: some hundred instructions with cold caches; Python's dozens of steps. More is noise."""
SMALLEST_SHARE = 0.001
"""A kind of hook is not measured if even at its largest cost it would take less than this share of the CPU time."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """A calibration and where it comes from.

    Attributes:
        calibration: costs of what was measured
        counts: events of a run with all hooks, by kind
        rounds: how many counted
        python: version of the program's Python
    """

    calibration: Calibration
    counts: Mapping[str, int]
    rounds: int
    python: str


def calibrate(
    program: ProgramRunner, most_rounds: int = MOST_ROUNDS, report: Report = lambda text: None
) -> Measured:
    """Measure what each kind of hook costs in a program.

    A first run with all hooks counts events and fills caches. Then come rounds of uninstrumented work and of the same work
    with each kind of hook alone, until the uninstrumented times of the last three rounds or more spread over at most
    ``largest_spread``; those rounds count. If the program has enough iterations they take turns in one process, which gives
    three rounds a run. Otherwise each is a run of its own, and the profiler's start is measured too.

    Args:
        program: does the same work each time
        most_rounds: after which it gives up
        report: gets a line after each round

    Raises:
        CalibrationError: nothing was recorded, or the uninstrumented times spread too much to the end.
    """
    first = program(HOOKS)
    kinds = [kind for kind in (CALL, ANNOTATION, ACTIVITY) if first.counts.get(kind)]
    if not kinds:
        raise CalibrationError(
            "the program recorded no events, so there is nothing to calibrate: it calls no known simulator, no torch, JAX "
            "or Ray, and annotates nothing; name its native modules with --simulator"
        )
    report(
        f"with all hooks: {_seconds(first)}; {_events(first.counts)}; {counted(first.iterations, 'iteration')}"
    )
    measured = [
        kind for kind in kinds if first.counts[kind] * LARGEST_COSTS_NS[kind] >= SMALLEST_SHARE * first.cpu_ns
    ]
    if few := [kind for kind in kinds if kind not in measured]:
        report(f"too few events to cost anything: {', '.join(few)}")
    alone = [frozenset({kind}) for kind in measured]
    in_turns = bool(alone) and _can_take_turns(first, 1 + len(alone))
    rounds: list[Mapping[Variant, Run]] = []
    while not (quiet := quiet_rounds(rounds)):
        if len(rounds) >= most_rounds:
            raise CalibrationError(_too_noisy(rounds))
        if in_turns:
            new = program.in_turns([frozenset(), *alone], FEWEST_ROUNDS)
        else:
            new = [_round(program, [None, frozenset(), *alone], is_reversed=len(rounds) % 2 == 1)]
        for number, each in enumerate(new, start=len(rounds) + 1):
            report(f"round {number}: " + ", ".join(f"{_label(v)} {_seconds(run)}" for v, run in each.items()))
        rounds += new
    found = costs_of(quiet)
    for kind, limit in LARGEST_COSTS_NS.items():
        if found.hooks.get(kind, 0.0) > limit:
            report(
                f"{kind}: {found.hooks[kind]:,.0f} ns measured, which is noise: the most that it can cost, {limit:,.0f} ns, "
                "counts; calibrate again when less else runs"
            )
    return Measured(_limited(found), first.counts, len(quiet), first.python)


def _limited(found: Calibration) -> Calibration:
    """Costs of at most ``LARGEST_COSTS_NS``."""
    hooks = {kind: min(ns, LARGEST_COSTS_NS.get(kind, ns)) for kind, ns in found.hooks.items()}
    return replace(found, hooks=hooks)


def _can_take_turns(run: Run, num_variants: int) -> bool:
    """Whether iterations are enough for a turn of each variant in each round, with one to spare."""
    return run.iterations > SKIPPED_TURNS + FEWEST_ROUNDS * num_variants


def _round(program: ProgramRunner, variants: Sequence[Variant], *, is_reversed: bool) -> dict[Variant, Run]:
    """A run of each variant."""
    runs = {variant: program(variant) for variant in (variants[::-1] if is_reversed else variants)}
    return {variant: runs[variant] for variant in variants}


def quiet_rounds(rounds: Sequence[Mapping[Variant, Run]]) -> Sequence[Mapping[Variant, Run]]:
    """As many of the last rounds as have uninstrumented times that hardly spread; none if they are fewer than three."""
    for first in range(len(rounds) - FEWEST_ROUNDS + 1):
        if _spread(rounds[first:]) <= largest_spread(len(rounds) - first):
            return rounds[first:]
    return ()


def costs_of(rounds: Sequence[Mapping[Variant, Run]]) -> Calibration:
    """Costs from rounds: of totals over all, and standard errors from those of each round."""
    blocks = [
        CalibrationBlock(
            run.cpu_ns,
            {kind: run.counts.get(kind, 0) for kind in {PROCESS, *variant}} if variant is not None else {},
        )
        for each in rounds
        for variant, run in each.items()
    ]
    found = delta_calibration(blocks)
    several = [_round_costs(each) for each in rounds]
    errors = {
        kind: stdev(each[kind] for each in several) / sqrt(len(several))
        for kind in found.hooks
        if all(kind in each for each in several)
    }
    return Calibration(found.hooks, spread=found.spread, errors=errors)


def _round_costs(runs: Mapping[Variant, Run]) -> dict[str, float]:
    """Of one round: what a kind of hook adds, by its count."""
    base = runs.get(frozenset(), runs[None])
    pairs = [(PROCESS, base, runs[None])]
    pairs += [(next(iter(each)), run, base) for each, run in runs.items() if each]
    return {
        kind: (run.cpu_ns - base.cpu_ns) / run.counts[kind]
        for kind, run, base in pairs
        if run.counts.get(kind)
    }


def _spread(rounds: Sequence[Mapping[Variant, Run]]) -> float:
    return relative_spread([each[None].cpu_ns for each in rounds])


def _too_noisy(rounds: Sequence[Mapping[Variant, Run]]) -> str:
    spread = f"{100 * _spread(rounds):.1f} %" if len(rounds) > 1 else "an unknown share"
    return (
        f"uninstrumented CPU times spread over {spread} in {len(rounds)} rounds, and over more than "
        f"{100 * LARGEST_SPREAD:.0f} % in any {FEWEST_ROUNDS} in a row: calibrate again when less else runs, with a "
        "program that does a fixed amount of work and annotates its iterations, or with more --rounds"
    )


@dataclass(frozen=True)
class Validation:
    """How well a calibration corrects a program's CPU time.

    Attributes:
        uninstrumented: CPU time of each repetition, in ns
        instrumented: with all hooks, in ns
        corrected: the same less the known costs, in ns
        counts: events of all instrumented repetitions
        in_turns: whether iterations took turns in one process, whose start is not in these times then
    """

    uninstrumented: tuple[int, ...]
    instrumented: tuple[int, ...]
    corrected: tuple[float, ...]
    counts: Mapping[str, int]
    in_turns: bool

    @property
    def overhead(self) -> float:
        """Of the instrumented runs, relative to the uninstrumented ones."""
        return mean(self.instrumented) / mean(self.uninstrumented) - 1

    @property
    def error(self) -> float:
        """Of the corrected time, relative to the uninstrumented one."""
        return mean(self.corrected) / mean(self.uninstrumented) - 1

    @property
    def error_spread(self) -> float:
        """Standard deviation of the errors of single repetitions."""
        return stdev(
            with_ / without - 1 for with_, without in zip(self.corrected, self.uninstrumented, strict=True)
        )

    @property
    def spread(self) -> float:
        """Of the uninstrumented runs: standard deviation by mean."""
        return relative_spread(self.uninstrumented)


def validate(
    program: ProgramRunner,
    first: Run,
    calibration: Calibration,
    repetitions: int,
    report: Report = lambda text: None,
) -> Validation:
    """Compare a program's CPU time without the profiler with its corrected one, in interleaved repetitions.

    Where a program has enough iterations they take turns in one process, and a repetition is a part of them; otherwise it is
    a run of each.

    Args:
        program: does the same work each time
        first: a run with all hooks, which also has filled caches
        calibration: costs
        repetitions: how many
        report: gets a line after each

    Raises:
        CalibrationError: fewer than two repetitions, or the program fails.
    """
    if repetitions < 2:
        raise CalibrationError(f"a validation needs at least 2 repetitions, not {repetitions}")
    in_turns = _can_take_turns(first, 2)
    rounds: list[Mapping[Variant, Run]] = []
    while len(rounds) < repetitions:
        if in_turns:
            new = program.in_turns([frozenset(), HOOKS], FEWEST_ROUNDS)[: repetitions - len(rounds)]
        else:
            new = [_round(program, [None, HOOKS], is_reversed=len(rounds) % 2 == 1)]
        for number, each in enumerate(new, start=len(rounds) + 1):
            times = f"uninstrumented {_seconds(each[None])}, instrumented {_seconds(each[HOOKS])}"
            report(f"repetition {number}: {times}")
        rounds += new
    recorded = [each[HOOKS] for each in rounds]
    return Validation(
        tuple(each[None].cpu_ns for each in rounds),
        tuple(each.cpu_ns for each in recorded),
        tuple(each.cpu_ns - calibration.total_ns(each.counts) for each in recorded),
        {kind: sum(each.counts.get(kind, 0) for each in recorded) for kind in (PROCESS, *sorted(HOOKS))},
        in_turns,
    )


def _label(variant: Variant) -> str:
    return "uninstrumented" if variant is None else "+".join(sorted(variant)) or "started"


def _seconds(run: Run) -> str:
    return f"{run.cpu_ns / 1e9:.2f} s"


def _events(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
