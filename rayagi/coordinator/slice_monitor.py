"""Slice monitor: health of the GPU shares of a session's GMIs."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from placement.backends.base import SliceHealth
from placement.errors import PartitionError, SliceLostError
from placement.plan import PlacementPlan

if TYPE_CHECKING:  # as in session.py
    from actors.partitioners import Partitioners


class SliceMonitor:
    """Queries the partitioners on the GPUs' hosts."""

    def __init__(self, plan: PlacementPlan, partitioners: Partitioners) -> None:
        self._plan, self._partitioners = plan, partitioners

    def health(self) -> list[SliceHealth]:
        """Health and memory of each GMI's share; empty without partitioned GPUs.

        Raises:
            PartitionError: a host does not respond.
        """
        return self._partitioners.health()

    def update_pid(self, index: int, pid: int) -> None:
        """Record the new process of a restarted GMI."""
        self._partitioners.update_pid(index, pid)

    def raise_if_lost(self) -> None:
        """Raise if a share has failed. A host that does not respond is ignored: the caller's wait has its own time limit.

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
