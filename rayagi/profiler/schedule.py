"""Which iterations are recorded."""

from __future__ import annotations

from dataclasses import dataclass

from rayagi.profiler.native import OFF, RECORD, WARM_UP


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Cycles of iterations: skipped, then warming up, then recorded.

    An iteration that warms up does all work of recording, but nothing is kept. With a schedule nothing is recorded before
    the first iteration, nor in processes without iterations.

    Raises:
        ValueError: a count out of range.
    """

    skip: int = 0
    warm_up: int = 1
    record: int = 10
    repeat: int = 1
    """Number of cycles. Nothing is recorded after the last."""

    def __post_init__(self) -> None:
        for name, least in (("skip", 0), ("warm_up", 0), ("record", 1), ("repeat", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} of a profile's schedule is an integer >= {least}, not {value!r}")

    def mode(self, iteration: int) -> int:
        """OFF, WARM_UP or RECORD for an iteration, counted from 0."""
        cycle, position = divmod(iteration, self.skip + self.warm_up + self.record)
        if cycle >= self.repeat or position < self.skip:
            return OFF
        return WARM_UP if position < self.skip + self.warm_up else RECORD
