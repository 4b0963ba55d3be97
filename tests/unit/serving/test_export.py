"""Datasets for other tools: RLlib's rows with their next observations, and Minari's episodes."""

from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest
from test_dataset import DISCRETE, block, writer

from rayagi.cli import main
from rayagi.serving.dataset import open_dataset
from rayagi.serving.errors import ExportError
from rayagi.serving.rllib import offline_settings


@pytest.fixture(params=["continuous", "discrete"])
def dataset(request, tmp_path, monkeypatch):
    """Two environments, three blocks; episodes that terminate, that are truncated, and that the recording cuts."""
    monkeypatch.chdir(tmp_path)
    layout = {"layout": DISCRETE} if request.param == "discrete" else {}
    own = writer(tmp_path / "d", rows_per_file=5, **layout)
    generator = np.random.default_rng(0)
    for _ in range(3):
        obs = generator.standard_normal((2, 4, 2), dtype=np.float32)
        own.take(
            block([[0, 1, 0, 0], [0, 0, 0, 0]], truncated=[[0, 0, 0, 1], [0, 0, 1, 0]], obs=obs, **layout)
        )
    own.close()
    return open_dataset("d")


def test_rllib_has_the_next_observation_in_every_row(dataset):
    assert main(["export", "d", "--to", "rllib", "out"]) == 0
    table = pyarrow.dataset.dataset("out").to_table()
    assert table.num_rows == 24
    episodes = {each.number: each for each in dataset.episodes()}
    for row in table.to_pylist():
        episode, t = episodes[row["eps_id"]], row["t"]
        assert row["obs"] == episode.obs[t].tolist()
        assert row["new_obs"] == episode.obs[t + 1].tolist()
        assert row["actions"] == episode.actions[t].tolist()
        is_last = t == len(episode.rewards) - 1
        assert row["terminateds"] == (is_last and episode.terminated)
        assert row["truncateds"] == (is_last and not episode.terminated)
    assert main(["export", "d", "--to", "rllib", "out"]) == 2
    assert main(["export", "d", "--to", "rllib", "whole", "--whole"]) == 0
    # Environment 1 ends with a step that no flag closes, in an episode of its own.
    assert pyarrow.dataset.dataset("whole").count_rows() == 23


def test_rllib_reads_the_columns_of_a_dataset_in_place(dataset, tmp_path):
    settings = offline_settings("d")
    assert settings["input_"] == [str(file.path.absolute()) for file in dataset.files]
    assert settings["input_read_schema"]["eps_id"] == "episode"
    names = pyarrow.dataset.dataset("d/data").schema.names
    assert set(settings["input_read_method_kwargs"]["columns"]) <= set(names)
    own = writer(tmp_path / "arrow", file_format="arrow")
    own.take(block([[1], [1]]))
    own.close()
    with pytest.raises(ExportError, match="holds Arrow files, and Ray Data reads Parquet"):
        offline_settings("arrow")


def test_minari_or_how_to_get_it(dataset, capsys):
    code = main(["export", "d", "--to", "minari", "out"])
    try:
        import minari
    except ImportError:
        assert code == 2
        assert "pip install 'rayagi[minari]'" in capsys.readouterr().err
        assert not Path("out").exists()
        return
    assert code == 0
    found = list(minari.MinariDataset("out/data").iterate_episodes())
    expected = list(dataset.episodes())
    assert (
        len(found) == len(expected) == 10
    )  # 3 x 2 of environment 0, 4 of environment 1, the last of which is cut
    for own, other in zip(expected, found, strict=True):
        assert other.observations.tolist() == own.obs.tolist()
        assert other.actions.tolist() == own.actions.tolist()
        assert other.rewards.tolist() == own.rewards.tolist()
        assert other.terminations.tolist() == [False] * (len(own.rewards) - 1) + [own.terminated]
        assert other.truncations[-1] == (not own.terminated)
