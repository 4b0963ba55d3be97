"""Errors of collectives, with the facts that a caller can act on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rendezvous imports this module
    from collectives.rendezvous import Member


def counted(number: int, noun: str, several: str = "") -> str:
    """``1 thread``, ``2,000 threads``: a count for messages; ``several``: a plural without s."""
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


class CommunicatorError(RuntimeError):
    """A collective operation did not complete; the communicator that raised it is unusable from here on.

    Attributes:
        operation: e.g. ``all_reduce``
        rank: of the member that raised
        waiting_for: the awaited member or resource, e.g. ``rank 1 (pid 4711)``
        waited_s: seconds waited
        detail: the transport's message
        step: part of the operation, e.g. ``step 2 of 3, reduce by ip among 0 1``; empty for a whole one
        awaited: all members that may be the missing one, if the transport cannot tell which
    """

    awaited: tuple[Member, ...] = ()

    def __init__(
        self, operation: str, rank: int, waiting_for: str, waited_s: float, detail: str, step: str = ""
    ) -> None:
        super().__init__(operation, rank, waiting_for, waited_s, detail, step)
        self.operation, self.rank, self.waiting_for, self.waited_s = operation, rank, waiting_for, waited_s
        self.detail, self.step = detail, step

    def __str__(self) -> str:
        where = f" in {self.step}" if self.step else ""
        return (
            f"{self.operation} on rank {self.rank} failed{where} after {self.waited_s:.1f} s waiting for "
            f"{self.waiting_for}: {self.detail}"
        )


class MismatchedCallError(CommunicatorError):
    """Members called different operations. All of them raise it before data moves; ``detail`` names both calls."""


class MemberLostError(CommunicatorError):
    """A member's process or host is lost. The other members raise it in any operation.

    Attributes:
        lost: the lost members
        reason: how the loss was detected
    """

    def __init__(
        self,
        operation: str,
        rank: int,
        lost: tuple[Member, ...],
        waited_s: float,
        step: str = "",
        reason: str = "its process has ended",
    ) -> None:
        super().__init__(operation, rank, ", ".join(map(str, lost)), waited_s, reason, step)
        self.args = (operation, rank, lost, waited_s, step, reason)  # pickle passes them to __init__
        self.lost, self.reason = lost, reason


class RendezvousError(RuntimeError):
    """Members could not find each other: a wrong, duplicate or missing member.

    Attributes:
        generation: the one that was to form
        reason: what is wrong, and what was expected
    """

    def __init__(self, generation: int, reason: str) -> None:
        super().__init__(generation, reason)
        self.generation, self.reason = generation, reason

    def __str__(self) -> str:
        return f"rendezvous {self.generation}: {self.reason}"


class LayoutError(ValueError):
    """An invalid layout.

    Attributes:
        layout: as given
        reason: what is wrong with it, and what would be valid
    """

    def __init__(self, layout: str, reason: str) -> None:
        super().__init__(layout, reason)
        self.layout, self.reason = layout, reason

    def __str__(self) -> str:
        return f"layout '{self.layout}': {self.reason}"


class CompositionError(ValueError):
    """A composition that does not apply to a layout, or a schedule that would not reduce correctly.

    Attributes:
        composition: its name, e.g. ``rp_only``
        layout: as text
        reason: why it does not apply
    """

    def __init__(self, composition: str, layout: str, reason: str) -> None:
        super().__init__(composition, layout, reason)
        self.composition, self.layout, self.reason = composition, layout, reason

    def __str__(self) -> str:
        return f"{self.composition} on {self.layout}: {self.reason}"


class ProfileError(ValueError):
    """A profile that cannot be read, or lacks measurements that a plan needs.

    Attributes:
        profile: its path or machine
        reason: what is wrong or missing
    """

    def __init__(self, profile: str, reason: str) -> None:
        super().__init__(profile, reason)
        self.profile, self.reason = profile, reason

    def __str__(self) -> str:
        return f"profile {self.profile}: {self.reason}"
