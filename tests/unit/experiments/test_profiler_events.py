"""Profiles of very many events are evaluated exactly, and in bounded memory."""

import multiprocessing
from pathlib import Path

import pytest

from experiments.profiler.events import PROCESSES, write_profile
from rayagi.profiler.overlap import breakdown
from rayagi.profiler.trace import read_profile


def evaluated(folder):
    """In a process of its own: the most memory it had; by process, the sum of all sets of categories, and its life."""
    found = breakdown(read_profile(folder))
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]
    lives = {each.label: each.life_ns for each in found.processes}
    return 1024 * int(peak), {
        label: (sum(found.totals[label].values()), life) for label, life in lives.items()
    }


@pytest.mark.parametrize(
    "events", [40_000, pytest.param(100_000_000, marks=pytest.mark.slow)], ids=["some", "a hundred million"]
)
def test_every_moment_is_in_one_set_of_categories(tmp_path, events):
    folder = tmp_path / "profile"
    written = write_profile(folder, events, loops=10)
    assert written > 0.9 * events
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peak_bytes, sums = pool.apply(evaluated, (folder,))
    assert len(sums) == PROCESSES
    for total, life in sums.values():
        assert total == life > 0
    assert peak_bytes < 4e9
