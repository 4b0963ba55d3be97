"""What a figure is: groups of cases that are measured in turns, and a drawing of what was measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from experiments.fusion.records import Labels, Records
from experiments.fusion.timing import Neighbours
from experiments.throughput.watch import WaitPolicy
from rayagi.envs.errors import EnvError

Measure = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    quick: bool
    seconds: float
    """At least, of each measurement."""
    repeats: int
    threads: int


@dataclass(frozen=True)
class Case:
    """One point: ``make`` sets it up, and what it returns measures once."""

    labels: Labels
    make: Callable[[], Measure]


class Figure(Protocol):
    """A module of this package with these functions."""

    def groups(self, size: Size) -> Iterable[Sequence[Case]]:
        """What is compared with one another stands in one group, and is measured in turns."""
        ...

    def draw(self, records: Records, path: Path) -> None:
        """The figure as a PNG."""
        ...

    def findings(self, records: Records) -> str:
        """The figure's numbers as Markdown."""
        ...


def measure(
    name: str, groups: Iterable[Sequence[Case]], repeats: int, records: Records, waiting: WaitPolicy
) -> None:
    """Measure what is not there yet. A case that cannot run is named and left out.

    ``waiting``: how OpenMP's idle threads do in this process.
    """
    for group in groups:
        left = [
            case
            for case in group
            if not all(records.has(name, case.labels, one, waiting) for one in range(repeats))
        ]
        ready = [(case, one) for case in left if (one := _made(name, case)) is not None]
        for repeat in range(repeats):
            for case, one in ready:
                if not records.has(name, case.labels, repeat, waiting):
                    neighbours = Neighbours()
                    values = one()
                    values = {**values, "other_cores": neighbours.cores()}
                    records.add(name, case.labels, repeat, values, waiting)
                    print(name, repeat, dict(case.labels), values, flush=True)
        del ready
        gc.collect()


def _made(name: str, case: Case) -> Measure | None:
    try:
        return case.make()
    except EnvError as error:
        print(f"{name} {dict(case.labels)} is left out: {error}", flush=True)
        return None
