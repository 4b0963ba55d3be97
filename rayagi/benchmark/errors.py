"""Errors of a benchmark."""

from __future__ import annotations


class BenchmarkError(RuntimeError):
    """A measurement failed."""


class MemberEndedError(BenchmarkError):
    """A member's process ended, or did not answer in time."""

    def __init__(self, rank: int, asked: str, happened: str) -> None:
        super().__init__(rank, asked, happened)
        self.rank, self.asked, self.happened = rank, asked, happened

    def __str__(self) -> str:
        return f"rank {self.rank} was asked to {self.asked} and {self.happened}"


class WrongResultError(BenchmarkError):
    """A composition reduced wrongly, so it is not timed."""

    def __init__(self, composition: str, layout: str, nbytes: int, wrong: str) -> None:
        super().__init__(composition, layout, nbytes, wrong)
        self.composition, self.layout, self.nbytes, self.wrong = composition, layout, nbytes, wrong

    def __str__(self) -> str:
        return f"{self.composition} on {self.layout} reduced {self.nbytes} bytes wrongly: {self.wrong}"
