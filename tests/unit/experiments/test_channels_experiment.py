"""The experiment with channels: sizes of its batches, a reader that reads, a report that compares what was measured."""

import pytest

from experiments.channels.batches import TASKS, make, nbytes, read
from experiments.channels.case import WAYS, throughput
from experiments.channels.run import report


def test_batches_have_the_sizes_of_the_two_tasks():
    assert {name: round(nbytes(make(task)) / 1e6, 2) for name, task in TASKS.items()} == {
        "Ant": 0.95,
        "ShadowHand": 7.68,
    }


def test_a_reader_that_gets_something_else_fails():
    rows = make(TASKS["Ant"])
    expected = float(rows["obs"].sum())
    read(rows, expected)
    rows["obs"][3, 2, 1] += 1
    with pytest.raises(RuntimeError, match="the observations sum to"):
        read(rows, expected)


def test_a_channel_is_measured_and_read():
    found = throughput("channel-put", "Ant", seconds=0.05)
    assert found["batches_per_s"] * nbytes(make(TASKS["Ant"])) == pytest.approx(1e6 * found["mb_per_s"])


def test_the_report_divides_repeat_by_repeat():
    def case(rate):
        return {task: {"mb_per_s": rate, "mb_per_cpu_s": rate / 2} for task in TASKS} | {"other_cores": 0.1}

    rates = {
        "memcpy": 1000.0,
        "channel-put": 600.0,
        "channel-in-place": 900.0,
        "torch-queue": 100.0,
        "ray": 50.0,
    }
    assert rates.keys() > WAYS.keys()
    text = report({way: [case(rate), case(2 * rate)] for way, rate in rates.items()})
    assert (
        "| memcpy | 1,500 (1,000 - 2,000) | 750 (500 - 1,000) | 0.60 (0.60 - 0.60) (0.5) | 0.90 (0.90 - 0.90) (0.5) |"
        in text
    )
    assert "| ray | 75 (50 - 100) |  | 12.00 (12.00 - 12.00) (10) | 18.00 (18.00 - 18.00) (10) |" in text
