"""Several nodes over one: ratios within a repeat, and the model, by hand."""

import pytest

from experiments.nodes.hosts import missing
from experiments.nodes.run import headline, modelled, ratios, table

TASK, LINK = "HalfCheetah-v5", 1000.0


def row(nodes, apart, repeat, rate, sync=0.0):
    return {
        "task": TASK,
        "megabits": LINK,
        "nodes": nodes,
        "apart": apart,
        "repeat": repeat,
        "steps_per_s": rate,
        "gradient_bytes": 1_000_000,
        "time_split": {"sync_s": sync},
    }


ROWS = [
    row(1, False, 0, 1024.0), row(1, True, 0, 1024.0), row(2, False, 0, 1536.0, 0.2), row(2, True, 0, 1920.0),
    row(1, False, 1, 1024.0), row(1, True, 1, 1024.0), row(2, False, 1, 1792.0, 0.1), row(2, True, 1, 1792.0),
    row(2, False, 2, 9999.0),  # of this repeat the others are missing
]  # fmt: skip


def test_the_model_by_hand():
    # A ring of 2 moves 1 MB over 125 MB/s in 8 ms, and two hops take 10 us each. 16 of them beside an iteration of 2 s.
    assert modelled(2, 2.0, 1_000_000, 1000.0) == pytest.approx(2 * 2.0 / (2.0 + 16 * 0.00802))
    assert modelled(1, 2.0, 1_000_000, 1000.0) == 1.0


def test_ratios_are_of_the_same_repeat():
    found = ratios(ROWS, TASK, LINK, 2)
    assert found.over_one == [1.5, 1.75]
    assert found.over_apart == [0.8, 1.0]
    assert found.sync == [0.2, 0.1]
    # 64 environments x 32 steps at 1024 steps/s: 2 s.
    assert found.modelled == pytest.approx(modelled(2, 2.0, 1_000_000, LINK))
    assert ratios(ROWS, TASK, LINK, 4) is None


def test_what_is_printed():
    last = table(ROWS).splitlines()[-1]
    assert last == f"| {TASK} | 1,000 Mbit/s | 2 | 1.62 (1.50 - 1.75) | 1.88 | 0.90 (0.80 - 1.00) | 15 % |"
    assert headline(ROWS).startswith(
        f"2 nodes over one: {TASK} over 1,000 Mbit/s 1.62 (by the model 1.88, over"
    )


def test_without_root_there_are_no_hosts(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    assert "need root" in missing()
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "no command ip" in missing()
