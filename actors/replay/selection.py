"""Which rows a batch is made of. Every rank gets the same list from the same seed, whatever the number of shards.

Two mechanisms. *Targets*: uniform numbers times the total of a tree of sums; shards exchange the edges of their trees, and
each finishes the descents that end in it. *Candidates*: each shard sends its k rows with the least keys, and the k least of
all are selected (O(mk) traffic for m shards). Random keys make this sampling without replacement (Efraimidis and Spirakis
2006). Random number i of a draw is a function of (seed, draw, i), and of (seed, draw, global index) for keys.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from actors.replay import kernel
from actors.replay.errors import ReplayError
from actors.replay.kernel import address
from actors.replay.store import Drawn, Keys, ReplayStore, TreeSpec
from actors.replay.tree import Floats, Integers, descend, merge, total

Exchange = Callable[[Any], list[Any]]
"""Given this rank's value, returns the values of all shards in order: an all-gather."""
Steps = Generator[Any, list[Any], "_Found"]
"""A selection as one shard does it: yields what it tells the others, and is sent what all have told."""
_TARGETS, _STARTS, _KEYS = range(3)
"""Streams of random numbers."""
_ROUNDS = 100
"""After which a draw gives up on rows that others have removed or used up meanwhile."""


class Selection(NamedTuple):
    """Selected rows in their order, (n,) each.

    Attributes:
        keys: global indices and generations
        steps: timestep of the trajectory that was selected; for sequences, their first
        probabilities: of each, in one draw; 1 for selectors without chance
        weights: importance weights, float32, at most 1; 1 without importance sampling
    """

    keys: Keys
    steps: Integers
    probabilities: Floats
    weights: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.steps)


class _Found(NamedTuple):
    """Rows of one round, before it is known which of them count."""

    indices: Integers
    generations: NDArray[np.uint64]
    steps: Integers
    probabilities: Floats
    is_counted: bool = False
    """Whether the rows were counted as selected."""
    accepted: NDArray[np.bool_] | None = None
    """Which of them still could be; None: all."""


class Selector(Protocol):
    """Chooses rows."""

    @property
    def spec(self) -> TreeSpec | None:
        """The tree that it needs, if any."""

    def choose(self, store: ReplayStore, draw: _Draw) -> Steps:
        """One round of a draw."""


@dataclass(frozen=True, slots=True)
class _Draw:
    """Position of one round among all random numbers, and what the rounds before it selected."""

    k: int
    seed: int
    draw: int
    round: int
    taken: Integers

    def uniforms(self, stream: int, first: int, count: int) -> Floats:
        """Numbers ``first`` to first + count - 1 of this round, (count,) in [0, 1). As NumPy's Philox."""
        out = np.empty(count)
        kernel.library().replay_uniforms(
            self.seed % 2**64, stream, self.round, self.draw % 2**64, first, count, address(out)
        )
        return out


# ---- by targets, with replacement


@dataclass(frozen=True, slots=True)
class Uniform:
    """Rows with equal probability. Of trajectories, whole episodes: the selected step is 0."""

    @property
    def spec(self) -> TreeSpec:
        """Each row counts 1."""
        return TreeSpec(kernel.ROWS)

    def choose(self, store: ReplayStore, draw: _Draw) -> Steps:
        """As of ``Selector``."""
        drawn, probabilities = yield from _by_targets(store, self.spec, draw)
        return _found(store, drawn, _zeros(draw.k), probabilities)


@dataclass(frozen=True, slots=True)
class Sequences:
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

    def choose(self, store: ReplayStore, draw: _Draw) -> Steps:
        """As of ``Selector``."""
        drawn, probabilities = yield from _by_targets(store, self.spec, draw)
        # A leaf is a number of windows, so the whole part of the rest is the number of a window.
        starts = drawn.rest.astype(np.int64) * self.stride
        return _found(store, drawn, starts, probabilities / drawn.weights)


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
        if not (0 <= self.exponent < np.inf and 0 <= self.importance < np.inf):
            raise ReplayError(
                f"exponent {self.exponent} and importance {self.importance}: use finite numbers that are at least 0"
            )

    @property
    def spec(self) -> TreeSpec:
        """Each row counts its priority to the power of the exponent, if it has a sub-sequence."""
        return TreeSpec(kernel.PRIORITIES, float(self.exponent), self.length, 1)

    def choose(self, store: ReplayStore, draw: _Draw) -> Steps:
        """As of ``Selector``."""
        drawn, probabilities = yield from _by_targets(store, self.spec, draw)
        starts = _starts(drawn.lengths, self.length, self.stride, draw)
        return _found(store, drawn, starts, probabilities)


def _found(store: ReplayStore, drawn: Drawn, steps: Integers, probabilities: Floats) -> _Found:
    """A single store counts the rows while it draws."""
    counted = store.num_shards == 1
    return _Found(drawn.indices, drawn.generations, steps, probabilities, counted, drawn.accepted)


@lru_cache(maxsize=64)
def _zeros(n: int) -> Integers:
    """Steps of n whole trajectories; read-only."""
    zeros = np.zeros(n, np.int64)
    zeros.flags.writeable = False
    return zeros


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
        return _zeros(draw.k)
    return (draw.uniforms(_STARTS, 0, draw.k) * windows).astype(np.int64) * stride


def _by_targets(
    store: ReplayStore, spec: TreeSpec, draw: _Draw
) -> Generator[Any, list[Any], tuple[Drawn, Floats]]:
    """Draw by a tree of sums. Returns the rows, and the probability of each."""
    tree = store.tree(spec)
    if store.num_shards == 1:
        drawn = store.draw(tree, draw.k, draw.seed % 2**64, _TARGETS, draw.round, draw.draw % 2**64)
        return drawn, drawn.weights / drawn.total
    # 1. The tree of all shards, down to the nodes that lie in one shard.
    groups, everything = yield from _whole_tree(store, spec)
    level, number, rest = descend(
        groups, max(height for height, _ in groups), draw.uniforms(_TARGETS, 0, draw.k) * everything
    )
    # 2. Each shard finishes the draws that end in it.
    mine = store.owner(number << 3 * level) == store.base // store.capacity
    part = store.descend(tree, level[mine], number[mine], rest[mine])
    # 3. All parts, in the order of the draws.
    found, _ = Drawn.of(draw.k)
    for theirs, columns in (yield (mine, part[:5])):
        for whole, column in zip(found[:5], columns, strict=True):
            whole[theirs] = column
    return found, found.weights / everything  # counted by _mark


def _whole_tree(
    store: ReplayStore, spec: TreeSpec
) -> Generator[Any, list[Any], tuple[dict[tuple[int, int], Floats], float]]:
    """The groups that shards share, the root's included, and the sum of all leaves."""
    own = store.edges(store.tree(spec))
    groups = merge((yield own) if store.num_shards > 1 else [own])
    everything = total(groups[len(own.first) - 1, 0])
    if not 0 < everything < np.inf:
        raise ReplayError(
            "nothing can be selected: all shards are empty, all weights are zero, or their sum is not finite"
        )
    return groups, everything


# ---- by candidates, without replacement


@dataclass(frozen=True, slots=True)
class Fifo:
    """The rows with the least timestamps, each once; of equal ones, the least index."""

    @property
    def spec(self) -> None:
        """Needs no tree: it reads the whole status table."""

    def choose(self, store: ReplayStore, draw: _Draw) -> Steps:
        """As of ``Selector``."""
        return _by_candidates(store, draw, lambda rows, _: rows["timestamp"])


@dataclass(frozen=True, slots=True)
class Lifo:
    """The rows with the greatest timestamps, each once; of equal ones, the least index."""

    @property
    def spec(self) -> None:
        """Needs no tree: it reads the whole status table."""

    def choose(self, store: ReplayStore, draw: _Draw) -> Steps:
        """As of ``Selector``."""
        return _by_candidates(store, draw, lambda rows, _: -rows["timestamp"])


@dataclass(frozen=True, slots=True)
class TopK:
    """The rows with the highest priorities, each once; of equal ones, the least index."""

    @property
    def spec(self) -> None:
        """Needs no tree: it reads the whole status table."""

    def choose(self, store: ReplayStore, draw: _Draw) -> Steps:
        """As of ``Selector``."""
        return _by_candidates(store, draw, lambda rows, _: -rows["priority"])


@dataclass(frozen=True, slots=True)
class WithoutReplacement:
    """Rows one after the other with P(i) as of ``Prioritized``, each at most once; exponent 0: uniform.

    Row i has the key -log(u_i) / p_i**exponent, and the least keys win: exactly successive draws without replacement
    (Efraimidis and Spirakis 2006). ``probabilities`` are those of a first draw.
    """

    exponent: float = 0.0

    @property
    def spec(self) -> TreeSpec | None:
        """For the sum of all weights; with exponent 0 that is a count."""
        return TreeSpec(kernel.PRIORITIES, float(self.exponent)) if self.exponent else None

    def choose(self, store: ReplayStore, draw: _Draw) -> Steps:
        """As of ``Selector``."""

        def keys(rows: NDArray[Any], u: Floats) -> Floats:
            with np.errstate(divide="ignore"):
                return -np.log1p(-u) / _powers(
                    rows, self.exponent
                )  # 1 - u is in (0, 1]: a priority of 0 gets inf

        everything = None
        if self.spec is not None:
            _, everything = yield from _whole_tree(store, self.spec)
        return (yield from _by_candidates(store, draw, keys, self.exponent, everything))


def _powers(rows: NDArray[Any], exponent: float) -> Floats:
    powers: Floats = np.where(rows["priority"] > 0, rows["priority"], 0.0) ** exponent
    return powers


def _by_candidates(
    store: ReplayStore,
    draw: _Draw,
    keys: Callable[[NDArray[Any], Floats], NDArray[Any]],
    exponent: float | None = None,
    everything: float | None = None,
) -> Steps:
    """The k rows with the least keys of all shards.

    Args:
        store, draw: as of ``Selector.choose``
        keys: of rows and a uniform number for each
        exponent: of the weights, if there is chance
        everything: sum of all weights; None: their number
    """
    rows = store.snapshot()
    tags = rows["tag"]
    selectable = (tags & np.uint64(3)) == kernel.COMMITTED
    if exponent is not None:
        selectable &= rows["priority"] > 0
    local = np.flatnonzero(selectable)
    available = len(local)
    if len(draw.taken):
        local = local[~np.isin(local + store.base, draw.taken)]
    u = np.empty(0) if exponent is None else draw.uniforms(_KEYS, store.base, store.capacity)[local]
    values = keys(rows[local], u)
    best = _least(values, draw.k)
    chosen = local[best]
    weights = _powers(rows[chosen], exponent or 0.0)
    own = (values[best], chosen + store.base, tags[chosen] >> np.uint64(2), weights, available)
    shards = (yield own) if store.num_shards > 1 else [own]
    merged = [np.concatenate([shard[column] for shard in shards]) for column in range(4)]
    order = np.lexsort((merged[1], merged[0]))[: draw.k]
    if len(order) < draw.k:
        held = sum(shard[4] for shard in shards)
        raise ReplayError(
            f"{draw.k + len(draw.taken)} different rows were requested where {held} can be selected"
        )
    everything = everything or sum(shard[4] for shard in shards)
    probabilities = np.ones(draw.k) if exponent is None else merged[3][order] / everything
    return _Found(merged[1][order], merged[2][order], _zeros(draw.k), probabilities)


def _least(keys: NDArray[Any], k: int) -> Integers:
    """Positions of the k least keys; of equal ones, the first."""
    if len(keys) <= k:
        return np.arange(len(keys))
    bound = np.partition(keys, k - 1)[k - 1]
    below = np.flatnonzero(keys < bound)
    return np.concatenate((below, np.flatnonzero(keys == bound)[: k - len(below)]))


# ---- the whole selection


def select(
    store: ReplayStore | Sequence[ReplayStore],
    selector: Selector,
    k: int,
    *,
    seed: int,
    draw: int,
    exchange: Exchange | None = None,
) -> Selection:
    """Select k rows, and count them as sampled.

    Args:
        store: the only shard; or all shards of a table, in order; or this rank's shard, with ``exchange``
        selector: one that the store was created for
        k: rows, at least 1
        seed, draw: the list is a function of these and of the status of all shards. ``draw`` counts, e.g. batches
        exchange: all-gather of Python values among the ranks, in the order of shards; all call ``select`` alike

    Raises:
        ReplayError: nothing, or too little, can be selected; or the store was not created for this selector.
    """
    if k < 1:
        raise ReplayError(f"{k} rows were requested: use a positive number")
    shards = list(store) if isinstance(store, Sequence) else [store]
    count = shards[0].num_shards
    if exchange is None and [shard.base // shard.capacity for shard in shards] != list(range(count)):
        raise ReplayError(
            f"{len(shards)} shards of {count} were given: give all in order, or one and exchange="
        )
    runs = [_select(shard, selector, k, seed, draw) for shard in shards]
    if exchange is None:
        return _lockstep(runs)
    return _lockstep(runs, exchange)


def _lockstep(
    runs: list[Generator[Any, list[Any], Selection]], exchange: Exchange | None = None
) -> Selection:
    """Run the shards of this process, which exchange values with each other, or through ``exchange``."""
    answers: list[Any] | None = None
    while True:
        values, ended = [], []
        for run in runs:
            try:
                values.append(run.send(answers) if answers is not None else next(run))
            except StopIteration as stop:
                ended.append(stop.value)
        if ended:
            found: Selection = ended[0]
            return found
        answers = values if exchange is None else exchange(values[0])


def _select(
    store: ReplayStore, selector: Selector, k: int, seed: int, draw: int
) -> Generator[Any, list[Any], Selection]:
    parts: list[_Found] = []
    missing, taken = k, _zeros(0)
    for round_ in range(_ROUNDS):
        found = yield from selector.choose(store, _Draw(missing, seed, draw, round_, taken))
        accepted = found.accepted
        if not found.is_counted:
            accepted = yield from _mark(store, found)
        if accepted is not None and not accepted.all():
            found = _Found(
                found.indices[accepted],
                found.generations[accepted],
                found.steps[accepted],
                found.probabilities[accepted],
            )
        parts.append(found)
        missing -= len(found.indices)
        if not missing:
            return (yield from _finish(store, selector, parts))
        taken = np.concatenate((taken, found.indices))
    raise ReplayError(
        f"{missing} of {k} rows could not be selected: others remove them as fast as they are selected"
    )


def _mark(store: ReplayStore, found: _Found) -> Generator[Any, list[Any], NDArray[np.bool_]]:
    """Count the rows in their shards. Returns which could still be selected."""
    mine = store.owner(found.indices) == store.base // store.capacity
    own = store.mark(Keys(found.indices[mine], found.generations[mine]))
    accepted = np.empty(len(mine), bool)
    for theirs, values in (yield (mine, own)) if store.num_shards > 1 else [(mine, own)]:
        accepted[theirs] = values
    return accepted


def _finish(
    store: ReplayStore, selector: Selector, parts: list[_Found]
) -> Generator[Any, list[Any], Selection]:
    """Join the rounds, and add importance weights."""
    columns = (
        parts[0][:4] if len(parts) == 1 else [np.concatenate([part[c] for part in parts]) for c in range(4)]
    )
    indices, generations, steps, probabilities = columns
    importance = getattr(selector, "importance", 0.0)
    weights = _ones(len(indices))
    if importance:
        count = sum((yield len(store))) if store.num_shards > 1 else len(store)
        # w_i = (N P(i))**-beta / max_j w_j
        raw = (count * probabilities) ** -importance
        weights = (raw / raw.max()).astype(np.float32)
    return Selection(Keys(indices, generations), steps, probabilities, weights)


@dataclass(frozen=True, slots=True)
class Share:
    """One table of a mixture: its shards, how rows are selected, and its part of every batch."""

    store: ReplayStore | Sequence[ReplayStore]
    selector: Selector
    share: float


def select_mixture(shares: Sequence[Share], k: int, *, seed: int, draw: int) -> list[Selection]:
    """Select k rows from several tables in fixed shares: one selection for each, of ``mixture_counts`` rows.

    Raises:
        ReplayError: shares are negative or all zero; or as of ``select``.
    """
    counts = mixture_counts([share.share for share in shares], k, draw)
    empty = Selection(
        Keys(np.empty(0, np.int64), np.empty(0, np.uint64)),
        np.empty(0, np.int64),
        np.empty(0),
        np.empty(0, np.float32),
    )
    return [
        select(share.store, share.selector, count, seed=seed, draw=draw) if count else empty
        for share, count in zip(shares, counts, strict=True)
    ]


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
        # The golden ratio's multiples fill [0, 1) evenly, whatever the batch.
        place = (draw * left + position + 0.5) * (np.sqrt(5) - 1) / 2 % 1 * bounds[-1]
        counts[min(int(np.searchsorted(bounds, place, "right")), len(parts) - 1)] += 1
    return [int(count) for count in counts]
