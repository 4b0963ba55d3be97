"""What can go wrong when fitting work onto machines. Every text names the value, the limit and the way out.

Constructors hand their fields to ``Exception`` unchanged and the text is built in ``__str__``, so that the
errors survive pickling on their way out of a Ray task.
"""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 core``, ``3 cores``, ``no cores``: for texts that people read."""
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


class PlacementError(Exception):
    """Base of everything that this package raises on purpose."""


class InventoryError(PlacementError):
    """A machine could not be read: a driver that answers with an error, a bad file, a silent node."""

    def __init__(self, source: str, problem: str, hint: str) -> None:
        super().__init__(source, problem, hint)
        self.source = source
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}. {self.hint}."


class PlanError(PlacementError):
    """What was asked does not fit the machine, whatever else is running on it."""

    def __init__(self, asked: str, limit: str, hint: str) -> None:
        super().__init__(asked, limit, hint)
        self.asked = asked
        self.limit = limit
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.asked}: {self.limit}. {self.hint}."


class ReservationError(PlacementError):
    """Ray did not grant the plan's bundles, or granted them elsewhere than planned.

    Attributes:
        asked: the bundles, as text
        available: what each node has and what of it is free, as text
        would_fit: the way out
        waited_s: seconds waited before giving up; 0 where no waiting could have helped
    """

    def __init__(self, asked: str, available: str, would_fit: str, waited_s: float) -> None:
        super().__init__(asked, available, would_fit, waited_s)
        self.asked = asked
        self.available = available
        self.would_fit = would_fit
        self.waited_s = waited_s

    def __str__(self) -> str:
        waited = f" Waited {self.waited_s:.1f} s." if self.waited_s > 0 else ""
        return f"Asked: {self.asked}. There is: {self.available}.{waited} {self.would_fit}."


class SliceError(PlacementError):
    """A process could not be confined to its slice."""

    def __init__(self, wanted: str, available: str, hint: str) -> None:
        super().__init__(wanted, available, hint)
        self.wanted = wanted
        self.available = available
        self.hint = hint

    def __str__(self) -> str:
        return f"Wanted {self.wanted}; there is {self.available}. {self.hint}."


class PartitionError(PlacementError):
    """A GPU could not be cut, or what was cut could not be undone."""

    def __init__(self, what: str, problem: str, hint: str) -> None:
        super().__init__(what, problem, hint)
        self.what = what
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}. {self.hint}."


class SliceLostError(PlacementError):
    """The share under a running GMI has failed: its MPS daemon is gone or in FAULT, its MIG instance was destroyed."""

    def __init__(self, slices: tuple[str, ...], problem: str) -> None:
        super().__init__(slices, problem)
        self.slices = slices
        self.problem = problem

    def __str__(self) -> str:
        lost = f"{self.slices[0]} was" if len(self.slices) == 1 else f"{', '.join(self.slices)} were"
        return f"{lost} lost: {self.problem.rstrip('.')}. Start the GMIs anew from the last checkpoint."


class LedgerError(PlacementError):
    """A ledger's file cannot be understood: what it says is ours can only be mended by hand."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path} {self.problem}. See whether an MPS daemon or MIG instance of yours is left, then delete it."
