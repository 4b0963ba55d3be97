"""What goes wrong with serving; each replays from its fields, so that it arrives as itself through Ray."""

from __future__ import annotations

from rayagi.run.errors import RunError


class DatasetError(RunError):
    """A folder is no dataset, or not one that this can be added to."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class WriterError(RunError):
    """The process that writes a GMI's experience failed, is too slow, or is gone."""

    def __init__(self, gmi: int, reason: str) -> None:
        super().__init__(gmi, reason)
        self.gmi, self.reason = gmi, reason

    def __str__(self) -> str:
        return f"the writer of GMI {self.gmi} {self.reason}"
