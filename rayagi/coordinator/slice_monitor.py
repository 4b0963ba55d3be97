"""The shares of GPUs under a session's GMIs: how they are, and whether one has failed."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from placement.backends.base import SliceHealth
from placement.errors import PartitionError, SliceLostError
from placement.plan import PlacementPlan

if TYPE_CHECKING:  # as in session.py
    from actors.partitioners import Partitioners


class SliceMonitor:
    """Asks the hosts that carved them."""

    def __init__(self, plan: PlacementPlan, partitioners: Partitioners) -> None:
        self._plan, self._partitioners = plan, partitioners

    def health(self) -> list[SliceHealth]:
        """How each GMI's share of its GPU is, with its memory; empty where nothing had to be carved.

        Raises:
            PartitionError: a host does not answer.
        """
        return self._partitioners.health()

    def update_pid(self, index: int, pid: int) -> None:
        """A GMI was started anew in another process."""
        self._partitioners.update_pid(index, pid)

    def raise_if_lost(self) -> None:
        """A host that does not answer says nothing of its slices: what is waited for has a limit of its own.

        Raises:
            SliceLostError: a share of a GPU has failed.
        """
        with suppress(PartitionError):
            lost = {
                f"GMI {index} {self._plan.slices[index].label()}": health.text
                for index, health in enumerate(self.health())
                if health.state == "lost"
            }
            if lost:
                raise SliceLostError(tuple(lost), "; ".join(dict.fromkeys(lost.values())))
