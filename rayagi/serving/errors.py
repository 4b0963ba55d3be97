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


class ListenError(RunError):
    """A server cannot have the address that it was given."""

    def __init__(self, address: str, reason: str, hint: str) -> None:
        super().__init__(address, reason, hint)
        self.address, self.reason, self.hint = address, reason, hint

    def __str__(self) -> str:
        return f"cannot listen at {self.address}: {self.reason}; {self.hint}"


class ExportError(RunError):
    """A dataset cannot be written as was asked."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"
