"""Upper bounds of Algorithm 1 on cores: rows with fewer GMIs that cannot win are skipped."""

from __future__ import annotations

import pytest

from placement.search import (
    EarlyStopping,
    Trial,
    TrialFailure,
    TrialMeasurement,
    best_trial,
    core_counts,
    core_upper_bound,
    explore,
)

MIB = 2**20


def verdicts(trials):
    return [trial.verdict for trial in trials]


def sized(gmis, envs, steps_per_s, work_s, sync_s, verdict="plateau"):
    outcome = TrialMeasurement(
        steps_per_s=steps_per_s,
        memory_bytes=400 * MIB,
        phases_s={"simulate_s": work_s - 0.1, "update_s": 0.1, "sync_s": sync_s},
    )
    total = steps_per_s * gmis
    return Trial(
        gmis_per_gpu=gmis,
        num_envs=envs,
        verdict=verdict,
        outcome=outcome,
        system_steps_per_s=total,
        score=total,
    )


def test_cores_that_never_wait_are_the_ceiling():
    # Two GMIs of one core: 3000 steps/s, a tenth of the time waiting, so 3000 / 0.9 = 3333 for a core that never waits.
    # One GMI of both cores: 6667. Three cores of which one idles: 6667 too.
    trials = [sized(2, 64, 2500.0, 0.95, 0.05), sized(2, 128, 3000.0, 0.9, 0.1)]
    assert core_upper_bound(trials, 1, num_cores=2) == pytest.approx(20000 / 3)
    # Four GMIs on eight cores have two each: 3333 is a pair's, 1667 a core's; three GMIs use six cores, one uses eight.
    four = [sized(4, 128, 3000.0, 0.9, 0.1)]
    assert core_upper_bound(four, 3, num_cores=8) == pytest.approx(10000)
    assert core_upper_bound(four, 1, num_cores=8) == pytest.approx(40000 / 3)


def test_without_phases_there_is_no_ceiling():
    assert core_upper_bound([], 1, num_cores=2) == float("inf")
    outcome = TrialMeasurement(steps_per_s=1.0, memory_bytes=1)
    bare = Trial(gmis_per_gpu=2, num_envs=16, verdict="plateau", outcome=outcome)
    assert core_upper_bound([bare], 1, num_cores=2) == float("inf")


class Cores:
    """Two cores: a GMI's time for a step, and what it waits for the other; the wider one loses a tenth to its threads."""

    def __init__(self, sync_share, speed=1000.0):
        self.sync_share, self.speed, self.asked = sync_share, speed, []

    def __call__(self, gmis, envs):
        self.asked.append((gmis, envs))
        waiting = self.sync_share if gmis == 2 else 0.0
        speed = self.speed * (1 - waiting) if gmis == 2 else 1.8 * self.speed
        phases = {"simulate_s": 1 - waiting, "sync_s": waiting}
        return TrialMeasurement(steps_per_s=speed, memory_bytes=400 * MIB, phases_s=phases)


def searched(probe, **options):
    early_stopping = EarlyStopping(
        min_bound_gain=0.05, upper_bound=lambda trials, gmis: core_upper_bound(trials, gmis, num_cores=2)
    )
    return list(
        explore(
            probe,
            num_gpus=1,
            gpu_memory_bytes=options.pop("memory", 2**40),
            early_stopping=early_stopping,
            gmis_per_gpu=(2, 1),
            num_envs=(16, 32),
            **options,
        )
    )


def test_a_size_that_cannot_win_is_not_tried():
    # 2 % of waiting: two GMIs make 1960, and no more than 2000 are possible, 2 % more where 5 % are asked for
    probe = Cores(sync_share=0.02)
    trials = searched(probe)
    assert probe.asked == [(2, 16), (2, 32)]
    assert verdicts(trials) == ["first", "saturated", "cannot win"]
    assert trials[-1].reason == "at most 2,000 steps/s; the best so far has 1,960"
    assert best_trial(trials).system_steps_per_s == 1960


def test_a_size_that_may_win_is_tried():
    # 10 % of waiting: 1800 of 2000
    probe = Cores(sync_share=0.1)
    assert verdicts(searched(probe)) == ["first", "saturated"] * 2
    assert probe.asked == [(2, 16), (2, 32), (1, 16), (1, 32)]


def test_where_time_ended_a_size_the_ceiling_counts_too():
    probe = Cores(sync_share=0.0)
    outcomes = {
        (2, 32): TrialFailure(kind="too long", reason="an iteration would last 40 s; the limit is 25 s")
    }
    trials = searched(lambda gmis, envs: outcomes.get((gmis, envs)) or probe(gmis, envs))
    assert verdicts(trials) == ["first", "failed", "cannot win"]


def test_where_memory_ended_a_size_the_next_one_is_tried():
    probe = Cores(sync_share=0.0)
    trials = searched(probe, memory=700 * MIB)  # 350 for each of two, which hold 400
    assert probe.asked == [(2, 16), (1, 16), (1, 32)]
    assert verdicts(trials) == ["no memory", "first", "saturated"]


def test_a_ceiling_is_weighed_as_the_objective_weighs():
    # Per step, the batch of 1 x 16 learns as much as three halves of that of 2 x 16: at 2000 steps/s it may win.
    probe = Cores(sync_share=0.0)
    trials = searched(probe, score=lambda gmis, envs, speed: speed / (16 + gmis * envs))
    assert (1, 16) in probe.asked
    assert "cannot win" not in verdicts(trials)


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, (1,)), (2, (2, 1)), (8, (8, 4, 2, 1)), (16, (16, 8, 5, 4, 3, 2, 1))]
)
def test_core_counts(cores, counts):
    assert core_counts(cores) == counts
