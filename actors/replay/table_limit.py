"""Rate limit of a table of several shards: readers are judged by the sum of the shards' errors, writers by their shard's.

So that one side is always admitted, error is moved between shards: a shard that refuses rows though the mean of all shards
admits them gets the mean, and so do the others. Then readers wait only if

    sum of rows < max of min_size, and no shard refuses rows   or   sum of errors <= -sum of error buffers,

and in both cases every shard admits writers; in the second its error, the mean, is at most 0. Shards may have other limits
than their table's others: one with a small min_size may refuse rows before the largest min_size is reached.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from actors.replay import kernel
from actors.replay.errors import RateLimitedError, ReplayTimeoutError
from placement.errors import counted

if TYPE_CHECKING:
    from actors.replay.table import ShardedTable

_POLL_S = 0.01
"""Between two questions of a waiting reader."""


_STEP = 2.0**-30
"""Of a change of a shard's error, in rows."""


class ShardError(NamedTuple):
    """What one shard's limiter adds to the table's.

    Attributes:
        rows: that can be selected
        min_size, below, above, timeout_s: of its limit
        error: of its limiter, without what is missing to min_size
    """

    rows: int
    min_size: int
    below: float
    above: float
    timeout_s: float
    error: float

    @property
    def is_judged(self) -> bool:
        """Whether there is a ratio of samples to inserts."""
        return self.below < math.inf or self.above < math.inf

    @property
    def refuses_inserts(self) -> bool:
        """As kernel.c judges them."""
        return self.rows >= self.min_size and self.error > self.above


def wait_to_sample(table: ShardedTable, rows: int, keep_waiting: Callable[[], bool]) -> None:
    """As of ``ReplayStore.wait_to_sample``, for all shards of a table.

    Raises:
        ReplayTimeoutError: the least timeout_s of the shards has passed.
        RateLimitedError: ``keep_waiting`` has returned False.
    """
    if admits_sample(errors := balanced(table)):
        return
    limiter = next((store.limiter for store in table.stores_here()), None)
    since = time.monotonic()
    place = -1 if limiter is None else limiter.begin(kernel.SAMPLE, rows)
    try:
        while not admits_sample(errors):
            timeout_s = min(found.timeout_s for found in errors)
            waited_s = time.monotonic() - since
            if waited_s >= timeout_s:
                raise ReplayTimeoutError(_explained(rows, waited_s, errors))
            if not keep_waiting():
                raise RateLimitedError("sampling was given up while it waited for the rate limiter")
            time.sleep(min(_POLL_S, timeout_s - waited_s))
            errors = balanced(table)
    finally:
        if limiter is not None:
            limiter.end(kernel.SAMPLE, place, time.monotonic() - since)


def admits_sample(errors: Sequence[ShardError]) -> bool:
    """Whether a selection from a table of these shards would not wait."""
    if not errors:
        return True
    judged = [found for found in errors if found.is_judged]
    has_rows = sum(found.rows for found in errors) >= max(found.min_size for found in errors)
    return (has_rows or any(found.refuses_inserts for found in errors)) and (
        not judged or math.fsum(found.error for found in judged) > -sum(found.below for found in judged)
    )


def balanced(table: ShardedTable) -> list[ShardError]:
    """The errors of all shards that have a limit, after error was moved to where it admits writers.

    A process that is killed meanwhile leaves the sum of errors off by what it had moved.
    """
    errors = {
        shard: ShardError(*found)
        for shard, found in table.ask("error", dict.fromkeys(table.present, ())).items()
        if found is not None
    }
    shifts = shifts_of({shard: found for shard, found in errors.items() if found.is_judged})
    moved = table.ask("shift_error", {shard: (shift,) for shard, shift in shifts.items()}) if shifts else {}
    return [
        found._replace(error=found.error + shifts[shard]) if shard in moved else found
        for shard, found in errors.items()
    ]


def shifts_of(errors: Mapping[int, ShardError]) -> dict[int, float]:
    """What each shard's error changes by, in sum 0; empty if no shard refuses rows that the mean admits.

    A change is rounded down to a multiple of _STEP: added to an error, it is exact, and none is above the mean after it.
    """
    if not errors:
        return {}
    mean = math.fsum(found.error for found in errors.values()) / len(errors)
    if not any(found.refuses_inserts and mean <= found.above for found in errors.values()):
        return {}
    return {shard: math.floor((mean - found.error) / _STEP) * _STEP for shard, found in errors.items()}


def _explained(rows: int, waited_s: float, errors: Sequence[ShardError]) -> str:
    size, needed = sum(found.rows for found in errors), max(found.min_size for found in errors)
    error = sum(found.error for found in errors if found.is_judged)
    why = (
        f"its limits need {needed - size} more" if size < needed else f"the sum of their errors is {error:g}"
    )
    return (
        f"drawing {counted(rows, 'row')} has waited {waited_s:.3g} s for the rate limiters of "
        f"{counted(len(errors), 'shard')}: the table has {counted(size, 'row')}, and {why}; it "
        "goes on when rows are inserted by this or another process, or with another limit "
        "(limiter.set)"
    )
