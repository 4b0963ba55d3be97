"""Profile of a machine: measured costs of operations, the one-time profile of GMI-DRL §3.2.1."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, get_args

from collectives.compositions import compose, composition_names
from collectives.costs import unit_group
from collectives.errors import CompositionError, ProfileError
from collectives.layout import Layout
from collectives.schedule import Op, Primitive, Step

RUNS = 100
"""Averaged runs, as in the paper."""
WARM_UP = 10
"""Runs before those, not counted: the first ones allocate and register memory."""
SIZES = (4_096, 440_000, 1_160_000, 6_000_000)
"""Bytes: one size dominated by latency, and the float32 gradients of the preprint's Table 7 (1.1e5, 2.9e5, 1.5e6)."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class StepShape:
    """The parameters of a step's cost besides its bytes.

    Attributes:
        primitive: of the step
        op: of the step
        members: of the largest group
        parallel: groups that run at the same time on one host and share its memory bandwidth
    """

    primitive: Primitive
    op: Op
    members: int
    parallel: int

    @classmethod
    def from_step(cls, step: Step, layout: Layout) -> Self:
        """The shape of a step; for groups across hosts ``parallel`` counts those that begin on one host."""
        places = layout.places()
        hosts = [places[group[0]][0] for group in step.groups]
        return cls(step.primitive, step.op, max(map(len, step.groups)), max(map(hosts.count, hosts)))


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One measurement: ``seconds`` is the mean over many runs of a step of ``shape`` on ``nbytes`` bytes."""

    shape: StepShape
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CostProfile:
    """Measurements of one machine."""

    machine: str
    """The machine and how it was measured, as text."""
    points: tuple[ProfilePoint, ...]

    def to_json(self) -> str:
        """Serialize; ``from_json`` reads it."""
        rows = [
            asdict(point.shape) | {"nbytes": point.nbytes, "seconds": point.seconds} for point in self.points
        ]
        content = {"format": _FORMAT, "machine": self.machine, "points": rows}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> Self:
        """Parse the output of ``to_json``.

        Raises:
            ProfileError: it is not a profile; the message names ``source`` and the mistake.
        """
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise ProfileError(source, f"format {content['format']}, and this version reads {_FORMAT}")
            points = tuple(_point(row) for row in content["points"])
            return cls(machine=str(content["machine"]), points=points)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, ProfileError):
                raise
            raise ProfileError(source, f"not a profile: {type(error).__name__}: {error}") from None

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of ``save``.

        Raises:
            ProfileError: there is no such file, or it is not a profile; the message names the mistake.
        """
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(str(path), getattr(error, "strerror", None) or str(error)) from None
        return cls.from_json(text, str(path))


def _point(row: dict[str, object]) -> ProfilePoint:
    primitive, op = row["primitive"], row["op"]
    if primitive not in get_args(Primitive) or op not in get_args(Op):
        raise ValueError(f"no such operation: {op} by {primitive}")
    members, parallel, nbytes, seconds = (row[key] for key in ("members", "parallel", "nbytes", "seconds"))
    if not all(isinstance(count, int) and count > 0 for count in (members, parallel, nbytes)) or members == 1:
        raise ValueError(f"parallel and nbytes are whole numbers from 1, members from 2: {row}")
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"seconds are positive: {row}")
    return ProfilePoint(StepShape(primitive, op, members, parallel), nbytes, float(seconds))  # type: ignore[arg-type]


def mean_s(
    operation: Callable[[], object],
    *,
    runs: int = RUNS,
    warm_up: int = WARM_UP,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Mean seconds of ``runs`` consecutive calls, after ``warm_up`` calls that are not counted."""
    for _ in range(warm_up):
        operation()
    begin = clock()
    for _ in range(runs):
        operation()
    return (clock() - begin) / runs


def steps_to_measure(layout: Layout, primitives: Collection[Primitive]) -> tuple[Step, ...]:
    """One step of every shape that the candidate compositions need; those of the unit costs first."""
    steps = [
        Step("all_reduce", primitive, (group,))
        for primitive in get_args(Primitive)
        if primitive in primitives and len(group := unit_group(primitive, layout)) > 1
    ]
    for name in composition_names(layout):
        try:
            schedule = compose(name, layout)
        except CompositionError:
            continue
        steps += [step for step in schedule.steps if step.primitive in primitives]
    found: dict[StepShape, Step] = {}
    for step in steps:
        found.setdefault(StepShape.from_step(step, layout), step)
    return tuple(found.values())


def measure(
    layout: Layout,
    primitives: Collection[Primitive],
    timed: Callable[[Step, int], float],
    *,
    machine: str,
    sizes: Sequence[int] = SIZES,
) -> CostProfile:
    """Profile a machine. Every rank calls it with the same arguments.

    ``timed`` (step, bytes) returns the mean seconds on the slowest member, equal on every rank; it runs the step many
    times (``mean_s``) on the ranks that take part in it.
    """
    points = [
        ProfilePoint(StepShape.from_step(step, layout), nbytes, timed(step, nbytes))
        for step in steps_to_measure(layout, primitives)
        for nbytes in sizes
    ]
    return CostProfile(machine=machine, points=tuple(points))
