"""What a process got of its cores, from one moment to another."""

from rayagi.profiler.core_times import CoreTimes, core_times


def test_a_thread_that_has_ended_takes_nothing_away_from_the_others():
    before = CoreTimes(wall_ns=100, cpu_ns=10, queue_ns={1: 1_000, 2: 5_000}, stolen_ns=7)
    # 2 has ended; 3 is new; 4 has the number of one that had waited longer.
    now = CoreTimes(wall_ns=400, cpu_ns=50, queue_ns={1: 1_250, 3: 30, 4: 5}, stolen_ns=9)
    assert now.since(before) == {"wall_ns": 300, "cpu_ns": 40, "queue_ns": 285, "stolen_ns": 2}
    reused = CoreTimes(wall_ns=400, cpu_ns=50, queue_ns={2: 5}, stolen_ns=9)
    assert reused.since(before)["queue_ns"] == 0


def test_readings_only_grow():
    before = core_times()
    sum(range(100_000))
    passed = core_times().since(before)
    assert passed["wall_ns"] > 0
    assert passed["cpu_ns"] > 0
    assert passed["queue_ns"] >= 0
