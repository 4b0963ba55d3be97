"""Datasets of `rayagi serve` in replay stores: the episodes that the dataset's own reader finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dataset import CONTINUOUS, DISCRETE, block, writer

from actors.replay import Subscription, Uniform, gather, select
from rayagi.replay import load, open_source
from rayagi.serving.dataset import open_dataset
from rayagi.serving.errors import DatasetError


@pytest.mark.parametrize("layout", [CONTINUOUS, DISCRETE])
@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_each_episode_is_a_row(tmp_path, layout, file_format):
    own = writer(tmp_path / "d", layout=layout, file_format=file_format, rows_per_file=5)
    for version in range(3):
        own.take(
            block(
                [[0, 1, 0, 0], [0, 0, 0, 0]],
                truncated=[[0, 0, 0, 1], [0, 0, 1, 0]],
                layout=layout,
                version=version,
            )
        )
    own.close()
    expected = list(open_dataset(tmp_path / "d").episodes())
    with load(tmp_path / "d") as store:
        rows = np.arange(len(expected))
        assert store.status()["length"].tolist() == [len(episode.rewards) for episode in expected]
        chosen = select(store, Uniform(), 64, seed=0, draw=0)
        assert set(chosen.keys.indices.tolist()) == set(rows.tolist())
        names = [column.name for column in store.schema.columns]
        windows = [Subscription(column=name, length=9) for name in names]
        batch = gather(store, chosen, windows)
        for place, index in enumerate(chosen.keys.indices.tolist()):
            episode = expected[index]
            steps = len(episode.rewards)
            assert batch.values["obs"][place, : steps + 1].tolist() == episode.obs.tolist()
            assert batch.values["action"][place, :steps].tolist() == episode.actions.tolist()
            assert batch.values["log_prob"][place, :steps].tolist() == episode.log_probs.tolist()
            assert batch.values["policy_version"][place, :steps].tolist() == episode.policy_versions.tolist()
            assert batch.values["terminated"][place].any() == episode.terminated
            assert batch.values["truncated"][place].any() == episode.truncated


@settings(max_examples=10, deadline=None)
@given(
    flags=st.lists(st.lists(st.sampled_from("ntu"), min_size=4, max_size=4), min_size=2, max_size=6),
    rows_per_file=st.integers(1, 9),
    lose=st.booleans(),
)
def test_lengths_are_those_of_the_episodes(tmp_path_factory, flags, rows_per_file, lose):
    """Also if the last file is lost, so that episodes end without an observation after their last row."""
    path = tmp_path_factory.mktemp("d") / "d"
    own = writer(path, rows_per_file=rows_per_file)
    for first, second in zip(flags[::2], flags[1::2], strict=False):
        pair = np.array([first, second])
        own.take(block((pair == "t").tolist(), truncated=(pair == "u").tolist()))
    own.close()
    if lose:
        open_dataset(path).files[-1].path.unlink()
    expected = [len(episode.rewards) for episode in open_dataset(path).episodes()]
    if not expected:
        with pytest.raises(DatasetError, match="has no trajectory"):
            open_source(path)
        return
    source = open_source(path)
    assert source.lengths.tolist() == expected
    assert [len(each["reward"]) for each in source.read()] == expected
