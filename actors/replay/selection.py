"""Which rows a batch is made of. Every rank gets the same list from the same seed, whatever the number of shards.

Two mechanisms: *targets* in a tree of sums, with replacement, and *candidates* with the least keys, without. ``table`` says
how several shards answer together. Random keys make the second sampling without replacement (Efraimidis and Spirakis 2006).
Random number i of a draw is a function of (seed, draw, i), and of (seed, draw, global index) for keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from actors.replay import kernel
from actors.replay.candidates import Numbers, Order
from actors.replay.errors import ReplayError
from actors.replay.rows import Drawn, Keys, Selection, TreeSpec
from actors.replay.store import ReplayStore
from actors.replay.table import (
    Exchange,
    ExchangedShards,
    GatheredTable,
    LocalShards,
    ShardedTable,
    Table,
    drawable,
)
from actors.replay.table_limit import wait_to_sample
from actors.replay.tree import Floats, Integers
from placement.errors import counted

_TARGETS, _STARTS = range(2)
"""Streams of random numbers; the third is of keys."""
_ROUNDS = 100
"""After which a draw gives up on rows that others have removed or used up meanwhile."""
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
"""Its inverse, (sqrt(5) - 1) / 2, times 2^64."""


class _Found(NamedTuple):
    """Rows of one round, before it is known which of them count."""

    indices: Integers
    generations: NDArray[np.uint64]
    steps: Integers
    probabilities: Floats
    lengths: Integers
    accepted: NDArray[np.bool_] | None
    """Which of them could still be selected, and were counted; None: all."""

    def only(self, accepted: NDArray[np.bool_]) -> _Found:
        """Those of them that count."""
        return _Found(
            self.indices[accepted],
            self.generations[accepted],
            self.steps[accepted],
            self.probabilities[accepted],
            self.lengths[accepted],
            None,
        )


class Selector(Protocol):
    """Chooses rows."""

    @property
    def spec(self) -> TreeSpec | None:
        """The tree that it needs, if any."""

    def choose(self, table: Table, draw: _Draw) -> _Found:
        """One round of a draw; its rows are counted as selected."""


@dataclass(frozen=True, slots=True)
class _Draw:
    """Position of one round among all random numbers, and what the rounds before it selected."""

    k: int
    numbers: Numbers
    taken: Integers


# ---- by targets, with replacement


@dataclass(frozen=True, slots=True)
class Uniform:
    """Rows with equal probability. Of trajectories, whole episodes: the selected step is 0."""

    @property
    def spec(self) -> TreeSpec:
        """Each row counts 1."""
        return TreeSpec(kernel.ROWS)

    def choose(self, table: Table, draw: _Draw) -> _Found:
        """As of ``Selector``."""
        drawn, probabilities = _by_targets(table, self.spec, draw)
        return _found(drawn, np.zeros(draw.k, np.int64), probabilities)


@dataclass(frozen=True, slots=True)
class SubSequences:
    """All sub-sequences of this length with equal probability: starts 0, stride, 2 stride, ... of every trajectory.

    Length 1 selects timesteps uniformly. For burn-in, subscribe to a window that begins before the selected step.
    """

    length: int
    stride: int = 1

    def __post_init__(self) -> None:
        _check_windows(self.length, self.stride)

    @property
    def spec(self) -> TreeSpec:
        """Each row counts its sub-sequences."""
        return TreeSpec(kernel.WINDOWS, 1.0, self.length, self.stride)

    def choose(self, table: Table, draw: _Draw) -> _Found:
        """As of ``Selector``."""
        drawn, probabilities = _by_targets(table, self.spec, draw)
        # A leaf is a number of windows, so the whole part of the rest is the number of a window.
        starts = drawn.rest.astype(np.int64) * self.stride
        return _found(drawn, starts, probabilities / drawn.weights)


@dataclass(frozen=True, slots=True)
class Prioritized:
    """Rows with probability P(i) = p_i**exponent / sum_j p_j**exponent (Schaul et al. 2016, eq. 1).

    Weights are (N P(i))**-importance, divided by the batch's largest (section 3.4), for N rows. With importance 0 this is
    weighted selection. Of trajectories, a sub-sequence of ``length`` is then chosen uniformly; probabilities are the rows'.
    """

    exponent: float = 1.0
    importance: float = 0.0
    length: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        _check_windows(self.length, self.stride)
        _check_importance(self.exponent, self.importance)

    @property
    def spec(self) -> TreeSpec:
        """Each row counts its priority to the power of the exponent, if it has a sub-sequence."""
        return TreeSpec(kernel.PRIORITIES, float(self.exponent), self.length, 1)

    def choose(self, table: Table, draw: _Draw) -> _Found:
        """As of ``Selector``."""
        drawn, probabilities = _by_targets(table, self.spec, draw)
        starts = _starts(drawn.lengths, self.length, self.stride, draw)
        return _found(drawn, starts, probabilities)


@dataclass(frozen=True, slots=True, eq=False)
class PrioritizedSteps:
    """Timesteps with probability w / sum of all w, for the weights w of ``StepPriorities``, whose ``selector`` makes this.

    Importance weights as of ``Prioritized``, for N timesteps.
    """

    weights: Floats
    importance: float = 0.0

    def __post_init__(self) -> None:
        _check_importance(1.0, self.importance)
        if (self.weights.ndim, self.weights.dtype) != (2, np.float64) or not self.weights.flags.c_contiguous:
            raise ReplayError(
                "weights of timesteps are a contiguous array of float64, (capacity, max_length)"
            )

    @property
    def spec(self) -> TreeSpec:
        """Each row counts its priority, the sum of its steps' weights."""
        return Prioritized().spec

    def choose(self, table: Table, draw: _Draw) -> _Found:
        """As of ``Selector``."""
        drawn, _ = _by_targets(table, self.spec, draw)
        # The rest of the target is uniform within the row's sum: where it falls is the step.
        steps, chosen = np.empty(draw.k, np.int64), np.empty(draw.k)
        arrays = (drawn.indices, drawn.rest, self.weights, steps, chosen)
        if kernel.library().replay_choose_steps(*self.weights.shape, draw.k, *map(kernel.address, arrays)):
            raise ReplayError("the weights are of another store, with fewer rows")
        return _found(drawn, steps, chosen / drawn.total)


def _check_importance(exponent: float, importance: float) -> None:
    if not (0 <= exponent < np.inf and 0 <= importance < np.inf):
        raise ReplayError(
            f"exponent {exponent} and importance {importance}: use finite numbers that are at least 0"
        )


def _found(drawn: Drawn, steps: Integers, probabilities: Floats) -> _Found:
    return _Found(drawn.indices, drawn.generations, steps, probabilities, drawn.lengths, drawn.accepted)


@lru_cache(maxsize=64)
def _ones(n: int) -> NDArray[np.float32]:
    """Weights of n rows without importance sampling; read-only."""
    ones = np.ones(n, np.float32)
    ones.flags.writeable = False
    return ones


def _check_windows(length: int, stride: int) -> None:
    if length < 1 or stride < 1:
        raise ReplayError(f"sub-sequences of length {length} and stride {stride}: use positive numbers")


def _starts(lengths: Integers, length: int, stride: int, draw: _Draw) -> Integers:
    """Uniform start of a sub-sequence in each row."""
    windows = (lengths - length) // stride + 1
    if length == 1 and windows.max(initial=1) == 1:
        return np.zeros(draw.k, np.int64)
    return (draw.numbers.uniforms(_STARTS, 0, draw.k) * windows).astype(np.int64) * stride


def _by_targets(table: Table, spec: TreeSpec, draw: _Draw) -> tuple[Drawn, Floats]:
    """Draw by a tree of sums. Returns the rows, and the probability of each."""
    seed, number, round_ = draw.numbers
    tree = table.tree(spec)
    # Before the draw: rows that it used up before it failed would be lost.
    if table.max_times_sampled and 0 < (left := table.draws_left(tree, draw.k)) < draw.k:
        raise ReplayError(
            f"{draw.k} rows were requested where those that are there can be selected {left} times "
            f"(max_times_sampled is {table.max_times_sampled})"
        )
    drawn = table.draw(tree, draw.k, seed % 2**64, _TARGETS, round_, number % 2**64)
    return drawn, drawn.weights / drawn.total


# ---- by candidates, without replacement


class _ByOrder:
    """The rows with the least keys of one order, each once; of equal ones, the least index."""

    spec = None
    """Needs no tree: it reads the whole status table."""
    _order: ClassVar[Order]

    def choose(self, table: Table, draw: _Draw) -> _Found:
        """As of ``Selector``."""
        return _by_candidates(table, draw, self._order)


@dataclass(frozen=True)
class Fifo(_ByOrder):
    """The rows with the least timestamps, each once; of equal ones, the least index."""

    _order = Order("oldest")


@dataclass(frozen=True)
class Lifo(_ByOrder):
    """The rows with the greatest timestamps, each once; of equal ones, the least index."""

    _order = Order("newest")


@dataclass(frozen=True)
class TopK(_ByOrder):
    """The rows with the highest priorities, each once; of equal ones, the least index."""

    _order = Order("highest")


@dataclass(frozen=True, slots=True)
class WithoutReplacement:
    """Rows one after the other with P(i) as of ``Prioritized``, each at most once; exponent 0: uniform.

    Row i has the key log(-log(u_i) / p_i**exponent), and the least keys win: exactly successive draws without replacement
    (Efraimidis and Spirakis 2006). ``probabilities`` are those of a first draw.
    """

    exponent: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.exponent < np.inf:
            raise ReplayError(f"exponent {self.exponent}: use a finite number that is at least 0")

    @property
    def spec(self) -> TreeSpec | None:
        """For the sum of all weights; with exponent 0 that is a count."""
        return TreeSpec(kernel.PRIORITIES, float(self.exponent)) if self.exponent else None

    def choose(self, table: Table, draw: _Draw) -> _Found:
        """As of ``Selector``."""
        everything = None if self.spec is None else drawable(table.total(table.tree(self.spec)))
        return _by_candidates(table, draw, Order("random", self.exponent), everything)


def _by_candidates(table: Table, draw: _Draw, order: Order, everything: float | None = None) -> _Found:
    """The k rows with the least keys of all shards. everything: sum of all weights; None: their number."""
    found = table.candidates(order, draw.k, draw.numbers, draw.taken)
    if len(found.indices) < draw.k:
        raise ReplayError(
            f"{counted(draw.k + len(draw.taken), 'different row')} requested where {int(found.available[0])} can be selected"
        )
    probabilities = np.ones(draw.k)
    if order.kind == "random":
        total = float(found.available[0]) if everything is None else everything
        probabilities = found.weights / total
    accepted = table.mark(Keys(found.indices, found.generations))
    zeros = np.zeros(draw.k, np.int64)
    return _Found(found.indices, found.generations, zeros, probabilities, found.lengths, accepted)


# ---- the whole selection


def select(
    store: ReplayStore | Sequence[ReplayStore] | ShardedTable,
    selector: Selector,
    k: int,
    *,
    seed: int,
    draw: int,
    exchange: Exchange | None = None,
    keep_waiting: Callable[[], bool] = lambda: True,
) -> Selection:
    """Select k rows, and count them as sampled. Waits first, where the rate limiter (of all shards) refuses it.

    Args:
        store: the only shard; or all shards of a table, as one or in order; or this rank's shard, with ``exchange``
        selector: one that the store was created for
        k: rows, at least 1
        seed, draw: the list is a function of these and of the status of all shards. ``draw`` counts, e.g. batches
        exchange: all-gather of values among the ranks, in the order of shards; all call ``select`` alike
        keep_waiting: called several times a second during a wait for the rate limiter; False gives up

    Raises:
        ReplayError: nothing, or too little, can be selected; or the store was not created for this selector.
        ReplayTimeoutError: the rate limiter did not admit it within its timeout.
        RateLimitedError: ``keep_waiting`` returned False.
    """
    if isinstance(store, ReplayStore):
        _wait_for_limit(store, selector, k, keep_waiting)
        if exchange is not None:
            return _select(ExchangedShards(store, exchange), selector, k, seed, draw)
        if store.num_shards == 1:
            return _select(store, selector, k, seed, draw)
    shards = [store] if isinstance(store, ReplayStore) else store
    table = shards if isinstance(shards, ShardedTable) else LocalShards(shards)
    _wait_for_limit(table, selector, k, keep_waiting)
    return _select(table, selector, k, seed, draw)


def _wait_for_limit(
    store: ReplayStore | ShardedTable, selector: Selector, k: int, keep_waiting: Callable[[], bool]
) -> None:
    if store.is_limited and k > 0:
        if selector.spec is not None:
            store.tree(selector.spec)  # an error that no wait would change
        if isinstance(store, ReplayStore):
            store.wait_to_sample(k, keep_waiting)
        else:
            wait_to_sample(store, k, keep_waiting)


def select_centralised(
    shards: ShardedTable | Sequence[ReplayStore],
    selector: Selector,
    k: int,
    *,
    seed: int,
    draw: int,
    keep_waiting: Callable[[], bool] = lambda: True,
) -> Selection:
    """The list of ``select``, from the status of all shards, gathered in this process: O(n) traffic for n rows.

    Arguments and errors as of ``select``.
    """
    table = shards if isinstance(shards, ShardedTable) else LocalShards(shards)
    _wait_for_limit(table, selector, k, keep_waiting)
    return _select(GatheredTable(table), selector, k, seed, draw)


def _select(table: Table, selector: Selector, k: int, seed: int, draw: int) -> Selection:
    if k < 1:
        raise ReplayError(f"{k} rows were requested: use a positive number")
    parts: list[_Found] = []
    missing, taken = k, np.zeros(0, np.int64)
    for _ in range(_ROUNDS):
        try:
            found = selector.choose(table, _Draw(missing, Numbers(seed, draw, len(parts)), taken))
        except ReplayError:
            if not parts:
                raise
            # Others have used rows up since the first round. Alone, as many rows as there are then may be enough, or the
            # error of a first round says how many there are.
            _give_back(table, parts)
            parts, missing, taken = [], k, np.zeros(0, np.int64)
            continue
        accepted = found.accepted
        if accepted is not None and not accepted.all():
            found = found.only(accepted)
        parts.append(found)
        missing -= len(found.indices)
        if not missing:
            return _finish(table, selector, parts)
        taken = np.concatenate((taken, found.indices))
    _give_back(table, parts)
    raise ReplayError(
        f"{missing} of {k} rows could not be selected: others remove them as fast as they are selected"
    )


def _give_back(table: Table, parts: Sequence[_Found]) -> None:
    """Take back the counts of rounds whose rows nobody gets."""
    for part in parts:
        table.unmark(Keys(part.indices, part.generations))


def _finish(table: Table, selector: Selector, parts: list[_Found]) -> Selection:
    """Join the rounds, and add importance weights."""
    columns = (
        parts[0][:5] if len(parts) == 1 else [np.concatenate([part[c] for part in parts]) for c in range(5)]
    )
    indices, generations, steps, probabilities, lengths = columns
    importance = getattr(selector, "importance", 0.0)
    weights = _ones(len(indices))
    if importance:
        # w_i = (N P(i))**-beta / max_j (N P(j))**-beta = (P(i) / min_j P(j))**-beta. Without N: others change it meanwhile.
        weights = ((probabilities / probabilities.min()) ** -importance).astype(np.float32)
    return Selection(Keys(indices, generations), steps, probabilities, weights, lengths)


@dataclass(frozen=True, slots=True)
class MixturePart:
    """One table of a mixture: its shards, how rows are selected, and its part of every batch."""

    store: ReplayStore | Sequence[ReplayStore] | ShardedTable
    selector: Selector
    share: float


def select_mixture(shares: Sequence[MixturePart], k: int, *, seed: int, draw: int) -> list[Selection]:
    """Select k rows from several tables in fixed shares: one selection for each, of ``mixture_counts`` rows.

    Each part has random numbers of its own, so that equal tables do not give the same rows.

    Raises:
        ReplayError: shares are negative or all zero; or as of ``select``.
    """
    counts = mixture_counts([share.share for share in shares], k, draw)
    empty = Selection(
        Keys(np.empty(0, np.int64), np.empty(0, np.uint64)),
        np.empty(0, np.int64),
        np.empty(0),
        np.empty(0, np.float32),
        np.empty(0, np.int64),
    )
    return [
        select(share.store, share.selector, count, seed=_seed_of_part(seed, part), draw=draw)
        if count
        else empty
        for part, (share, count) in enumerate(zip(shares, counts, strict=True))
    ]


def _seed_of_part(seed: int, part: int) -> int:
    """Seed of one part of a mixture, a function of the mixture's seed and of the part's number alone."""
    sequence = np.random.SeedSequence(seed % 2**64, spawn_key=(part,))
    return int(sequence.generate_state(1, np.uint64)[0])


def mixture_counts(shares: Sequence[float], k: int, draw: int) -> list[int]:
    """Rows of each table in a batch: the whole part of its share, and the rest in turn, so that shares hold over batches.

    Raises:
        ReplayError: shares are negative or all zero.
    """
    parts = np.asarray(shares, float)
    if not (len(parts) and np.isfinite(parts).all() and parts.min() >= 0 and parts.sum() > 0):
        raise ReplayError(f"shares are {list(shares)}: use numbers that are at least 0, one of them positive")
    exact = parts / parts.sum() * k
    counts = np.floor(exact + 1e-9).astype(int)
    left = k - int(counts.sum())
    bounds = np.cumsum(np.clip(exact - counts, 0, None))
    for position in range(left):
        # The golden ratio's multiples (i + 1/2) phi fill [0, 1) evenly, whatever the batch. Whole numbers stay exact.
        multiple = (2 * (draw * left + position) + 1) * _GOLDEN_RATIO % 2**65
        place = (multiple >> 12) / 2**53 * bounds[-1]
        counts[min(int(np.searchsorted(bounds, place, "right")), len(parts) - 1)] += 1
    return [int(count) for count in counts]
