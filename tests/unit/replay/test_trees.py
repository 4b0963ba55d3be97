"""Trees of sums: the kernel against the readable descent, exact sums above 2**24, the trees of shards as one tree.

A tree of rows has bits for leaves, and numbers from level 3 on; the others have numbers only.
"""

import ctypes

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.replay import kernel
from actors.replay.kernel import PRIORITIES, ROWS, TreeStruct, address
from actors.replay.tree import Edges, descend, merge, targets_of


class Tree:
    """A tree of given leaves, in memory of its own."""

    def __init__(self, leaves, base=0, whole=None, kind=PRIORITIES):
        self.library, self.struct = kernel.library(), TreeStruct(kind=kind)
        shape = (base, len(leaves), whole or base + len(leaves))
        size = self.library.replay_tree_layout(ctypes.addressof(self.struct), None, *shape)
        self.memory = np.zeros(size // 8 + 8)
        self.library.replay_tree_layout(ctypes.addressof(self.struct), address(self.memory), *shape)
        self.at = ctypes.addressof(self.struct)
        self.set(np.arange(base, base + len(leaves)), leaves)

    def set(self, indices, values):
        indices, values = np.asarray(indices, np.int64), np.asarray(values, float)
        scratch = indices.copy()
        self.library.replay_tree_set(self.at, len(indices), *map(address, (indices, values, scratch)))

    def group(self, level, number):
        first = self.struct.first[level - 1] & ~7
        place = (self.struct.level[level - 1] - address(self.memory)) // 8 + 8 * number - first
        return self.memory[place : place + 8]

    def groups(self):
        levels = range(1, self.struct.levels)
        return {
            (level, self.struct.first[level] + k): self.group(level, self.struct.first[level] + k)
            for level in levels
            for k in range(self.struct.nodes[level])
        }

    def total(self):
        return self.memory[(self.struct.level[self.struct.levels - 1] - address(self.memory)) // 8]

    def draw(self, u):
        targets, leaves = targets_of(np.asarray(u), self.total()), np.empty(len(u), np.int64)
        self.library.replay_tree_draw(self.at, len(u), address(targets), address(leaves))
        return leaves, targets

    def edges(self):
        levels = self.struct.levels
        first = np.array(self.struct.first[:levels])
        last = first + np.array(self.struct.nodes[:levels]) - 1
        children = np.zeros((levels, 2, 8))
        for level in range(1, levels):
            children[level] = self.group(level, first[level]), self.group(level, last[level])
        return Edges(first, last, children)


weights = st.lists(st.one_of(st.just(0.0), st.floats(0, 1e6)), min_size=1, max_size=200).filter(any)


@settings(max_examples=60, deadline=None)
@given(leaves=weights, seed=st.integers(0, 2**32))
@example(leaves=[5e-324], seed=0)
def test_draws_are_those_of_the_readable_descent(leaves, seed):
    tree, u = Tree(leaves), np.random.default_rng(seed).random(50)
    drawn, rests = tree.draw(u)
    level, number, rest = descend(tree.groups(), tree.struct.levels - 1, targets_of(u, tree.total()))
    assert not level.any()
    np.testing.assert_array_equal(drawn, number)
    np.testing.assert_array_equal(rests, rest)
    assert (np.asarray(leaves)[drawn] > 0).all()
    assert (rests < np.asarray(leaves)[drawn]).all()


@settings(max_examples=60, deadline=None)
@given(leaves=weights, changes=st.lists(st.tuples(st.integers(0, 199), st.floats(0, 1e3)), max_size=40))
def test_changed_leaves_give_the_tree_that_is_built_from_them(leaves, changes):
    changes = [(index % len(leaves), value) for index, value in changes]
    tree = Tree(leaves)
    tree.set(*(zip(*changes, strict=True) if changes else ([], [])))
    expected = np.asarray(leaves)
    for index, value in changes:
        expected[index] = value
    np.testing.assert_array_equal(tree.memory, Tree(expected).memory)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), cuts=st.sampled_from([1, 2, 3, 5, 6, 10]))
def test_the_trees_of_shards_are_pieces_of_the_whole_tree(seed, cuts):
    leaves = np.random.default_rng(seed).random(60) ** 4
    whole, size = Tree(leaves), 60 // cuts
    shards = [Tree(leaves[k * size : (k + 1) * size], k * size, 60) for k in range(cuts)]
    merged = merge([shard.edges() for shard in shards])
    assert merged
    for (level, number), children in merged.items():
        np.testing.assert_array_equal(children, whole.group(level, number))


def counts_of(present, top):
    """Children of the nodes of each level, for leaves that are 0 or 1."""
    padded = np.zeros(8**top)
    padded[: len(present)] = present
    groups = {}
    for level in range(1, top + 1):
        children = padded.reshape(-1, 8)
        groups |= {(level, number): children[number] for number in np.flatnonzero(children.any(1)).tolist()}
        padded = children.sum(1)
    return groups


@st.composite
def rows_present(draw):
    """Base, indices up to the last of a shard, and which of them are present, at least one: sparse, dense or in runs."""
    base, size = draw(st.integers(0, 1200)), draw(st.integers(1, 1800))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    present = rng.random(size) < draw(st.sampled_from([0.004, 0.5, 0.99, 1.0]))
    for begin, length in draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, 700)), max_size=2)):
        present[begin : begin + length] = rng.random() < 0.5
    present[draw(st.integers(0, size - 1))] = True
    return base, present


@settings(max_examples=80, deadline=None)
@given(shard=rows_present(), seed=st.integers(0, 2**32))
def test_draws_from_bits_are_those_of_the_readable_descent(shard, seed):
    base, present = shard
    tree, indices = Tree(present, base, kind=ROWS), base + np.flatnonzero(present)
    assert tree.total() == len(indices)
    top = tree.struct.levels - 1
    targets = targets_of(np.random.default_rng(seed).random(50), tree.total())
    groups = counts_of(np.concatenate((np.zeros(base), present)), top)
    _, number, rest = descend(groups, top, targets)
    leaves = np.empty(50, np.int64)
    for kernel_targets, start in ((targets.copy(), None), (targets.copy(), np.zeros(50, np.int64))):
        if start is None:
            tree.library.replay_tree_draw(tree.at, 50, address(kernel_targets), address(leaves))
        else:
            arrays = map(address, (np.full(50, top), start, kernel_targets, leaves))
            tree.library.replay_tree_descend(tree.at, 50, *arrays)
        np.testing.assert_array_equal(leaves, number)
        np.testing.assert_array_equal(kernel_targets, rest)


@settings(max_examples=80, deadline=None)
@given(shard=rows_present(), seed=st.integers(0, 2**32))
def test_target_n_is_the_nth_row_that_is_present(shard, seed):
    """Also after rows have come and gone: each between two others of its word, byte and line."""
    base, present = shard
    tree, rng = Tree(present, base, kind=ROWS), np.random.default_rng(seed)
    changed = rng.choice(len(present), min(len(present), 40), replace=False)
    present[changed] = rng.random(len(changed)) < 0.5
    present[changed[:1]] = True
    tree.set(base + changed, present[changed])
    indices = base + np.flatnonzero(present)
    assert tree.total() == len(indices)
    targets, leaves = np.arange(len(indices)) + 0.25, np.empty(len(indices), np.int64)
    tree.library.replay_tree_draw(tree.at, len(indices), address(targets), address(leaves))
    np.testing.assert_array_equal(leaves, indices)
    assert (targets == 0.25).all()


@pytest.mark.parametrize("target", [-1.0, 3.0, 511.0, 512.0, 1e300, np.inf, -np.inf, np.nan])
def test_a_target_beyond_the_sum_ends_in_an_index_of_the_tree(target):
    """Sums may change during a draw without the lock. It is repeated then, but reads nothing outside until it knows."""
    for size in (3, 700):
        tree = Tree(np.arange(size) < 3, 100, kind=ROWS)
        targets, leaves = np.array([target]), np.empty(1, np.int64)
        tree.library.replay_tree_draw(tree.at, 1, address(targets), address(leaves))
        assert 100 <= leaves[0] < 100 + size


@pytest.mark.parametrize("kind", [PRIORITIES, ROWS])
def test_thirty_million_equal_weights_are_drawn_evenly(kind):
    """Float32 sums end at 2**24: beyond it, single precision draws only some of the indices."""
    size, draws = 30_000_000, 200_000
    tree = Tree(np.ones(size), kind=kind)
    drawn, _ = tree.draw(np.random.default_rng(0).random(draws))
    assert tree.total() == size
    assert drawn.max() > 0.999 * size
    for part in (drawn[drawn < 2**24], drawn[drawn >= 2**24]):
        # The share of odd indices is 1/2 with a standard deviation of 1 / (2 sqrt(n)).
        assert abs(np.mean(part % 2) - 0.5) < 4 * 0.5 / np.sqrt(len(part))


@pytest.mark.parametrize(("seed", "stream", "round_", "draw"), [(0, 0, 0, 0), (2**63 + 5, 2, 7, 123456789)])
def test_uniform_numbers_are_those_of_numpys_philox(seed, stream, round_, draw):
    key, counter = np.array([seed, stream], np.uint64), np.array([0, 0, round_, draw], np.uint64)
    expected = np.random.Generator(np.random.Philox(key=key, counter=counter)).random(1000)
    for first in (0, 1, 6, 503):
        out = np.empty(1000 - first)
        kernel.library().replay_uniforms(seed, stream, round_, draw, first, len(out), address(out))
        np.testing.assert_array_equal(out, expected[first:])
