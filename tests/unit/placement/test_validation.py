"""Validation of a search: which finalists are remeasured, in which order, and which wins; computed by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from placement.search import EarlyStopping, Trial, TrialFailure, TrialMeasurement, best_trial, explore
from placement.validation import (
    finalists,
    half_width,
    pool_measurements,
    select_best,
    undecided,
    validate_finalists,
)

MIB = 2**20


def measured(steps_per_s, error=0.02, memory=100, **phases):
    return TrialMeasurement(
        steps_per_s=steps_per_s, memory_bytes=memory * MIB, relative_error=error, phases_s=phases
    )


def trial(gmis, envs, total, error=0.02, verdict="going on"):
    return Trial(
        gmis_per_gpu=gmis,
        num_envs=envs,
        verdict=verdict,
        outcome=measured(total / gmis, error),
        system_steps_per_s=total,
        score=total,
    )


class Scripted:
    """Answers from a table by candidate and round, two of which last long enough; remembers what it was asked."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def __call__(self, gmis, envs, round_):
        self.asked.append((gmis, envs, round_))
        answer = self.answers[gmis, envs][round_ - 1]
        return (
            answer if isinstance(answer, TrialFailure) else replace(measured(answer / gmis), duration_s=10.0)
        )


def places(trials):
    return [(each.gmis_per_gpu, each.num_envs) for each in trials]


def test_contenders_reach_the_best_within_both_errors():
    # best 1000 +- 5 %: at least 950. 920 * 1.04 = 956.8 reaches it; 900 * 1.05 = 945 does not.
    trials = [trial(2, 64, 900, 0.05), trial(2, 128, 920, 0.04), trial(2, 256, 1000, 0.05)]
    assert places(finalists(trials)) == [(2, 256), (2, 128)]


def test_an_error_counts_up_to_a_tenth():
    # 1000 +- 60 % counts as +- 10 %: at least 900. 800 * 1.1 = 880 does not reach it, 830 * 1.1 = 913 does.
    trials = [trial(2, 64, 1000, 0.6), trial(2, 128, 800, 0.6), trial(2, 256, 830, 0.6)]
    assert places(finalists(trials)) == [(2, 64), (2, 256)]


def test_no_more_than_three_are_measured_again():
    trials = [trial(2, 16 * 2**power, 1000 - power) for power in range(6)]
    assert places(finalists(trials)) == [(2, 16), (2, 32), (2, 64)]
    assert finalists([]) == ()


def test_what_was_compared_contends_with_the_mean_of_all():
    # 2 x 16: 5000, later 3000 and 3100, on average 3700. 2 x 32 was beside the 3000: 4300 * 3700 / 3000 = 5303, and 2 x 64
    # beside the 3100: 4350 * 3700 / 3100 = 5192. 5303 * 0.98 = 5197 is less than 5192 * 1.02 and more than 3700 * 1.02.
    trials = [
        trial(2, 16, 5000), trial(2, 16, 3000, verdict="compared"), trial(2, 32, 4300),
        trial(2, 16, 3100, verdict="compared"), trial(2, 64, 4350),
    ]  # fmt: skip
    again = Scripted({(2, 32): (4300, 4300), (2, 64): (4500, 4500)})
    assert places(validate_finalists(again, trials, num_gpus=1)) == [(2, 64), (2, 32)]


def test_a_candidate_from_a_slow_minute_is_ranked_by_its_ratio_to_the_compared_rival():
    # Measured with Humanoid-v5: 2 x 1024 has 3240 when 2 x 128 has 3111, whose mean is 3690.
    # So 2 x 1024 counts as 3240 * 3690 / 3111 = 3843.
    # 4196 * 0.95 = 3986 is less than 3843 * 1.05 = 4035, more than 3690 * 1.05 = 3874.
    trials = [
        trial(2, 128, 4268, 0.05), trial(2, 256, 4196, 0.05), trial(2, 512, 3214, 0.05),
        trial(2, 128, 3111, 0.05, verdict="compared"), trial(2, 1024, 3240, 0.05),
    ]  # fmt: skip
    again = Scripted({(2, 256): (3200, 3200), (2, 1024): (3300, 3300)})
    assert places(validate_finalists(again, trials, num_gpus=1)) == [(2, 1024), (2, 256)]


def test_a_candidate_that_crashed_before_it_was_measured_contends_with_its_measurement():
    crashed = Trial(
        gmis_per_gpu=2,
        num_envs=32,
        verdict="coarse",
        outcome=TrialFailure(kind="crashed", reason="signal 11"),
    )
    trials = [crashed, trial(2, 16, 900), trial(2, 32, 1000)]
    asked = []

    def again(gmis, envs, round_):
        asked.append((gmis, envs))
        return measured(500.0)

    list(validate_finalists(again, trials, num_gpus=1))
    assert (2, 32) in asked


def test_a_lucky_trial_does_not_win():
    # One trial of 1 x 1024 said 7651; measured again it makes 5100 and 5000, and 2 x 256 makes 7300.
    trials = [trial(2, 256, 7200, 0.05), trial(1, 512, 6500, 0.05), trial(1, 1024, 7651, 0.1)]
    again = Scripted({(2, 256): (7300, 7260), (1, 1024): (5100, 5000)})
    found = list(validate_finalists(again, trials, num_gpus=1))
    # backwards, then forwards: the processes of the one GMI are there already
    assert again.asked == [(1, 1024, 1), (2, 256, 1), (2, 256, 2), (1, 1024, 2)]
    assert [each.verdict for each in found] == ["again", "again"]
    best = best_trial([*trials, *found])
    assert (best.gmis_per_gpu, best.num_envs, best.system_steps_per_s) == (2, 256, 7280.0)


def test_rounds_go_back_and_forth_until_there_were_four_or_they_lasted_20_s():
    asked = []

    def again(gmis, envs, round_):
        asked.append((envs, round_))
        return replace(measured(500 + 10 * round_), duration_s=envs / 100)

    trials = [trial(2, 100, 1000), trial(2, 900, 1000), trial(2, 2000, 1000)]
    found = list(validate_finalists(again, trials, num_gpus=1))
    # Rounds of 20, of 9 and of 1 s: one, three and four of them.
    first, second, third = [(2000, 1), (900, 1), (100, 1)], [(100, 2), (900, 2)], [(900, 3), (100, 3)]
    assert asked == [*first, *second, *third, (100, 4)]
    assert [each.outcome.duration_s for each in found] == pytest.approx([20.0, 27.0, 4.0])
    assert [each.system_steps_per_s for each in found] == pytest.approx([1020.0, 1040.0, 1050.0])


def test_rounds_are_their_mean_with_what_they_differ_by():
    # 1100 and 900: mean 1000, half their difference 100, so 10 %; each by itself said 2 %.
    both = pool_measurements([measured(1100, 0.02, 100, sync_s=0.2), measured(900, 0.02, 120, sync_s=0.4)])
    assert (both.steps_per_s, both.memory_bytes) == (1000.0, 120 * MIB)
    assert both.relative_error == pytest.approx(0.1)
    assert both.phases_s == {"sync_s": pytest.approx(0.3)}
    # 1000 and 1000, 6 % and 8 %: sqrt(0.06^2 + 0.08^2) / 2 = 5 %
    assert pool_measurements([measured(1000, 0.06), measured(1000, 0.08)]).relative_error == pytest.approx(
        0.05
    )
    # 900, 1000, 1100: deviation 100, of their mean 100 / sqrt(3) = 57.7
    assert pool_measurements(
        [measured(speed) for speed in (900, 1000, 1100)]
    ).relative_error == pytest.approx(0.0577, abs=1e-4)
    assert pool_measurements([measured(900, 0.03)]) == measured(900, 0.03)


def test_a_tie_goes_to_the_smaller_batch_and_says_so():
    # 1 % apart and each +- 2 %: sqrt(2) * 2 % = 2.8 % of noise
    best = select_best([trial(2, 128, 990), trial(2, 256, 1000)])
    assert (best.num_envs, best.best) == (128, True)
    assert best.reason == "1.0 % behind 2 x 256, within noise, with a smaller batch"


def test_what_is_further_apart_than_its_error_is_no_tie():
    assert select_best([trial(2, 128, 990, 0.001), trial(2, 256, 1000, 0.001)]).num_envs == 256


def test_noise_makes_no_tie_beyond_one_percent():
    assert select_best([trial(2, 128, 985, 0.2), trial(2, 256, 1000, 0.2)]).num_envs == 256


def test_of_equal_batches_the_faster_wins():
    best = select_best([trial(1, 256, 990), trial(2, 128, 1000)])
    assert (best.gmis_per_gpu, best.reason) == (2, "")


def test_one_that_fails_the_second_time_is_out():
    trials = [trial(2, 128, 950, 0.05), trial(2, 256, 1000, 0.05)]
    crash = TrialFailure(kind="crashed", reason="signal 11")
    again = Scripted({(2, 256): (crash, 0), (2, 128): (940, 940)})
    found = list(validate_finalists(again, trials, num_gpus=1))
    assert again.asked == [(2, 256, 1), (2, 128, 1), (2, 128, 2)]
    assert [each.outcome is crash for each in found] == [True, False]
    assert [each.best for each in found] == [False, True]


def test_where_all_contenders_fail_the_next_best_are_measured():
    trials = [trial(2, 64, 500, 0.01), trial(2, 256, 1000, 0.01)]
    crash = TrialFailure(kind="crashed", reason="signal 11")
    again = Scripted({(2, 256): (crash, 0), (2, 64): (500, 500)})
    found = list(validate_finalists(again, trials, num_gpus=1))
    assert again.asked == [(2, 256, 1), (2, 64, 1), (2, 64, 2)]
    assert best_trial(found).num_envs == 64


def test_where_everything_fails_nothing_is_best():
    crash = TrialFailure(kind="crashed", reason="signal 11")
    found = list(validate_finalists(Scripted({(2, 64): (crash, 0)}), [trial(2, 64, 500)], num_gpus=1))
    assert [each.outcome for each in found] == [crash]
    assert best_trial(found) is None


@pytest.mark.parametrize("seed", range(20))
def test_with_noise_search_and_confirmation_come_within_a_twentieth(seed):
    """A GMI's iteration takes 0.1 s and 1 / 5000 s for each environment; trials are off by up to a tenth, rounds by 2 %."""
    noise = random.Random(seed)

    def truth(gmis, envs):
        # two GMIs work side by side; the cores of one are used by 90 %
        return envs / (0.1 + envs / 5000) * (1.0 if gmis == 2 else 1.8)

    def probe(gmis, envs):
        return measured(truth(gmis, envs) * noise.uniform(0.9, 1.0), 0.05, 400 + envs // 16)

    def again(gmis, envs, round_):
        return measured(truth(gmis, envs) * noise.uniform(0.98, 1.0), 0.02)

    sizes = [16 * 2**power for power in range(9)]
    trials = list(
        explore(
            probe,
            num_gpus=1,
            gpu_memory_bytes=2**40,
            early_stopping=EarlyStopping(min_gain=0.05, patience=2),
            gmis_per_gpu=(2, 1),
            num_envs=sizes,
        )
    )
    best = best_trial(list(validate_finalists(again, trials, num_gpus=1)))
    highest = max(gmis * truth(gmis, envs) for gmis in (2, 1) for envs in sizes)
    reached = best.gmis_per_gpu * truth(best.gmis_per_gpu, best.num_envs)
    assert reached >= 0.9 * highest


def test_four_fifths_of_later_means_lie_in_the_interval():
    draws = np.random.default_rng(0).normal(1000.0, 150.0, (4000, 2, 5))
    inside = [
        abs(later.mean() - first.mean()) <= half_width(list(first)) * first.mean() for first, later in draws
    ]
    assert np.mean(inside) == pytest.approx(0.8, abs=0.02)


def test_a_single_round_does_not_tell_how_much_rounds_differ():
    assert half_width([1000.0]) is None
    assert half_width([1000.0, 1000.0]) == 0.0


@pytest.mark.parametrize(
    ("second", "error", "alike"),
    [
        (1844.0, 0.83, True),  # 1844 (1 + 0.83) >= 1919 (1 - 0.52)
        (500.0, 0.83, False),  # 500 (1 + 0.83) = 915 < 1919 (1 - 0.52) = 921
    ],
)
def test_who_may_be_as_fast_as_the_best_if_errors_are_large(second, error, alike):
    best, other = trial(2, 256, 1919.0, 0.52, "again"), trial(2, 512, second, error, "again")
    single = trial(2, 1024, 5000.0, 0.5)  # not comparable: it was not validated
    assert undecided(best, [single, other, best]) == ([best, other] if alike else [])


def test_large_means_more_than_a_tenth_of_one_of_them():
    best, other = trial(2, 256, 1000.0, 0.01, "again"), trial(2, 512, 990.0, 0.1, "again")
    assert undecided(best, [best, other]) == []
    vague = trial(2, 512, 990.0, 0.11, "again")
    assert undecided(best, [best, vague]) == [best, vague]
    assert undecided(vague, [vague]) == []  # alone
