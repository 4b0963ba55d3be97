"""Schedule of an all-reduce: steps of primitives on groups of ranks, verified by symbolic execution when it is created."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from collectives.errors import CompositionError
from collectives.layout import Layout

Op = Literal["all_reduce", "reduce", "broadcast"]
Primitive = Literal["ip", "rp", "device", "net"]

PRIMITIVES: dict[Primitive, str] = {
    "ip": "through shared memory, inside one host",
    "rp": "a ring over distinct devices of one host",
    "device": "on the device that the members share",
    "net": "across hosts, one member of each",
}
"""What each primitive requires of the members of a group."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on disjoint groups of ranks in parallel; a rank in no group skips the step.

    Attributes:
        op: ``all_reduce``: all members get the group's sum; ``reduce``: the first does, the others' contents become
            unspecified; ``broadcast``: all get the first member's contents
        primitive: how the members of a group are connected
        groups: at least two ranks each; sums follow the order of the group
    """

    op: Op
    primitive: Primitive
    groups: tuple[tuple[int, ...], ...]

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        """The group of ``rank``; None if it skips the step."""
        return next((group for group in self.groups if rank in group), None)

    def __str__(self) -> str:
        return f"{self.op} by {self.primitive}: {self.groups_text()}"

    def groups_text(self) -> str:
        """``(0 3) (1 4)``; the arrow of ``(1-2 -> 0)`` and ``(0 -> 1-2)`` points to the ranks that get the result."""
        return " ".join(f"({_group_text(self.op, group)})" for group in self.groups)


@dataclass(frozen=True, slots=True)
class CollectiveSchedule:
    """Steps after which every rank holds the sum of all ranks' contributions, bitwise equal everywhere.

    Attributes:
        composition: its name, e.g. ``hybrid(1)``
        layout: that of its ranks
        steps: in order; none for a single rank

    Raises:
        CompositionError: it would not reduce correctly, or a primitive cannot connect one of its groups. So every existing
            schedule is correct.
    """

    composition: str
    layout: Layout
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        self.check()

    @property
    def primitives(self) -> frozenset[Primitive]:
        """Primitives that it needs."""
        return frozenset(step.primitive for step in self.steps)

    def steps_of(self, rank: int) -> Iterator[tuple[int, Step, tuple[int, ...]]]:
        """The steps that ``rank`` takes part in: index of the step, the step, its group."""
        for number, step in enumerate(self.steps):
            group = step.group_of(rank)
            if group is not None:
                yield number, step, group

    def check(self) -> None:
        """Prove by symbolic execution that each contribution reaches every rank exactly once.

        Each rank's contents are tracked as the set of contributions in it and the expression that made it. Equal
        expressions give bitwise equal results, whichever rank computes them.

        Raises:
            CompositionError: it does not hold; the message names step, group and rank.
        """
        contents: list[_Contents | None] = [
            _Contents(1 << rank, rank) for rank in range(self.layout.world_size)
        ]  # each rank begins with its own contribution; None: unspecified
        expressions: dict[tuple[str, tuple[int, ...]], int] = {}
        places = self.layout.places()
        for number, step in enumerate(self.steps):
            try:
                _check_groups(step, places)
                for group in step.groups:
                    _apply(step, group, contents, expressions)
            except ValueError as error:
                raise self._wrong(f"step {number} ({step.op} by {step.primitive}): {error}") from None
        self._check_end(contents)

    def _check_end(self, contents: Sequence[_Contents | None]) -> None:
        everyone = (1 << self.layout.world_size) - 1
        for rank, held in enumerate(contents):
            if held is None:
                raise self._wrong(f"rank {rank} ends with unspecified contents")
            if held.parts != everyone:
                raise self._wrong(
                    f"rank {rank} ends without rank {_lowest(everyone & ~held.parts)}'s contribution"
                )
            if contents[0] is not None and held.expression != contents[0].expression:
                raise self._wrong(f"ranks 0 and {rank} end with sums taken in different orders")

    def _wrong(self, reason: str) -> CompositionError:
        return CompositionError(self.composition, str(self.layout), reason)

    def table(self) -> str:
        """The steps as aligned plain text, one line each."""
        lines = [f"{self.composition} on {self.layout}"]
        if not self.steps:
            lines.append("  nothing to do for a single GMI")
        for number, step in enumerate(self.steps):
            lines.append(f"  {number}  {step.op:<10}  {step.primitive:<6}  {step.groups_text()}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Contents:
    """Symbolic contents of a rank: a bit per contribution, and the number of the expression that made them."""

    parts: int
    expression: int


def _check_groups(step: Step, places: dict[int, tuple[int, int]]) -> None:
    """Raise ValueError where groups overlap or the primitive cannot connect one of them."""
    grouped: set[int] = set()
    if not step.groups:
        raise ValueError("it has no groups")
    for group in step.groups:
        if len(group) < 2:
            raise ValueError(f"a group of {len(group)} has nothing to exchange")
        for rank in group:
            if rank not in places:
                raise ValueError(f"there is no rank {rank}")
            if rank in grouped:
                raise ValueError(f"rank {rank} occurs twice")
            grouped.add(rank)
        nodes = {places[rank][0] for rank in group}
        devices = {places[rank][1] for rank in group}
        fits = {
            "ip": len(nodes) == 1,
            "rp": len(nodes) == 1 and len(devices) == len(group),
            "device": len(devices) == 1,
            "net": len(nodes) == len(group),
        }
        if not fits[step.primitive]:
            raise ValueError(
                f"{step.primitive} works {PRIMITIVES[step.primitive]}, not among {ranks_text(group)}"
            )


def _apply(
    step: Step,
    group: tuple[int, ...],
    contents: list[_Contents | None],
    expressions: dict[tuple[str, tuple[int, ...]], int],
) -> None:
    """Execute the step symbolically. ValueError if it reads unspecified contents, or adds a contribution twice."""
    # Broadcast: every member holds what the first holds.
    if step.op == "broadcast":
        if contents[group[0]] is None:
            raise ValueError(f"rank {group[0]} has unspecified contents to send")
        for rank in group:
            contents[rank] = contents[group[0]]
        return
    # Reduction: the contents are the union of the members' contributions, which must be disjoint.
    parts, inputs = 0, []
    for rank in group:
        held = contents[rank]
        if held is None:
            raise ValueError(f"rank {rank} has unspecified contents to add")
        if parts & held.parts:
            raise ValueError(f"rank {_lowest(parts & held.parts)}'s contribution would be added twice")
        parts |= held.parts
        inputs.append(held.expression)
    # One number per primitive and sequence of inputs: equal numbers are sums in the same order, so bitwise equal.
    key = (step.primitive, tuple(inputs))
    # Expressions below the world size are the contributions themselves.
    expression = expressions.setdefault(key, len(contents) + len(expressions))
    for rank in group:
        contents[rank] = None if step.op == "reduce" else _Contents(parts, expression)
    contents[group[0]] = _Contents(parts, expression)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _group_text(op: Op, group: tuple[int, ...]) -> str:
    if op == "all_reduce":
        return ranks_text(group)
    first, rest = str(group[0]), ranks_text(group[1:])
    return f"{rest} -> {first}" if op == "reduce" else f"{first} -> {rest}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in their order, runs joined: ``0-2 6``."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return " ".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a} {b}" for a, b in runs)
