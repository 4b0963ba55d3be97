"""Context managers that close on exit."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self


class ClosesOnExit:
    """A resource whose ``with`` block closes it."""

    @abstractmethod
    def close(self) -> None:
        """Release the resource."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
