"""Datasets for other tools: episodes of RLlib and of Minari."""

import os
import socket
import subprocess
from pathlib import Path

import gymnasium
import msgpack
import msgpack_numpy
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from test_dataset import DISCRETE, block, writer

from rayagi.cli import main
from rayagi.envs import env_info
from rayagi.serving.column_layout import ColumnBlock, ColumnLayout
from rayagi.serving.dataset import open_dataset
from rayagi.serving.errors import ExportError
from rayagi.serving.files import finished_file, finished_folder
from rayagi.serving.manifest import DatasetFolder, Description
from rayagi.serving.minari import _cast
from rayagi.serving.rllib import episode_settings, offline_settings


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


def test_rllib_reads_whole_episodes(dataset, capsys):
    """As RLlib's OfflinePreLearner reads them with input_read_episodes."""
    assert main(["export", "d", "--to", "rllib", "out"]) == 0
    assert "BCConfig().offline_data(" in capsys.readouterr().out  # CQL knows no choices of actions
    settings = episode_settings("out")
    assert settings["input_read_episodes"]
    assert settings["input_read_batch_size"] == 106  # of 24 steps in 10 episodes: 256 / 2.4
    items = pyarrow.dataset.dataset(settings["input_"]).to_table()["item"].to_pylist()
    expected = {str(each.number): each for each in dataset.episodes()}
    read = [
        SingleAgentEpisode.from_state(msgpack.unpackb(item, object_hook=msgpack_numpy.decode))
        for item in items
    ]
    assert len(read) == len(expected) == 10
    for episode in read:
        own = expected.pop(episode.id_)
        assert episode.is_done
        assert (episode.is_terminated, episode.is_truncated) == (own.terminated, not own.terminated)
        assert len(episode) == len(own.rewards)
        assert np.array(episode.get_observations()).tolist() == own.obs.tolist()
        assert np.array(episode.get_actions()).tolist() == own.actions.tolist()
        assert episode.get_rewards() == own.rewards.tolist()
        assert episode.get_extra_model_outputs("action_logp") == own.log_probs.tolist()
        assert episode.get_extra_model_outputs("policy_version") == own.policy_versions.tolist()
        assert episode.observation_space.contains(episode.get_observations(0))
        assert episode.to_numpy().get_observations().dtype == np.float32
    assert main(["export", "d", "--to", "rllib", "out"]) == 2
    assert main(["export", "d", "--to", "rllib", "whole", "--whole"]) == 0
    # Environment 1 ends with a step that no flag closes, in an episode of its own.
    assert pyarrow.dataset.dataset("whole").count_rows() == 9
    with pytest.raises(ExportError, match="rayagi export DATASET --to rllib writes one"):
        episode_settings("d")


@pytest.mark.parametrize("kind", ["rllib", "minari"])
def test_an_export_without_whole_episodes_writes_nothing(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    if kind == "minari":
        pytest.importorskip("minari")
        monkeypatch.setattr("rayagi.serving.minari.minari_name", lambda out: "out-v0")
        monkeypatch.setattr("rayagi.serving.minari._env_spec", lambda dataset: None)
        box = gymnasium.spaces.Box(-1, 1, (2,))
        monkeypatch.setattr("rayagi.serving.minari._spaces", lambda dataset, env_spec: (box, box))
    own = writer(tmp_path / "d", rows_per_file=5)
    own.take(block([[0] * 4, [0] * 4]))
    own.close()
    assert main(["export", "d", "--to", kind, "out", "--whole"]) == 2
    assert "out: nothing was written: the dataset has no episodes to export" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


def test_an_export_without_episodes_is_said_to_have_none(tmp_path):
    table = pa.table({"item": pa.array([], pa.binary()), "steps": pa.array([], pa.int32())})
    pyarrow.parquet.write_table(table, tmp_path / "part-0.parquet")
    with pytest.raises(ExportError, match="has no episodes"):
        episode_settings(tmp_path)


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
        assert other.infos["log_prob"][:-1, 0].tolist() == own.log_probs.tolist()
        assert other.infos["policy_version"][:, 0].tolist() == [7] * (len(own.rewards) + 1)


@pytest.mark.parametrize(
    ("task", "kinds"),
    [("Ant-v5", (np.float64, np.float32)), ("Pendulum-v1", (np.float32, np.float32))],
)
def test_minari_has_the_types_and_bounds_of_the_environment_s_spaces(tmp_path, monkeypatch, task, kinds):
    minari = pytest.importorskip("minari")
    monkeypatch.chdir(tmp_path)
    info = env_info(task)
    layout = ColumnLayout.for_env(info)
    folder = DatasetFolder.create(tmp_path / "d", Description(task=task, format="parquet", layout=layout))
    own = writer(tmp_path / "d", layout=layout, num_envs=1)
    generator = np.random.default_rng(0)
    shape = (1, 4)
    obs = generator.standard_normal((*shape, info.obs_dim), dtype=np.float32)
    last = np.zeros((1, info.obs_dim), np.float32)
    zeros, flags = np.zeros(shape, np.float32), np.zeros(shape, bool)
    action = generator.uniform(-1, 1, (*shape, info.action.dim)).astype(np.float32)
    own.take(
        ColumnBlock(
            obs=obs, action=action, log_prob=zeros, reward=zeros, terminated=flags, truncated=flags,
            final_obs=obs, last_obs=last, version=7,
        )
    )  # fmt: skip
    own.close()
    assert folder.files()
    assert main(["export", "d", "--to", "minari", "out"]) == 0
    found = minari.MinariDataset("out/data")
    env = gymnasium.make(task)
    assert (found.observation_space, found.action_space) == (env.observation_space, env.action_space)
    env.close()
    (episode,) = found.iterate_episodes()
    assert (episode.observations.dtype, episode.actions.dtype) == kinds
    assert episode.observations[:-1].astype(np.float32).tolist() == obs[0].tolist()


def test_minari_s_values_are_those_observed_but_for_the_rounding_of_a_bound():
    """float32(0.1) is above 0.1, float32(2**31 - 1) is 2**31: both are the bound; what is beyond a bound was observed."""
    reals = gymnasium.spaces.Box(-0.1, 0.1, (4,), np.float64)
    found = _cast(np.array([[0.1, -0.1, 0.7, -0.05]], np.float32), reals)
    assert found.dtype == np.float64
    assert found.tolist() == [[0.1, -0.1, float(np.float32(0.7)), float(np.float32(-0.05))]]
    counts = gymnasium.spaces.Box(0, 2**31 - 1, (2,), np.int32)
    assert _cast(np.array([[2**31, 5]], np.float32), counts).tolist() == [[2**31 - 1, 5]]


def test_a_damaged_dataset_is_not_exported(dataset, capsys):
    file = dataset.files[0].path
    file.write_bytes(file.read_bytes()[:-20])
    assert main(["export", "d", "--to", "rllib", "out"]) == 2
    error = capsys.readouterr().err
    assert f"d: data/{file.name} cannot be read" in error
    assert "Traceback" not in error
    assert not Path("out").exists()


def test_a_dataset_without_a_complete_file_is_not_exported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    DatasetFolder.create(tmp_path / "d", Description(task="a", format="parquet", layout=DISCRETE))
    assert main(["export", "d", "--to", "rllib", "out"]) == 2
    assert "d: has no complete file to export; add to it with" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_killed_exports_left_is_removed_by_the_next(tmp_path):
    """Not what belongs to a living process, to another host, or to another place."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    here, living = socket.gethostname(), os.getppid()
    removed = [tmp_path / f".out[1].{here}.{pid}.unfinished" for pid in (ended.pid, os.getpid())]
    kept = [
        tmp_path / f".out[1].{here}.{living}.unfinished",
        tmp_path / f".out[1].elsewhere.{ended.pid}.unfinished",
        tmp_path / f".other.{here}.{ended.pid}.unfinished",
    ]
    for left in (*removed, *kept):
        left.mkdir()
        (left / "old").touch()
    with finished_folder(tmp_path / "out[1]") as folder:
        (folder / "new").touch()
    assert [path.name for path in (tmp_path / "out[1]").iterdir()] == ["new"]
    assert {*tmp_path.iterdir()} == {tmp_path / "out[1]", *kept}
    left_file = tmp_path / f".out.pt.{here}.{ended.pid}.unfinished"
    left_file.touch()
    with finished_file(tmp_path / "out.pt") as file:
        file.touch()
    assert (tmp_path / "out.pt").exists()
    assert not left_file.exists()


def test_of_two_exports_to_a_place_the_first_stays(tmp_path):
    def export_folder():
        with finished_folder(tmp_path / "out"):
            (tmp_path / "out").mkdir()
            (tmp_path / "out/theirs").touch()

    def export_file():
        with finished_file(tmp_path / "out.pt") as file:
            file.write_text("ours")
            (tmp_path / "out.pt").write_text("theirs")

    for export in (export_folder, export_file):
        with pytest.raises(ExportError, match="exists already"):
            export()
    assert (tmp_path / "out.pt").read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["out", "out.pt", "theirs"]
