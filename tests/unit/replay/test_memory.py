"""Memory of a store: bytes of a row, what is refused before it is allocated, its pages, and that it is unmapped."""

import errno
import gc
import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.replay import Column, Prioritized, ReplayError, ReplaySchema, ReplayStore, memory
from actors.replay.layout import file_sizes, tree_specs

ANT = {"obs": 105, "act": 8, "rew": 1, "done": 1, "next_obs": 105}
TRANSITIONS = ReplaySchema(
    tuple(Column(name=name, dtype="float32", shape=(size,)) for name, size in ANT.items())
)


@pytest.mark.parametrize(
    ("selectors", "trees"),
    [
        ((), 143_104),
        # Sums of 8, 64, ... doubles, in whole lines of 8, beside it.
        ((Prioritized(0.6),), 143_104 + 8 * (1_000_000 + 125_000 + 15_632 + 1_960 + 248 + 32 + 8 + 8)),
    ],
)
def test_a_million_transitions_for_uniform_draws_have_64_bytes_each_and_a_bit(selectors, trees):
    """Lines of 512 bits: 1954; counts of 512, 4096, ... rows in whole lines: 1960 + 248 + 32 + 8 + 8 doubles."""
    assert 1954 * 64 + 8 * (1960 + 248 + 32 + 8 + 8) == 143_104
    meta = {
        "schema": TRANSITIONS.to_json(),
        **{"capacity": 10**6, "slots": 10**6, "shard": 0, "num_shards": 1},
        **{"trees": tree_specs(selectors, "fifo"), "spills": False},
    }
    status, blocks = file_sizes(meta, TRANSITIONS)
    assert blocks == 880 * 10**6
    description = 2 * mmap.PAGESIZE  # and the header before it
    assert status == memory.page_aligned(description + 64 * 10**6 + trees)


@pytest.mark.parametrize(
    ("columns", "steps", "offsets", "row_bytes"),
    [
        ([("float32", (105,)), ("float32", (8,)), ("float32", (105,))], 1, (0, 420, 452), 872),
        # A float64, two int16 (copied to a GPU as a word of 4 bytes), a bool, and 3 bytes before the next row.
        ([("bool", ()), ("float64", ()), ("int16", (2,))], 1, (12, 0, 8), 16),
        ([("bool", ()), ("int16", ()), ("float32", (3,))], 5, (70, 60, 0), 76),
        ([("uint8", (84, 84))], 4, (0,), 28_224),
        ([("uint8", (3,))], 3, (0,), 9),
    ],
)
def test_the_columns_of_a_row_follow_each_other_by_falling_alignment(columns, steps, offsets, row_bytes):
    schema = ReplaySchema(
        tuple(Column(name=str(k), dtype=dtype, shape=shape) for k, (dtype, shape) in enumerate(columns)),
        steps,
    )
    assert (schema.offsets, schema.row_bytes) == (offsets, row_bytes)


columns = st.tuples(
    st.sampled_from(["bool", "int8", "int16", "uint32", "float32", "float64"]),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(0, 1),
)


@given(given_columns=st.lists(columns, min_size=1, max_size=5), steps=st.integers(1, 5))
def test_blocks_are_aligned_and_do_not_overlap(given_columns, steps):
    schema = ReplaySchema(
        tuple(
            Column(name=str(k), dtype=dtype, shape=tuple(shape), extra=extra)
            for k, (dtype, shape, extra) in enumerate(given_columns)
        ),
        steps,
    )
    taken = np.zeros(schema.row_bytes, int)
    for column, offset in zip(schema.columns, schema.offsets, strict=True):
        for unit in (column.dtype.itemsize, 1 if column.step_bytes % 4 else 4):
            assert offset % unit == schema.row_bytes % unit == 0
        taken[offset : offset + (steps + column.extra) * column.step_bytes] += 1
    assert taken.max() == 1
    assert (taken == 0).sum() < 8


def test_more_than_the_process_may_have_is_refused_before_it_is_tried(monkeypatch):
    monkeypatch.setattr(memory, "memory_bytes", lambda: 2**20)
    with pytest.raises(
        ReplayError, match=r"needs 2\.0 MiB in memory \(more than this host, or this process's cgroup, has\)"
    ):
        memory.create(2**21, None)


def mapped(descriptor):
    """Addresses at which this process has a file, and KiB of it in huge pages."""
    inode, found, inside = str(os.fstat(descriptor).st_ino), {}, None
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            words = line.split()
            if "-" in words[0]:
                inside = int(words[0].split("-")[0], 16) if words[4] == inode else None
            elif words[0] == "ShmemPmdMapped:" and inside is not None:
                found[inside] = int(words[1])
    return found


def collapses():
    """Whether Linux can give a file huge pages on request."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, memory.HUGE_PAGE)
    os.pwrite(descriptor, b"x", 0)
    space, begin = memory._map(descriptor, memory.HUGE_PAGE)
    try:
        space.madvise(memory._MADV_COLLAPSE, begin, memory.HUGE_PAGE)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_every_process_has_the_rows_in_huge_pages_and_zeros_in_them():
    if not collapses():
        pytest.skip("this system gives shared memory no huge pages on request")
    schema = ReplaySchema((Column(name="obs", dtype="float32", shape=(1024,)),))
    rows = 3 * memory.HUGE_PAGE // 2 // schema.row_bytes  # one huge page and half of one in small pages
    with ReplayStore.create(schema, rows) as store, ReplayStore.attach(store.endpoint) as other:
        for one in (store, other):
            found = mapped(one._descriptors[1])
            assert len(found) == 2  # of both objects
            assert set(found.values()) == {memory.HUGE_PAGE // 1024}
            assert all(at % memory.HUGE_PAGE == 0 for at in found)
        assert bytes(store._data) == bytes(rows * schema.row_bytes)


@pytest.mark.parametrize("populate", [True, False])
def test_memory_is_whole_without_huge_pages(populate, monkeypatch):
    # Linux before 6.1 does not know the request; with overcommit_memory = 2 it may refuse more address space.
    monkeypatch.setattr(memory, "_MADV_COLLAPSE", 1000)
    size, anonymous = memory.HUGE_PAGE + mmap.PAGESIZE, mmap.mmap

    def refused(descriptor, *arguments):
        if descriptor == -1:
            raise OSError(errno.ENOMEM, "refused")
        return anonymous(descriptor, *arguments)

    monkeypatch.setattr(memory.mmap, "mmap", refused)
    descriptor = memory.create(size, None)
    view = memory.map_shared(descriptor, populate=populate)
    assert os.fstat(descriptor).st_blocks * 512 == size  # all is allocated
    view[-1] = 7
    assert os.pread(descriptor, 1, size - 1) == b"\x07"
    os.close(descriptor)


def test_a_file_is_unmapped_with_its_last_view():
    descriptor = memory.create(memory.HUGE_PAGE + mmap.PAGESIZE, None)
    view = memory.map_shared(descriptor, populate=True)
    part = view[-1:]
    del view
    gc.collect()
    assert len(mapped(descriptor)) == 1
    part[0] = 1
    del part
    gc.collect()
    assert not mapped(descriptor)
    os.close(descriptor)
