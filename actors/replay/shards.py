"""All shards of a table, in any process of the cluster: those of its host in shared memory, those of others over TCP."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from actors.replay import kernel
from actors.replay.calls import CALLS
from actors.replay.errors import RateLimitedError, ReplayError, ReplayTimeoutError, ShardLostError
from actors.replay.metrics import ReplayMetrics
from actors.replay.remote_shard import RemoteShard
from actors.replay.rows import STATUS, Keys, TreeSpec, checked, non_negative, status_of
from actors.replay.schema import ReplaySchema
from actors.replay.store import ReplayStore
from actors.replay.subscriptions import Sources, Subscription
from actors.replay.table import ShardedTable
from actors.replay.table_limit import ShardError, admits_sample, balanced
from actors.replay.tree import Integers
from collectives.closing import ClosesOnExit
from collectives.rendezvous import host_identity, poll

_logger = logging.getLogger(__name__)
Discover = Callable[[], Sequence[str]]
"""Returns the addresses of the shards that exist now, in any order."""
_TIMEOUT_S = 30.0
_JOIN_S = 0.5
"""Between two searches for missing shards."""
_SAME = ("schema", "capacity", "num_shards", "max_times_sampled", "trees")
"""What the descriptions of all shards of a table have in common."""


@dataclass(frozen=True, slots=True)
class LostShard:
    """A shard that was lost, and what with it.

    Attributes:
        shard: its number
        first, last: its global indices
        rows: that could be selected, as far as this process knows
        reason: how that was noticed
        time_s: seconds since 1970
    """

    shard: int
    first: int
    last: int
    rows: int
    reason: str
    time_s: float

    def __str__(self) -> str:
        return f"shard {self.shard} is lost with {self.rows} rows (indices {self.first} to {self.last}): {self.reason}"


class _Member:
    """One shard that is not lost."""

    def __init__(self, remote: RemoteShard, host_id: str) -> None:
        self.remote = remote
        is_here = remote.host_id == host_id and remote.meta["removal"] != "user"
        self.store = _attached(remote) if is_here else None
        """Open here, if it is on this host. Its removal function, if it has one, is its server's."""
        self.incarnation = int(remote.meta["incarnation"])

    @property
    def rows(self) -> int:
        return self.remote.rows if self.store is None else len(self.store)

    @property
    def is_limited(self) -> bool:
        return self.remote.is_limited if self.store is None else self.store.is_limited

    def close(self) -> None:
        self.remote.close()
        if self.store is not None:
            self.store.close()


def _attached(remote: RemoteShard) -> ReplayStore | None:
    """The store of a shard on this host; None if this process may not open it, as one of another user."""
    try:
        return ReplayStore.attach(remote.endpoint)
    except ReplayError as error:
        _logger.warning("a replay shard of this host is read over TCP: %s", error)
        return None


class ReplayShards(ShardedTable, ClosesOnExit):
    """A table of several shards, as a reader or writer sees it. Any thread may use it; a copy in another process reconnects.

    ::

        shards = ReplayShards([address_0, address_1])    # or a function that returns the present addresses
        keys = shards.insert({"obs": obs, "action": action})
        chosen = select(shards, Prioritized(0.6, 0.4), 256, seed=0, draw=0)
        batch = gather(shards, chosen, [Subscription(column="obs")])
        shards.update_priorities(chosen.keys, td_errors)

    Attributes:
        schema, capacity, num_shards: of the table; ``capacity`` is each shard's
        reads: rows read through this object, by shard
        host_id: of this process
    """

    def __init__(
        self,
        shards: str | Sequence[str] | Discover,
        *,
        timeout_s: float = _TIMEOUT_S,
        host_id: str | None = None,
    ) -> None:
        """Connect to the shards that are there.

        Args:
            shards: their addresses, also as one text with commas; or a function that returns them, which is called again
                while shards are missing
            timeout_s: a shard on another host that does not respond for so long is lost
            host_id: of this process; None: ``host_identity()``

        Raises:
            ReplayError: none can be reached, or they are not shards of one table.
        """
        listed = shards.split(",") if isinstance(shards, str) else shards
        self._discover = listed if callable(listed) else lambda: listed
        self._source, self._timeout_s = shards, timeout_s
        self.host_id = host_id or host_identity()
        self._members: dict[int, _Member] = {}
        self._lock, self._joining = threading.RLock(), threading.Lock()
        self._missing, self._closed = threading.Event(), threading.Event()
        self._meta: Mapping[str, Any] = {}
        self._lost: list[LostShard] = []
        self.reads: Counter[int] = Counter()
        self._inserted: Counter[int] = Counter()
        self._latest: dict[int, tuple[int, str]] = {}
        """Incarnation and address of each shard that has been present."""
        errors = self._join()
        wrong = next((error for error in errors if not isinstance(error, ShardLostError)), None)
        if wrong is not None or not self._members:
            self.close()
            reasons = "; ".join(map(str, errors)) or "no address is known"
            raise wrong or ReplayError(f"no shard of a replay table can be reached: {reasons}")
        watched = weakref.ref(self), self._missing, self._closed
        threading.Thread(target=_watch, args=watched, name="replay-shards-join", daemon=True).start()

    # ---- membership

    @property
    def present(self) -> Sequence[int]:
        """Shards that are not lost, in order. A shard whose process has ended is noticed here."""
        for shard, member in list(self._members.items()):
            if member.remote.reason:
                self._lose(shard, member)
        return sorted(self._members)

    @property
    def lost(self) -> Sequence[LostShard]:
        """The losses so far."""
        self.present  # noqa: B018 - notices ended processes
        return list(self._lost)

    @property
    def local(self) -> Sequence[int]:
        """Shards whose stores are open in this process, in order."""
        return [shard for shard in self.present if self._members[shard].store is not None]

    def incarnation(self, shard: int) -> int:
        """How often a present shard was lost before it came back empty."""
        return self._members[shard].incarnation

    def join(self) -> Sequence[int]:
        """Search for missing shards now. Returns those that are present. A thread does so every half second, too."""
        self._join()
        return self.present

    def wait(self, timeout_s: float) -> None:
        """Wait until all shards of the table are present. Raises ShardLostError where they are not within ``timeout_s``."""
        if poll(lambda: len(self.present) == self.num_shards or None, timeout_s) is None:
            raise ShardLostError(
                f"{len(self.present)} of {self.num_shards} replay shards are present after {timeout_s:g} s"
            )

    def _join(self) -> list[ReplayError]:
        """Connect to what is missing. Returns why it could not be."""
        with self._joining:
            with self._lock:
                known = {member.remote.address for member in self._members.values()}
            errors: list[ReplayError] = []
            for address in self._discover():
                if address in known or self._closed.is_set():
                    continue
                try:
                    remote = RemoteShard(address, host_id=self.host_id, timeout_s=self._timeout_s)
                except ReplayError as error:
                    errors.append(error)
                    continue
                try:
                    self._enter(_Member(remote, self.host_id))
                except ReplayError as error:
                    remote.close()
                    errors.append(error)
            with self._lock:
                if len(self._members) < (self.num_shards if self._meta else 1):
                    self._missing.set()
                else:
                    self._missing.clear()
            return errors

    def _enter(self, member: _Member) -> None:
        """Take a shard into the table.

        Raises:
            ReplayError: it is of another table, or has the place and the incarnation of another process's.
        """
        meta, address = member.remote.meta, member.remote.address
        with self._lock:
            if not self._meta:
                self._meta = meta
                self.schema = ReplaySchema.from_json(meta["schema"])
                self.capacity, self.num_shards = int(meta["capacity"]), int(meta["num_shards"])
                self._specs = [TreeSpec(*spec) for spec in meta["trees"]]
            where = address.rpartition("/")[0]
            if differing := [name for name in _SAME if meta[name] != self._meta[name]]:
                raise ReplayError(
                    f"the shard at {where} is of another table: its {differing[0]} is {meta[differing[0]]}, the table's "
                    f"{self._meta[differing[0]]}"
                )
            shard = int(meta["shard"])
            incarnation, before = self._latest.get(shard, (-1, ""))
            if address != before and member.incarnation <= incarnation:
                raise ReplayError(
                    f"shard {shard} at {where} has incarnation {member.incarnation}, as the process before it: create its "
                    f"store with incarnation={incarnation + 1}, so that keys of lost rows do not fit its rows"
                )
            if shard in self._members:
                self._lose(shard, self._members[shard], "another process has taken its place")
            self._members[shard], self._latest[shard] = member, (member.incarnation, address)
        if before:
            _logger.warning(
                "replay shard %d is back with %d rows (incarnation %d)",
                shard,
                member.rows,
                member.incarnation,
            )

    def _lose(self, shard: int, member: _Member, reason: str = "") -> None:
        """Leave a shard out from now on, and say what is lost with it."""
        with self._lock:
            if self._members.get(shard) is not member or self._closed.is_set():
                return
            del self._members[shard]
            first = shard * self.capacity
            found = LostShard(
                shard,
                first,
                first + self.capacity - 1,
                member.rows,
                reason or member.remote.reason,
                time.time(),
            )
            self._lost.append(found)
            self._missing.set()
            remaining = ", ".join(map(str, sorted(self._members))) or "none"
        # Its store stays mapped while another thread copies from it; the last reference closes it.
        member.remote.close()
        _logger.warning("replay %s; selection goes on with shards %s", found, remaining)

    def close(self) -> None:
        """Disconnect. The shards live on. Safe to call twice."""
        with self._lock:
            self._closed.set()
            self._missing.set()
            members, self._members = self._members, {}
        for member in members.values():
            member.close()

    def __del__(self) -> None:
        if hasattr(self, "_latest"):
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ReplayShards, timeout_s=self._timeout_s), (self._source,)

    # ---- requests

    def tree(self, spec: TreeSpec) -> int:
        """As of ``ReplayStore.tree``."""
        if spec not in self._specs:
            raise ReplayError(
                f"this table cannot select by {spec}: name the selector in selectors= when its shards are created"
            )
        return self._specs.index(spec)

    @property
    def max_times_sampled(self) -> int:
        """As of ``ReplayStore.max_times_sampled``."""
        return int(self._meta["max_times_sampled"])

    @property
    def is_limited(self) -> bool:
        """As of ``ShardedTable``; of another host as it was at its last answer."""
        return any(member.is_limited for member in list(self._members.values()))

    def stores_here(self) -> Sequence[ReplayStore]:
        """As of ``ShardedTable``."""
        return [member.store for _, member in sorted(self._members.items()) if member.store is not None]

    def ask(self, call: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """As of ``ShardedTable``: other hosts first, which work while the shards of this one do.

        Raises:
            ReplayError: a shard refuses the request.
        """
        self.check_open()
        self.present  # noqa: B018 - notices ended processes
        members = {shard: self._members[shard] for shard in arguments if shard in self._members}
        requests, results, failure = {}, dict[int, Any](), None
        for shard, member in members.items():
            if member.store is None:
                try:
                    requests[shard] = member.remote.start(call, *arguments[shard])
                except ShardLostError:
                    self._lose(shard, member)
        for shard, member in members.items():
            if member.store is not None:
                try:
                    results[shard] = CALLS[call](member.store, *arguments[shard])
                except Exception as error:
                    failure = failure or error
        for shard, request in requests.items():  # all, so that no answer is left behind
            try:
                results[shard] = request.result()
            except ShardLostError:
                self._lose(shard, members[shard])
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return {shard: results[shard] for shard in sorted(results)}

    def check_open(self) -> None:
        """Raise ReplayError if it is closed."""
        if self._closed.is_set():
            raise ReplayError("these replay shards are closed")

    # ---- as of ReplayStore

    def insert(
        self,
        rows: Mapping[str, Any],
        lengths: ArrayLike | None = None,
        priorities: ArrayLike | None = None,
        timestamps: ArrayLike | None = None,
        *,
        shard: int | None = None,
        keep_waiting: Callable[[], bool] = lambda: True,
    ) -> Keys:
        """Copy n trajectories into one shard and make them selectable together.

        Args:
            rows, lengths, priorities, timestamps: as of ``ReplayStore.insert``
            shard: into which; None: the one of this host with the fewest rows, else of any host (GEAR, section 3.2:
                online, rows are written beside their generator)
            keep_waiting: called about twice a second during a wait for the rate limiter; False gives up

        Raises:
            ReplayError, ReplayBusyError: as of ``ReplayStore.insert``.
            ReplayTimeoutError: the rate limiter did not admit it within the least timeout_s of the shards.
            RateLimitedError: ``keep_waiting`` returned False.
            ShardLostError: the shard is lost. If it was lost during the call, it is lost with these rows.
        """
        self.check_open()
        if shard is not None and not 0 <= shard < self.num_shards:
            raise ReplayError(f"shard {shard} was given: this table has 0 to {self.num_shards - 1}")
        chosen = self._beside() if shard is None else shard
        given = {name: np.asarray(values) for name, values in rows.items()}
        statistics = [
            None if found is None else np.asarray(found) for found in (lengths, priorities, timestamps)
        ]
        since, found = time.monotonic(), None
        while found is None:
            try:
                found = self.ask("insert", {chosen: (given, *statistics)})
            except RateLimitedError as error:  # of one request; its shard may have more error than the others
                limits = balanced(self)
                if not keep_waiting():
                    raise
                waited_s = time.monotonic() - since
                if waited_s >= min((limit.timeout_s for limit in limits), default=np.inf):
                    raise ReplayTimeoutError(f"inserting waited {waited_s:.3g} s: {error}") from error
        if chosen not in found:
            raise ShardLostError(
                f"replay shard {chosen} is lost: insert the rows into another, or wait until it joins"
            )
        keys = Keys(*found[chosen])
        self._inserted[chosen] += len(keys.indices)
        return keys

    def _beside(self) -> int:
        """The shard with the fewest rows on this host; on any, if this host has none. Full ones in turn."""
        choices = self.local or self.present
        if not choices:
            raise ShardLostError("all shards of the table are lost: wait until one joins")
        held = {shard: member.rows for shard, member in list(self._members.items())}
        return min(choices, key=lambda shard: (held.get(shard, self.capacity), self._inserted[shard]))

    def update_priorities(self, keys: Keys, priorities: ArrayLike) -> int:
        """As of ``ReplayStore.update_priorities``; rows of lost shards are left alone."""
        indices, generations = checked(keys)
        values = non_negative("priorities", priorities, len(indices))  # before any shard sets some of them
        parts = self._by_owner(indices)
        arguments = {shard: (indices[at], generations[at], values[at]) for shard, at in parts.items()}
        return sum(self.ask("update", arguments).values())

    def delete(self, keys: Keys) -> int:
        """As of ``ReplayStore.delete``; rows of lost shards are gone already."""
        return sum(self.ask("delete", self._split(keys, self._by_owner(keys.indices))).values())

    def prefetch(self, keys: Keys) -> int:
        """As of ``ReplayStore.prefetch``."""
        return sum(self.ask("prefetch", self._split(keys, self._by_owner(keys.indices))).values())

    def status(self) -> NDArray[Any]:
        """Status of all rows: (capacity * shards that are present,) of ``STATUS``."""
        found = self.ask("status", self._everywhere())
        parts = [status_of(rows.view(kernel.ROW), shard * self.capacity) for shard, rows in found.items()]
        return np.concatenate(parts) if parts else np.empty(0, STATUS)

    def counters(self) -> dict[str, int]:
        """Sums over the shards of ``ReplayStore.counters``."""
        total = Counter[str]()
        for found in self.ask("counters", self._everywhere()).values():
            total.update(found)
        return dict(total)

    def counters_by_shard(self) -> dict[int, dict[str, int]]:
        """``ReplayStore.counters`` of every present shard."""
        return self.ask("counters", self._everywhere())

    def metrics(self) -> ReplayMetrics:
        """As of ``ReplayStore.metrics``: sums over the shards that are present, and the load of each."""
        messages = self.ask("metrics", self._everywhere()).values()
        found = ReplayMetrics.merged([ReplayMetrics.from_message(message) for message in messages])
        limits = [ShardError(*limit) for limit in self.ask("error", self._everywhere()).values() if limit]
        return replace(found, limiter=replace(found.limiter, admits_sample=admits_sample(limits)))

    def reads_of(self, shard: int) -> dict[str, int]:
        """Rows that hosts have read from a shard through its server, by the hosts' identities; empty if it is lost."""
        member = self._members.get(shard)
        try:
            return {} if member is None else dict(member.remote.start("reads").result())
        except ShardLostError:
            return {}

    def sources(
        self,
        indices: Integers,
        generations: NDArray[np.uint64],
        steps: Integers,
        subscriptions: Sequence[Subscription],
    ) -> Sources:
        """Where these rows are, for ``Gatherer``; the requests to other hosts are sent.

        Raises:
            ReplayError: an index is outside the table.
        """
        self.check_open()
        parts, present = self._by_owner(indices), set(self.present)
        order = np.concatenate([*parts.values(), np.empty(0, np.int64)]).astype(np.int64)
        found = Sources(order, [], [], [])
        wanted, begin = [subscription.to_json() for subscription in subscriptions], 0
        for shard, at in parts.items():
            end = begin + len(at)
            member = self._members.get(shard) if shard in present else None
            self.reads[shard] += len(at)
            if member is None:
                found.lost.append((begin, end))
            elif member.store is not None:
                found.local.append((member.store, begin, end))
            else:
                try:
                    request = member.remote.start("gather", indices[at], generations[at], steps[at], wanted)
                    found.remote.append((request, begin, end))
                except ShardLostError:
                    self._lose(shard, member)
                    found.lost.append((begin, end))
            begin = end
        return found


def _watch(shards: weakref.ref[ReplayShards], missing: threading.Event, closed: threading.Event) -> None:
    """Search for missing shards until the table is closed. Sleeps while none is missing."""
    logged = set[str]()
    while not closed.is_set():
        missing.wait()
        if closed.wait(_JOIN_S) or (table := shards()) is None:
            return
        try:
            texts = {str(error) for error in table._join() if not isinstance(error, ShardLostError)}
        except Exception as error:  # of the caller's function, such as a directory that restarts
            texts = {f"the addresses of replay shards are not known now: {error}"}
        del table
        for text in texts - logged:
            _logger.warning("%s", text)
        logged |= texts
