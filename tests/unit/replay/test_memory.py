"""Memory of a store: what is refused before it is allocated."""

import pytest

from actors.replay import ReplayError, memory


def test_more_than_the_process_may_have_is_refused_before_it_is_tried(monkeypatch):
    monkeypatch.setattr(memory, "memory_bytes", lambda: 2**20)
    with pytest.raises(
        ReplayError, match=r"needs 2\.0 MiB in memory \(more than this host, or this process's cgroup, has\)"
    ):
        memory.create(2**21, None)
