"""What one event costs: each hook's loop records as many events as it says."""

import pytest

from experiments.profiler import record
from rayagi import profiler
from rayagi.profiler.layout import Category
from rayagi.profiler.trace import read_profile


@pytest.mark.parametrize(
    ("hook", "category"),
    [("operation", Category.OPERATION), ("activity", Category.WAIT), ("native call", Category.OTHER_NATIVE)],
)
def test_each_turn_of_a_loop_is_one_event(tmp_path, hook, category):
    with profiler.profile(tmp_path / "profile", natives=["zlib"]):
        record.HOOKS[hook](7)
    (process,) = read_profile(tmp_path / "profile").processes
    (thread,) = process.threads
    assert (thread.events["category"] == category).sum() == 7


def test_the_rest_is_what_recording_adds_without_the_clocks(monkeypatch):
    monkeypatch.setattr(record, "LOOPS", 2)
    monkeypatch.setattr(record, "EVENTS", 500)
    rows = record.measure()
    assert rows.keys() == {"operation", "activity", "native call"}
    for row in rows.values():
        assert row["rest_ns"] == row["recorded_ns"] - row["without_ns"] - row["clocks_ns"]
        assert min(row["recorded_ns"], row["without_ns"], row["clocks_ns"]) > 0
