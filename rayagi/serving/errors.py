"""Errors of serving. Each is rebuilt from its fields, so that Ray passes it with its own type."""

from __future__ import annotations

from rayagi.run.errors import PathError, RunError


class DatasetError(PathError):
    """A folder is no dataset, or one that cannot be appended to."""


class WriterError(RunError):
    """The writer process of a GMI failed, is too slow, or died."""

    def __init__(self, gmi: int, reason: str) -> None:
        super().__init__(gmi, reason)
        self.gmi, self.reason = gmi, reason

    def __str__(self) -> str:
        return f"the writer of GMI {self.gmi} {self.reason}"


class ListenError(RunError):
    """A server cannot listen at its address."""

    def __init__(self, address: str, reason: str, hint: str) -> None:
        super().__init__(address, reason, hint)
        self.address, self.reason, self.hint = address, reason, hint

    def __str__(self) -> str:
        return f"cannot listen at {self.address}: {self.reason}; {self.hint}"


NO_EPISODES = (
    "nothing was written: the dataset has no episodes to export; without --whole, begun ones count too"
)


class ExportError(PathError):
    """A dataset or a policy cannot be exported as requested."""
