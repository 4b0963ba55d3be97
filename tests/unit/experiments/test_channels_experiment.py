"""The experiment with channels: sizes of its batches, a reader that reads, a report that compares what was measured."""

import multiprocessing
import os
import time

import pytest

from experiments.channels import case
from experiments.channels.batches import TASKS, make, nbytes, read
from experiments.channels.case import WAYS, throughput
from experiments.channels.run import report
from experiments.cores import process_cpu_s


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
    def rates_of(rate):
        return {task: {"mb_per_s": rate, "mb_per_cpu_s": rate / 2} for task in TASKS} | {"other_cores": 0.1}

    rates = {
        "memcpy": 1000.0,
        "channel-put": 600.0,
        "channel-in-place": 900.0,
        "torch-queue": 100.0,
        "ray": 50.0,
    }
    assert rates.keys() > WAYS.keys()
    text = report({way: [rates_of(rate), rates_of(2 * rate)] for way, rate in rates.items()})
    assert (
        "| memcpy | 1,500 (1,000 - 2,000) | 750 (500 - 1,000) | 0.60 (0.60 - 0.60) (0.5) | 0.90 (0.90 - 0.90) (0.5) |"
        in text
    )
    assert "| ray | 75 (50 - 100) |  | 12.00 (12.00 - 12.00) (10) | 18.00 (18.00 - 18.00) (10) |" in text


def test_the_time_of_a_child_counts_after_it_has_ended():
    context = multiprocessing.get_context("fork")
    before_s = case._cpu_s() - time.process_time()
    child = context.Process(target=use_a_core, args=(0.05,))
    child.start()
    child.join()
    assert case._cpu_s() - time.process_time() - before_s >= 0.04, "of 0.05 s, in ticks of 0.01 s"


def test_a_child_that_somebody_else_has_waited_for_is_left_out(monkeypatch):
    """As a child of a fork server is: listed as active until asked, and gone from /proc."""
    child = multiprocessing.get_context("fork").Process(target=use_a_core, args=(0.0,))
    child.start()
    os.waitpid(child.pid, 0)
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [child])
    assert process_cpu_s(child.pid) is None
    assert case._cpu_s() > 0.0


def use_a_core(seconds: float) -> None:
    """Compute until this process has used so many CPU seconds."""
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        pass
