"""Rate limiter of a store: rows drawn per row inserted, in shared memory, so that it is one for all processes of the host.

docs/explanation/replay.md has the rule and why it cannot deadlock. Counters, rule and futexes are in kernel.c.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from actors.replay import kernel
from actors.replay.errors import ReplayBusyError, ReplayDamagedError, ReplayError, ReplayTimeoutError
from actors.replay.kernel import HeaderStruct, LimitStruct, WaiterStruct
from actors.replay.table_limit import ShardError
from placement.errors import counted

if TYPE_CHECKING:
    from actors.replay.store import ReplayStore

SLEEP_S = 0.05
"""Longest sleep before a waiting request looks again by itself: who should have woken it may have been killed."""
MOST_SAMPLES_PER_INSERT = 1e9
"""Beyond, a row would be drawn for minutes before the next is admitted, and the error would not be exact."""
_FIELDS = tuple(field[0] for field in LimitStruct._fields_)
_SUSPENDED = "another process holds the store's lock and is suspended: the limit is unchanged"
KINDS: tuple[Literal["insert", "sample"], ...] = ("insert", "sample")
"""Names of INSERT and SAMPLE of ``kernel``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RateLimit:
    """How many rows may be drawn per row inserted, on the average.

    The error is samples_per_insert * inserts - samples, in rows since the limit was set, without those inserts that first
    made up min_size. Insertion is admitted while error <= error_buffer, sampling while error > -error_buffer.
    """

    samples_per_insert: float | None = None
    """Rows drawn, replacement included, per row inserted. None: any number; only min_size counts."""
    min_size: int = 1
    """Rows that must be there before any is drawn. Below, insertion is not limited."""
    error_buffer: float | tuple[float, float] = 0.0
    """How far the error may be from 0: one number, or (towards samples, towards inserts). inf: that side never waits."""
    timeout_s: float = math.inf
    """Longest wait of one request."""

    def __post_init__(self) -> None:
        if self.samples_per_insert is not None and not 0 < self.samples_per_insert <= MOST_SAMPLES_PER_INSERT:
            raise ReplayError(
                f"samples_per_insert is {self.samples_per_insert}: use a positive number up to "
                f"{MOST_SAMPLES_PER_INSERT:g}, or None"
            )
        if not 1 <= self.min_size < 2**31:
            raise ReplayError(f"min_size is {self.min_size}: use 1 to the store's capacity")
        if len(self._buffers) != 2 or not all(side >= 0 for side in self._buffers):
            raise ReplayError(
                f"error_buffer is {self.error_buffer}: use one number that is at least 0, or two of them"
            )
        if not self.timeout_s > 0:
            raise ReplayError(f"timeout_s is {self.timeout_s}: use a positive number")

    @property
    def _buffers(self) -> tuple[float, ...]:
        """Towards samples, towards inserts."""
        both = self.error_buffer
        return tuple(map(float, both)) if isinstance(both, tuple) else (float(both), float(both))

    def to_struct(self) -> LimitStruct:
        """For the kernel, with counters of 0."""
        # Without a ratio, the error is minus the number of samples, which no side is judged by.
        below, above = (math.inf, math.inf) if self.samples_per_insert is None else self._buffers
        return LimitStruct(
            self.samples_per_insert or 0.0, below, above, 0.0, self.timeout_s, self.min_size, 0, 0
        )

    @classmethod
    def from_struct(cls, struct: LimitStruct) -> Self:
        """Inverse of ``to_struct``, with the error buffer as two numbers."""
        return cls(
            samples_per_insert=struct.samples_per_insert or None,
            min_size=struct.min_size,
            error_buffer=(struct.below, struct.above),
            timeout_s=struct.timeout_s,
        )


class WaitingRequest(NamedTuple):
    """A request that waits for the rate limiter."""

    pid: int
    kind: Literal["insert", "sample"]
    rows: int
    """That it wants to insert or draw."""
    waited_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LimiterStatus:
    """A store's rate limiter at one moment."""

    limit: RateLimit | None
    inserts: int
    """Rows inserted since the limit was set; negative while min_size was not reached for the first time."""
    samples: int
    """Rows drawn since the limit was set."""
    error: float
    """samples_per_insert * inserts - samples, plus what was carried over when the limit was set."""
    admits_insert: bool
    """Whether an insertion would not wait."""
    admits_sample: bool
    """Whether a selection would not wait."""
    waiting: tuple[WaitingRequest, ...]
    """Requests of living processes that wait now; at most 32 are named."""
    waits: dict[str, int]
    """Requests that have waited and no longer do, by kind."""
    waited_s: dict[str, float]
    """Time that they have waited in total, by kind."""

    def to_message(self) -> dict[str, Any]:
        """As numbers and texts."""
        values = {name: getattr(self, name) for name in self.__slots__}
        limit = self.limit
        return values | {
            "limit": None if limit is None else [getattr(limit, name) for name in limit.__slots__]
        }

    @classmethod
    def from_message(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of ``to_message``."""
        limit = values["limit"]
        if limit is not None:
            ratio, min_size, buffer, timeout_s = limit
            limit = RateLimit(
                samples_per_insert=ratio,
                min_size=min_size,
                error_buffer=tuple(buffer) if isinstance(buffer, (list, tuple)) else buffer,
                timeout_s=timeout_s,
            )
        waiting = tuple(WaitingRequest(*request) for request in values["waiting"])
        return cls(**{**values, "limit": limit, "waiting": waiting})

    @classmethod
    def merged(cls, shards: Sequence[Self]) -> Self:
        """Of a table of several shards: the limit is the first that there is, and inserts are admitted if all admit them."""
        return cls(
            limit=next((shard.limit for shard in shards if shard.limit is not None), None),
            inserts=sum(shard.inserts for shard in shards),
            samples=sum(shard.samples for shard in shards),
            error=sum(shard.error for shard in shards),
            admits_insert=all(shard.admits_insert for shard in shards),
            admits_sample=all(shard.admits_sample for shard in shards),
            waiting=tuple(request for shard in shards for request in shard.waiting),
            waits={kind: sum(shard.waits[kind] for shard in shards) for kind in KINDS},
            waited_s={kind: sum(shard.waited_s[kind] for shard in shards) for kind in KINDS},
        )


class Limiter:
    """A store's rate limiter, as ``ReplayStore.limiter`` gives it."""

    def __init__(self, store: ReplayStore, header: HeaderStruct) -> None:
        """Of a store and its header."""
        self.store, self._header, self._library = store, header, kernel.library()

    def set(self, limit: RateLimit | None) -> None:
        """Change the limit for all processes; who waits is judged by the new one at once.

        Inserts and samples count from now on. The error stays what it was, as far as the new error buffer has it.

        Raises:
            ReplayError: the store can never have min_size rows.
        """
        self._change(limit, None if limit is None else limit.to_struct(), restored=False)

    def state(self) -> dict[str, Any] | None:
        """All that ``restore`` needs, as values of JSON (inf is None); None without a limit."""
        return state_of(self._header, self.store.endpoint)

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Set the limit and its counters as ``state`` returned them, in this or another store.

        Raises:
            ReplayError: ``state`` is no such value, or the store can never have min_size rows.
        """
        if state is None:
            self.set(None)
            return
        struct = struct_of(state)
        self._change(RateLimit.from_struct(struct), struct, restored=True)

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Go on as the limiter of a checkpoint whose rows this store has now.

        This store's limit stays. If the saved one was the same, its counters go on; else they begin anew, with the saved
        error as far as this store's error buffer has it. No other process may use the store meanwhile.

        Raises:
            ReplayError: ``state`` is no such value.
        """
        saved, own = None if state is None else struct_of(state), self._struct()
        if own is None:
            return
        rule = ("samples_per_insert", "below", "above", "min_size")
        if saved is not None and all(getattr(saved, name) == getattr(own, name) for name in rule):
            own.offset, own.inserts, own.samples = saved.offset, saved.inserts, saved.samples
        else:
            error = 0.0
            if saved is not None:
                saved.inserts = max(0, saved.inserts)
                error = error_of(saved)
            own.offset = min(max(error, -own.below), own.above)
            own.inserts, own.samples = min(0, len(self.store) - own.min_size), 0
        self._change(RateLimit.from_struct(own), own, restored=True)

    def status(self) -> LimiterStatus:
        """The limit, its counters, who waits and since when."""
        struct, ended = self._struct(), self._header
        places = (WaiterStruct * kernel.WAITERS)()
        found = max(0, self._library.replay_waiters(self.store.native, ctypes.addressof(places)))
        return LimiterStatus(
            limit=None if struct is None else RateLimit.from_struct(struct),
            inserts=0 if struct is None else struct.inserts,
            samples=0 if struct is None else struct.samples,
            error=0.0 if struct is None else error_of(struct),
            admits_insert=self.admits(kernel.INSERT),
            admits_sample=self.admits(kernel.SAMPLE),
            waiting=tuple(
                WaitingRequest(w.owner >> 42, KINDS[w.kind], w.rows, w.since_ns / 1e9) for w in places[:found]
            ),
            waits=dict(zip(KINDS, ended.waits, strict=True)),
            waited_s={kind: ns / 1e9 for kind, ns in zip(KINDS, ended.waited_ns, strict=True)},
        )

    def shard_error(self) -> ShardError | None:
        """What this limiter adds to that of a table of several shards; None without a limit."""
        struct = self._struct()
        if struct is None:
            return None
        early = struct.samples_per_insert * min(
            0, struct.inserts
        )  # rows that are missing to min_size are no error
        return ShardError(
            rows=len(self.store),
            min_size=struct.min_size,
            below=struct.below,
            above=struct.above,
            timeout_s=struct.timeout_s,
            error=error_of(struct) - early,
        )

    def shift_error(self, shift: float) -> None:
        """Add to the error.

        Raises:
            ReplayError: ``shift`` is not finite.
            ReplayBusyError: another process holds the store's lock.
        """
        if not math.isfinite(shift):
            raise ReplayError(
                f"an error of {shift} was to be added to the rate limiter's: use a finite number"
            )
        self._refuse(self._library.replay_shift_error(self.store.native, shift))

    def admits(self, kind: int, sleep_s: float = 0.0) -> bool:
        """Whether a request of INSERT or SAMPLE of ``kernel`` is admitted, now or after a sleep of at most ``sleep_s``."""
        return bool(self._library.replay_wait(self.store.native, kind, int(sleep_s * 1e9)))

    def timeout_s(self) -> float:
        """Longest wait of a request; inf without a limit."""
        struct = self._struct()
        return math.inf if struct is None else float(struct.timeout_s)

    def _struct(self) -> LimitStruct | None:
        return _struct_in(self._header, self.store.endpoint)

    def begin(self, kind: int, rows: int) -> int:
        """Name this process as waiting. Returns its place; below 0 if there is none."""
        return int(self._library.replay_wait_begin(self.store.native, kind, rows))

    def end(self, kind: int, place: int, waited_s: float) -> None:
        """The wait has ended."""
        self._library.replay_wait_end(self.store.native, kind, place, int(waited_s * 1e9))

    def _change(self, limit: RateLimit | None, struct: LimitStruct | None, *, restored: bool) -> None:
        if limit is not None and limit.min_size > self.store.capacity:
            raise ReplayError(
                f"min_size is {limit.min_size} where the store has "
                f"{counted(self.store.capacity, 'row')}: nothing could ever be drawn"
            )
        at = None if struct is None else ctypes.addressof(struct)
        self._refuse(self._library.replay_limit(self.store.native, at, restored))

    def _refuse(self, result: int) -> None:
        """Raise the error of a request that failed."""
        if result == kernel.DAMAGED:
            raise ReplayDamagedError(self.store.endpoint)
        if result < 0:
            raise ReplayBusyError(_SUSPENDED)


def state_of(header: HeaderStruct, endpoint: str) -> dict[str, Any] | None:
    """``Limiter.state`` of a store's header, or of a copy of it. Raises ReplayDamagedError, with the store's endpoint."""
    struct = _struct_in(header, endpoint)
    if struct is None:
        return None
    found = {name: getattr(struct, name) for name in _FIELDS}
    return {name: None if value == math.inf else value for name, value in found.items()}


def struct_of(state: Mapping[str, Any]) -> LimitStruct:
    """Inverse of ``state_of``. Raises ReplayError where ``state`` is no such value."""
    try:
        struct = LimitStruct(*(math.inf if state[name] is None else state[name] for name in _FIELDS))
        exact = all(abs(state[name]) < 2**53 for name in ("offset", "min_size", "inserts", "samples"))
    except (KeyError, TypeError) as error:
        raise ReplayError(f"{state!r} is no state of a rate limiter: {error}") from error
    if not (exact and struct.inserts >= -struct.min_size and struct.samples >= 0):
        raise ReplayError(
            f"{dict(state)} is no state of a rate limiter: inserts are at least -min_size, samples at least 0, "
            "both below 2**53"
        )
    RateLimit.from_struct(struct)
    return struct


def _struct_in(header: HeaderStruct, endpoint: str) -> LimitStruct | None:
    """A copy of the limit in use; None: there is none."""
    used = header.limit
    if not 0 <= used <= len(header.limits):
        raise ReplayDamagedError(endpoint)
    return LimitStruct.from_buffer_copy(header.limits[used - 1]) if used else None


def error_of(struct: LimitStruct) -> float:
    """The error, as kernel.c computes it."""
    return float(struct.samples_per_insert * float(struct.inserts) - float(struct.samples) + struct.offset)


class Waits:
    """One request that waits for the rate limiter: named as waiting from its first sleep to the end of the ``with`` block.

    ::

        with Waits(limiter, kernel.INSERT, rows) as waits:
            while request() == kernel.LIMITED:
                waits.is_admitted()
    """

    def __init__(self, limiter: Limiter, kind: int, rows: int) -> None:
        """Of INSERT or SAMPLE of ``kernel``, for ``rows`` rows."""
        self._limiter, self._kind, self._rows = limiter, kind, rows
        self._place, self._since = -1, 0.0

    def is_admitted(self) -> bool:
        """Sleep until the request may be admitted, for at most SLEEP_S. Returns whether it is.

        Raises:
            ReplayTimeoutError: the limit's timeout_s has passed.
        """
        if not self._since:
            if self._limiter.admits(self._kind):
                return True
            self._since = time.monotonic()
            self._place = self._limiter.begin(self._kind, self._rows)
        timeout_s = self._limiter.timeout_s()
        left_s = self._since + timeout_s - time.monotonic()
        if self._limiter.admits(self._kind, min(SLEEP_S, max(0.0, left_s))):
            return True
        if left_s <= 0:
            raise ReplayTimeoutError(self._explained(timeout_s - left_s))
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._since:
            self._limiter.end(self._kind, self._place, time.monotonic() - self._since)

    def _explained(self, waited_s: float) -> str:
        """Who waited for what, and what would end it."""
        found, size = self._limiter.status(), len(self._limiter.store)
        limit = found.limit or RateLimit()
        what, other = ("inserting", "drawn") if self._kind == kernel.INSERT else ("drawing", "inserted")
        why = f"the error is {found.error:g} after {counted(found.inserts, 'insert')} and {counted(found.samples, 'sample')}"
        if size < limit.min_size:
            why = f"its limit needs {limit.min_size - size} more"
        return (
            f"{what} {counted(self._rows, 'row')} has waited {waited_s:.3g} s for the rate limiter: the store has "
            f"{counted(size, 'row')}, and {why} "
            f"under {limit}; it goes on when rows are {other} by this or another process, or "
            "with another limit (limiter.set)"
        )
