"""The shares of GPUs under a session's GMIs: how they are, and whether one has failed."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from placement.backends.base import Health
from placement.errors import CarvingError, SliceLostError
from placement.plan import Plan

if TYPE_CHECKING:  # as in session.py
    from actors.carvers import Carvers


class SliceWatch:
    """Asks the hosts that carved them."""

    def __init__(self, plan: Plan, carvers: Carvers) -> None:
        self._plan, self._carvers = plan, carvers

    def health(self) -> list[Health]:
        """How each GMI's share of its GPU is, with its memory; empty where nothing had to be carved.

        Raises:
            CarvingError: a host does not answer.
        """
        return self._carvers.health()

    def moved(self, index: int, pid: int) -> None:
        """A GMI was started anew in another process."""
        self._carvers.moved(index, pid)

    def refuse_lost(self) -> None:
        """A host that does not answer says nothing of its slices: what is waited for has a limit of its own.

        Raises:
            SliceLostError: a share of a GPU has failed.
        """
        with suppress(CarvingError):
            lost = {
                f"GMI {index} {self._plan.slices[index].label()}": health.text
                for index, health in enumerate(self.health())
                if health.state == "lost"
            }
            if lost:
                raise SliceLostError(tuple(lost), "; ".join(dict.fromkeys(lost.values())))
