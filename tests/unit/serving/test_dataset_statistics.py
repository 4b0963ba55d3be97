import numpy as np
import pytest
import torch

from rayagi.serving.column_layout import EndedEpisode
from rayagi.serving.latency import Latencies
from rayagi.serving.statistics import FileStatistics, merge_statistics


def ended(number, total, length):
    return EndedEpisode(number=number, total=total, length=length)


def test_rows_episodes_returns_and_observations_by_hand():
    first, second = FileStatistics(), FileStatistics()
    first.add(torch.tensor([[1.0, 10.0], [3.0, 10.0]]), [ended(0, 5.0, 2)], last_episode=4)
    second.add(torch.tensor([[5.0, 40.0]]), [ended(4, -1.0, 6), ended(2, 2.0, 1)], last_episode=7)
    whole = merge_statistics([first, second])
    # obs: mean (1 + 3 + 5) / 3 = 3, variance (4 + 0 + 4) / 3; mean (10 + 10 + 40) / 3 = 20, variance (100 + 100 + 400) / 3
    assert whole.summary() == {
        "rows": 3,
        "bytes": 0,
        "episodes": 3,
        "return_mean": 2.0,
        "return_min": -1.0,
        "return_max": 5.0,
        "length_mean": 3.0,
        "obs_mean": [3.0, 20.0],
        "obs_std": pytest.approx([(8 / 3) ** 0.5, 200**0.5]),
    }
    assert whole.last_episode == 7


def test_statistics_come_back_from_their_line_as_they_were():
    found = FileStatistics()
    found.add(
        torch.randn(50, 3, generator=torch.Generator().manual_seed(0)), [ended(1, 0.1, 3)], last_episode=3
    )
    back = FileStatistics.from_dict(found.to_dict())
    assert back.to_dict() == found.to_dict()
    assert back.summary() == found.summary()


def test_without_episodes_there_are_no_returns():
    found = FileStatistics()
    found.add(torch.zeros(1, 1), [], last_episode=0)
    assert FileStatistics.from_dict(found.to_dict()).summary()["return_mean"] is None
    assert merge_statistics([]).summary()["obs_mean"] is None


def test_percentiles_are_the_nearest_rank_to_one_per_cent():
    seconds = np.random.default_rng(0).lognormal(mean=-6.0, sigma=1.0, size=5000)
    latencies = Latencies()
    for value in seconds:
        latencies.add(float(value))
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        expected = np.percentile(seconds, 100 * share, method="inverted_cdf")
        assert latencies.percentile(share) == pytest.approx(expected, rel=0.0101)
    assert latencies.mean_s == pytest.approx(seconds.mean())


def test_latencies_of_parts_merge_to_those_of_the_whole():
    parts, whole = [Latencies(), Latencies()], Latencies()
    for number in range(1, 200):
        parts[number % 2].add(number * 1e-5)
        whole.add(number * 1e-5)
    parts[0].merge(parts[1])
    assert parts[0].counts == whole.counts
    assert parts[0].to_dict() == whole.to_dict()


def test_percentiles_of_the_shortest_durations_and_without_data():
    latencies = Latencies()
    assert latencies.percentile(0.5) is None
    assert latencies.to_dict()["p50_ms"] is None
    latencies.add(0.0)
    latencies.add(1e-9)
    assert latencies.percentile(0.99) == 1e-9
