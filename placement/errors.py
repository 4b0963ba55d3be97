"""Errors of placement. Every message names the value, the limit, and what the user can do.

Constructors pass their fields to ``Exception`` unchanged, and ``__str__`` builds the message, so that errors survive
pickling in a Ray task.
"""

from __future__ import annotations


def counted(number: int, noun: str, several: str = "") -> str:
    """``1 core``, ``3,000 cores``, ``no cores``: a count for messages; ``several``: a plural without s."""
    return f"{f'{number:,}' if number else 'no'} {noun if number == 1 else several or f'{noun}s'}"


class PlacementError(Exception):
    """Base class of this package's errors."""


class _HintedError(PlacementError):
    """What it is about, what is wrong with it, and what the user can do."""

    def __init__(self, what: str, problem: str, hint: str) -> None:
        super().__init__(what, problem, hint)
        self.what, self.problem, self.hint = what, problem, hint

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}. {self.hint}."


class InventoryError(_HintedError):
    """A machine's inventory could not be read: a driver error, an invalid file, or a node that does not respond."""


class PlanError(_HintedError):
    """The request does not fit the machine, even if nothing else runs on it."""


class PartitionError(_HintedError):
    """A GPU could not be partitioned, or a partition could not be undone."""


class ReservationError(PlacementError):
    """Ray did not grant the plan's bundles, or granted them on other nodes than planned.

    Attributes:
        asked: the bundles, as text
        available: total and free resources of each node, as text
        would_fit: what the user can do
        waited_s: seconds waited before giving up; 0 if waiting could not help
    """

    def __init__(self, asked: str, available: str, would_fit: str, waited_s: float) -> None:
        super().__init__(asked, available, would_fit, waited_s)
        self.asked, self.available, self.would_fit, self.waited_s = asked, available, would_fit, waited_s

    def __str__(self) -> str:
        waited = f" Waited {self.waited_s:.1f} s." if self.waited_s > 0 else ""
        return f"Asked: {self.asked}. There is: {self.available}.{waited} {self.would_fit}."


class SliceError(PlacementError):
    """A process could not be confined to its slice."""

    def __init__(self, wanted: str, available: str, hint: str) -> None:
        super().__init__(wanted, available, hint)
        self.wanted, self.available, self.hint = wanted, available, hint

    def __str__(self) -> str:
        return f"Wanted {self.wanted}; there is {self.available}. {self.hint}."


class GpuMemoryError(PlacementError):
    """A process needed more memory of its GPU than it has there."""

    def __init__(self, gmi_slice: str, problem: str) -> None:
        super().__init__(gmi_slice, problem)
        self.slice, self.problem = gmi_slice, problem

    def __str__(self) -> str:
        return (
            f"{self.slice} has too little memory: {self.problem}. Use fewer environments (--num-envs), smaller networks or "
            "minibatches, or fewer GMIs on the GPU."
        )


class SliceLostError(PlacementError):
    """The share of a running GMI has failed: its MPS daemon has ended or is in FAULT, or its MIG instance was destroyed."""

    def __init__(self, slices: tuple[str, ...], problem: str) -> None:
        super().__init__(slices, problem)
        self.slices, self.problem = slices, problem

    def __str__(self) -> str:
        lost = f"{self.slices[0]} was" if len(self.slices) == 1 else f"{', '.join(self.slices)} were"
        return f"{lost} lost: {self.problem.rstrip('.')}. Restart the GMIs from the last checkpoint."


class LedgerError(PlacementError):
    """A ledger file cannot be parsed; what it recorded has to be cleaned up by hand."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path} {self.problem}. Check for leftover MPS daemons or MIG instances of yours, then delete the file."
