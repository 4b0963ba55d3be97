"""What goes wrong among members of a group, in terms that the reader can act on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rendezvous raises what is defined here
    from collectives.rendezvous import Member


class CommunicatorError(RuntimeError):
    """A collective operation did not complete; the communicator that raised it is unusable from here on.

    Attributes:
        operation: what was being done, e.g. ``all_reduce``
        rank: who noticed
        waiting_for: whom or what it waited for, e.g. ``rank 1 (pid 4711)``
        waited_s: for how long, in seconds
        detail: what the transport said
        step: which part of the operation it was, e.g. ``step 2 of 3, reduce by ip among 0 1``; empty for a whole one
        awaited: members of whom the transport cannot say which one it waited for; set by those that cannot
    """

    awaited: tuple[Member, ...] = ()

    def __init__(
        self, operation: str, rank: int, waiting_for: str, waited_s: float, detail: str, step: str = ""
    ) -> None:
        super().__init__(operation, rank, waiting_for, waited_s, detail, step)
        self.operation = operation
        self.rank = rank
        self.waiting_for = waiting_for
        self.waited_s = waited_s
        self.detail = detail
        self.step = step

    def __str__(self) -> str:
        where = f" in {self.step}" if self.step else ""
        return (
            f"{self.operation} on rank {self.rank} failed{where} after {self.waited_s:.1f} s waiting for "
            f"{self.waiting_for}: {self.detail}"
        )


class MismatchedCallError(CommunicatorError):
    """Members called different operations. All of them raise this, before data moves; ``detail`` names both calls."""


class MemberLostError(CommunicatorError):
    """A member's process or host is gone. The others raise this wherever they are, and form the next generation.

    Attributes:
        lost: who is gone
        reason: how that was noticed
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
        self.args = (operation, rank, lost, waited_s, step, reason)  # what pickle replays
        self.lost = lost
        self.reason = reason


class RendezvousError(RuntimeError):
    """Members could not find each other: a wrong, duplicate or missing member.

    Attributes:
        generation: which meeting
        reason: what is wrong, and what was expected
    """

    def __init__(self, generation: int, reason: str) -> None:
        super().__init__(generation, reason)
        self.generation = generation
        self.reason = reason

    def __str__(self) -> str:
        return f"rendezvous {self.generation}: {self.reason}"


class LayoutError(ValueError):
    """A layout that says nothing, too much, or contradicts itself.

    Attributes:
        layout: what was given
        reason: what is wrong with it, and what would be right
    """

    def __init__(self, layout: str, reason: str) -> None:
        super().__init__(layout, reason)
        self.layout = layout
        self.reason = reason

    def __str__(self) -> str:
        return f"layout '{self.layout}': {self.reason}"


class CompositionError(ValueError):
    """A composition that does not apply to a layout, or a schedule that would not reduce correctly.

    Attributes:
        composition: which one, e.g. ``rp_only``
        layout: on which layout, as text
        reason: why not
    """

    def __init__(self, composition: str, layout: str, reason: str) -> None:
        super().__init__(composition, layout, reason)
        self.composition = composition
        self.layout = layout
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.composition} on {self.layout}: {self.reason}"


class ProfileError(ValueError):
    """A profile that cannot be read, or does not say what a plan needs.

    Attributes:
        profile: its path or machine
        reason: what is wrong or missing
    """

    def __init__(self, profile: str, reason: str) -> None:
        super().__init__(profile, reason)
        self.profile = profile
        self.reason = reason

    def __str__(self) -> str:
        return f"profile {self.profile}: {self.reason}"
