"""Memory of a store: what is refused before it is allocated, its pages, and that it is unmapped."""

import errno
import gc
import mmap
import os

import pytest

from actors.replay import Column, ReplayError, ReplaySchema, ReplayStore, memory


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
