"""GEAR's figures: clients choose the same rows and copy whole ones, and the tables and drawings of measurements."""

import argparse

import numpy as np
import pytest

from actors.replay import Keys, Selection
from experiments.replay import figures


def test_each_client_has_its_part_of_the_selection():
    chosen = Selection(
        Keys(np.arange(6), np.arange(6, dtype=np.uint64)), np.full(6, 9), np.ones(6), np.ones(6, np.float32)
    )
    parts = [figures.part_of(chosen, rank, 2) for rank in range(3)]
    assert [part.keys.indices.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part.steps.tolist() for part in parts] == [[0, 0]] * 3  # from the beginning of the trajectory


@pytest.mark.parametrize(("clients", "nodes"), [(2, 1), (2, 2)])
def test_clients_choose_alike_and_copy_whole_rows(clients, nodes, monkeypatch):
    monkeypatch.setattr(figures, "BATCH", 4)
    assert figures.throughput(clients, nodes, 0.02, 40) > 0


def test_selection_times_are_of_each_table(tmp_path):
    given = argparse.Namespace(sizes=[2000, 4000], seconds=0.004, repeats=2)
    report = figures.measure_selection(given)
    assert len(report["lines"]) == 4 * 2 * 2
    assert all(
        [*line] == [2000, 4000] and min(min(v) for v in line.values()) > 0
        for line in report["lines"].values()
    )
    rows = figures.table(report).splitlines()
    assert rows[0] == "| rows of the table | 2,000 | 4,000 |"
    assert len(rows) == 2 + 16
    figures.draw(report, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
