"""Selection from a table of several shards: what is asked of each shard, and how the answers become one draw.

*Targets*: uniform numbers times the total of a tree of sums. The shards' trees are pieces of one tree; they tell its edges,
the draws go down to the shard that holds each, and that shard finishes (O(k + m log n) traffic for m shards). *Candidates*:
each shard tells its k rows with the least keys, and the k least of all are selected (O(mk)). GEAR, section 3.3.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.replay import kernel
from actors.replay.calls import CALLS
from actors.replay.candidates import Candidates, Numbers, Order
from actors.replay.errors import ReplayError
from actors.replay.kernel import TreeStruct, address
from actors.replay.rows import Drawn, Keys, TreeSpec, checked
from actors.replay.store import ReplayStore
from actors.replay.tree import Edges, Floats, Integers, descend, merge, targets_of, total
from placement.errors import counted

Exchange = Callable[[Any], list[Any]]
"""Given this rank's value, returns the values of all shards in order: an all-gather."""
_ALL_LOST = "nothing can be selected: all shards of the table are lost"


class ShardedTable(ABC):
    """All shards of a table. Shards that are lost are left out: their rows are not selected, the others' more often.

    Attributes:
        capacity: rows of each shard
        num_shards: shards of the table, lost ones included
    """

    capacity: int
    num_shards: int

    @abstractmethod
    def ask(self, call: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Make a call of ``CALLS`` at these shards; the results by shard. Those that are lost are left out."""

    @property
    def present(self) -> Sequence[int]:
        """Shards that are not lost, in order: all, where none can be."""
        return range(self.num_shards)

    @abstractmethod
    def tree(self, spec: TreeSpec) -> int:
        """As of ``ReplayStore.tree``."""

    @property
    @abstractmethod
    def max_times_sampled(self) -> int:
        """As of ``ReplayStore.max_times_sampled``."""

    def draws_left(self, tree: int, most: int) -> int:
        """As of ``ReplayStore.draws_left``, of all shards together."""
        return min(most, sum(self.ask("draws_left", self._everywhere(tree, most)).values()))

    @property
    def is_limited(self) -> bool:
        """Whether a shard has a rate limiter by which readers of this table wait, as far as this process knows."""
        return False

    def stores_here(self) -> Sequence[ReplayStore]:
        """Shards that are open in this process."""
        return ()

    def owner(self, indices: Integers) -> Integers:
        """Shard of each global index."""
        return indices // self.capacity

    def draw(self, tree: int, n: int, *numbers: int) -> Drawn:
        """Rows that hold n random targets of the whole table's tree, counted as selected.

        As of ``ReplayStore.draw``. Raises ReplayError where nothing can be selected, or all shards are lost.
        """
        if self.num_shards == 1:
            # The same rows by one request: there are no edges to merge, and the shard counts what it draws.
            answers = self.ask("draw", self._everywhere(tree, n, *numbers))
            if not answers:
                raise ReplayError(_ALL_LOST)
            return Drawn(*answers[0])
        seed, stream, round_, draw = numbers
        u = Numbers(seed, draw, round_).uniforms(stream, 0, n)
        while (found := self._draw(tree, u)) is None:
            pass  # a shard was lost meanwhile: the same numbers, with the rest
        # A target whose row has lost its weight since the shards sent their edges ends in another: not a draw of it, and
        # not to be counted as one, since that may use up the times that the row can be sampled.
        accepted = found.weights > 0
        accepted[accepted] = self.mark(Keys(found.indices[accepted], found.generations[accepted]))
        return found._replace(accepted=accepted)

    def _draw(self, tree: int, u: Floats) -> Drawn | None:
        """One attempt; None if a shard was lost between the two questions."""
        # 1. The tree of all shards, down to the nodes that lie in one shard.
        groups, everything = self._groups(tree)
        drawable(everything)
        targets = targets_of(u, everything)
        level, number, rest = descend(groups, max(height for height, _ in groups), targets)
        # 2. Each shard finishes the draws that end in it.
        parts = self._by_owner(number << 3 * level)
        answers = self.ask(
            "descend", {shard: (tree, level[at], number[at], rest[at]) for shard, at in parts.items()}
        )
        if answers.keys() != parts.keys():
            return None
        # 3. All parts, in the order of the draws.
        found = Drawn.of(len(u))
        for shard, columns in answers.items():
            for whole, column in zip(found[:5], columns, strict=True):
                whole[parts[shard]] = column
        found.total[:] = everything
        return found

    def total(self, tree: int) -> float:
        """Sum of all leaves of the whole table's tree."""
        return self._groups(tree)[1]

    def _groups(self, tree: int) -> tuple[dict[tuple[int, int], Floats], float]:
        """The groups that shards share, the root's included, and the sum of all leaves."""
        edges = [Edges(*found) for found in self.ask("edges", self._everywhere(tree)).values()]
        if not edges:
            raise ReplayError(_ALL_LOST)
        groups = merge(edges)
        return groups, total(groups[len(edges[0].first) - 1, 0])

    def candidates(self, order: Order, k: int, numbers: Numbers, taken: Integers) -> Candidates:
        """The k rows with the least keys of all shards; of equal ones, the least index."""
        found = self.ask("candidates", self._everywhere(tuple(order), k, tuple(numbers), taken))
        if not found:
            raise ReplayError(_ALL_LOST)
        return Candidates.merge([Candidates(*columns) for columns in found.values()], k)

    def mark(self, keys: Keys) -> NDArray[np.bool_]:
        """Count rows as selected. False where a row was not selectable any more, or its shard is lost."""
        accepted = np.zeros(len(keys.indices), bool)
        parts = self._by_owner(keys.indices)
        for shard, values in self.ask("mark", self._split(keys, parts)).items():
            accepted[parts[shard]] = values
        return accepted

    def unmark(self, keys: Keys) -> None:
        """As of ``ReplayStore.unmark``."""
        self.ask("unmark", self._split(keys, self._by_owner(keys.indices)))

    def __len__(self) -> int:
        """Rows that can be selected."""
        return sum(self.ask("rows", self._everywhere()).values())

    def _everywhere(self, *arguments: Any) -> dict[int, tuple[Any, ...]]:
        return dict.fromkeys(self.present, arguments)

    def _by_owner(self, indices: Integers) -> dict[int, Integers]:
        """Positions of each shard's indices, ascending. Raises ReplayError where an index is outside the table."""
        owners = self.owner(indices)
        if len(owners) and not 0 <= owners.min() <= owners.max() < self.num_shards:
            raise ReplayError(
                f"indices {int(indices.min())} to {int(indices.max())} were given: this table has 0 to "
                f"{self.capacity * self.num_shards - 1}"
            )
        order = np.argsort(owners, kind="stable")
        ordered = owners[order]
        changes = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        return {int(owners[at[0]]): at for at in np.split(order, changes) if len(at)}

    @staticmethod
    def _split(keys: Keys, parts: Mapping[int, Integers]) -> dict[int, tuple[Any, ...]]:
        indices, generations = checked(keys)
        return {shard: (indices[at], generations[at]) for shard, at in parts.items()}


class LocalShards(ShardedTable):
    """All shards of a table, open in this process."""

    def __init__(self, stores: Sequence[ReplayStore]) -> None:
        """Take the shards in order. Raises ReplayError where they are not all the shards of one table."""
        count = stores[0].num_shards if stores else 0
        if [store.base // store.capacity for store in stores] != list(range(count)):
            raise ReplayError(
                f"got {counted(len(stores), 'shard')} of {count}: give all in order, or one and exchange="
            )
        self._stores, self.capacity, self.num_shards = stores, stores[0].capacity, count

    def tree(self, spec: TreeSpec) -> int:
        """As of ``ReplayStore.tree``."""
        return self._stores[0].tree(spec)

    @property
    def max_times_sampled(self) -> int:
        """As of ``ReplayStore.max_times_sampled``."""
        return self._stores[0].max_times_sampled

    @property
    def is_limited(self) -> bool:
        """As of ``ShardedTable``."""
        return any(store.is_limited for store in self._stores)

    def stores_here(self) -> Sequence[ReplayStore]:
        """All."""
        return self._stores

    def ask(self, call: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """As of ``ShardedTable``."""
        return {shard: CALLS[call](self._stores[shard], *given) for shard, given in arguments.items()}


class ExchangedShards(ShardedTable):
    """The table as one of its ranks sees it: every rank has one shard, and all ask the same, at the same time. A lost rank
    ends the exchange.
    """

    def __init__(self, store: ReplayStore, exchange: Exchange) -> None:
        """Answer for ``store``; ``exchange`` is an all-gather in the order of shards."""
        self._store, self._exchange = store, exchange
        self.capacity, self.num_shards = store.capacity, store.num_shards

    def tree(self, spec: TreeSpec) -> int:
        """As of ``ReplayStore.tree``."""
        return self._store.tree(spec)

    @property
    def max_times_sampled(self) -> int:
        """As of ``ReplayStore.max_times_sampled``."""
        return self._store.max_times_sampled

    def ask(self, call: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """As of ``ShardedTable``. Every rank exchanges, also one of which nothing is asked."""
        own = arguments.get(self._store.base // self.capacity)
        answers = self._exchange(None if own is None else CALLS[call](self._store, *own))
        return {shard: answers[shard] for shard in arguments}


class GatheredTable:
    """A table whose whole status is gathered for every draw, and drawn from in one place: GEAR's centralised selection."""

    def __init__(self, shards: ShardedTable) -> None:
        """Gather from these shards."""
        self._shards, self._size = shards, shards.capacity * shards.num_shards

    def tree(self, spec: TreeSpec) -> int:
        """As of ``ReplayStore.tree``."""
        return self._shards.tree(spec)

    @property
    def max_times_sampled(self) -> int:
        """As of ``ReplayStore.max_times_sampled``."""
        return self._shards.max_times_sampled

    def draws_left(self, tree: int, most: int) -> int:
        """As of ``ReplayStore.draws_left``."""
        return self._shards.draws_left(tree, most)

    def _status(self, tree: int) -> tuple[NDArray[Any], Floats]:
        """Status and leaves of the whole table, (size,) each; zeros where a shard is lost."""
        rows, leaves = np.zeros(self._size, kernel.ROW), np.zeros(self._size)
        arguments = dict.fromkeys(self._shards.present, (tree,))
        for shard, (found, weights) in self._shards.ask("leaves", arguments).items():
            part = slice(shard * self._shards.capacity, (shard + 1) * self._shards.capacity)
            rows[part], leaves[part] = found.view(kernel.ROW), weights
        return rows, leaves

    def draw(self, tree: int, n: int, *numbers: int) -> Drawn:
        """As of ``ReplayStore.draw``."""
        seed, stream, round_, draw = numbers
        rows, leaves = self._status(tree)
        struct, sums = _tree_of(leaves)
        found = Drawn.of(n)
        everything = drawable(float(sums[-kernel.FANOUT]))  # the root
        found.total[:] = everything
        found.rest[:] = targets_of(Numbers(seed, draw, round_).uniforms(stream, 0, n), everything)
        kernel.library().replay_tree_draw(
            ctypes.addressof(struct), n, address(found.rest), address(found.indices)
        )
        chosen = rows[found.indices]
        found.generations[:], found.lengths[:] = chosen["tag"] >> np.uint64(2), chosen["length"]
        found.weights[:] = leaves[found.indices]
        return found._replace(accepted=self.mark(Keys(found.indices, found.generations)))

    def total(self, tree: int) -> float:
        """Sum of all leaves, in the order of the tree's additions."""
        return float(_tree_of(self._status(tree)[1])[1][-kernel.FANOUT])

    def candidates(self, order: Order, k: int, numbers: Numbers, taken: Integers) -> Candidates:
        """The k rows with the least keys of the whole table."""
        return Candidates.of(self._status(0)[0], 0, order, k, numbers, taken)

    def mark(self, keys: Keys) -> NDArray[np.bool_]:
        """Count rows as selected, each in its shard."""
        return self._shards.mark(keys)

    def unmark(self, keys: Keys) -> None:
        """As of ``ReplayStore.unmark``."""
        self._shards.unmark(keys)

    def __len__(self) -> int:
        """Rows that can be selected."""
        return len(self._shards)


Table = ReplayStore | ShardedTable | GatheredTable
"""What selectors draw from: the only shard of a table, or all of its shards together."""


def _tree_of(leaves: Floats) -> tuple[TreeStruct, Floats]:
    """A tree of sums over these leaves, and its memory: level by level, the root's group last."""
    library, struct, size = kernel.library(), TreeStruct(kind=kernel.PRIORITIES), len(leaves)
    at = ctypes.addressof(struct)
    memory = np.zeros(library.replay_tree_layout(at, None, 0, size, size) // 8)
    library.replay_tree_layout(at, address(memory), 0, size, size)
    memory[:size] = leaves
    library.replay_tree_build(at)
    return struct, memory


def drawable(everything: float) -> float:
    """The sum of all leaves, if rows can be drawn by it. Raises ReplayError where it is not positive and finite."""
    if not 0 < everything < np.inf:
        raise ReplayError(
            "nothing can be selected: all shards are empty, all weights are zero, or their sum is not finite"
        )
    return everything
