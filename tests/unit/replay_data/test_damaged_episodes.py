"""Episodes of other lengths than their dataset says are an error: none is shortened or left out."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from minari_by_hand import episode, write_minari
from trajectories_by_hand import trajectories

from rayagi.replay import load, open_source
from rayagi.replay.trajectories import packed
from rayagi.serving.errors import DatasetError


def read_all(path):
    return list(open_source(path).read())


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    ("column", "change", "ours"),
    [
        ("observations", -1, "obs"),
        ("observations", 1, "obs"),
        ("actions", -1, "action"),
        ("actions", 2, "action"),
        ("terminations", -1, "terminated"),
        ("truncations", 2, "truncated"),
    ],
)
def test_a_column_of_minari_with_rows_too_few_or_too_many(tmp_path, number, column, change, ours):
    pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    episodes = [episode(3), episode(1), episode(5)]
    values = episodes[number][column]
    rows = len(values)
    episodes[number][column] = np.resize(values, (rows + change, *values.shape[1:]))
    path = write_minari(tmp_path / "d", episodes)
    message = f"is damaged: {ours} of episode_{number} has {rows + change} rows where {rows} are expected"
    with pytest.raises(DatasetError, match=re.escape(message)):
        read_all(path)


def test_an_episode_of_minari_with_another_length_than_its_metadata(tmp_path):
    path = write_minari(tmp_path / "d", [episode(3), episode(4)], "parquet", total_steps=8)
    assert json.loads((path / "data" / "1" / "metadata.json").read_text()) == {"total_steps": 4}
    (path / "data" / "1" / "metadata.json").write_text('{"total_steps": 5}')
    message = "is damaged: obs of episode 1 has 5 rows where 6 are expected"
    with pytest.raises(DatasetError, match=message):
        read_all(path)


def test_missing_episodes_of_minari(tmp_path):
    h5py = pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    path = write_minari(tmp_path / "d", [episode(3), episode(1), episode(5)])
    assert open_source(path).lengths.tolist() == [3, 1, 5]
    about = json.loads((path / "data" / "metadata.json").read_text())
    for changes, message in (
        ({"total_episodes": 4}, "it has 3 episodes where metadata.json says 4"),
        ({"total_steps": 8}, "it has 9 steps where metadata.json says 8"),
    ):
        (path / "data" / "metadata.json").write_text(json.dumps(about | changes))
        with pytest.raises(DatasetError, match=f"is damaged: {re.escape(message)}"):
            open_source(path)
    (path / "data" / "metadata.json").write_text(json.dumps(about))
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        del file["episode_1"]
    with pytest.raises(DatasetError, match=r"it has 2 episodes where metadata\.json says 3"):
        open_source(path)


def test_infos_of_other_lengths_matter_only_where_they_are_read(tmp_path):
    pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    path = write_minari(tmp_path / "d", [episode(3, x=np.zeros(4), y=np.zeros(2))])
    assert [column.name for column in open_source(path, columns=["x"]).schema.columns][-1] == "x"
    assert len(read_all(path)) == 1
    with pytest.raises(DatasetError, match=r"has y of float64\[2\] where float64\[3\] is expected"):
        load(path, columns=["y"])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((3, 2, 5), "is damaged: trajectory 1 has 1 step where its index says 2"),
        ((3, 1, 4), "is damaged: trajectory 2 has 5 steps where its index says 4"),
        ((3, 1), "is damaged: it has more trajectories than the 2 of its index"),
        ((3, 1, 5, 1), "is damaged: 3 of its 4 trajectories can be read"),
    ],
)
def test_a_pass_reads_the_trajectories_that_were_announced(tmp_path, lengths, message):
    rows = trajectories(lengths=(3, 1, 5))
    with load(torch_file(tmp_path, rows)) as store:
        assert len(store) == 3
    source = open_source(tmp_path / "a.pt")
    wrong = replace(source, lengths=np.array(lengths), begin=lambda: packed(rows))
    with pytest.raises(DatasetError, match=message):
        list(wrong.batches())


def torch_file(folder, rows):
    import torch

    found = {
        name: np.concatenate([each[name] for each in rows])
        for name in ("action", "reward", "terminated", "truncated")
    }
    found |= {
        "obs": np.concatenate([each["obs"][:-1] for each in rows]),
        "next_obs": np.concatenate([each["obs"][1:] for each in rows]),
        "trajectory_number": np.repeat(np.arange(len(rows)), [len(each["reward"]) for each in rows]),
    }
    torch.save({name: torch.from_numpy(values) for name, values in found.items()}, folder / "a.pt")
    return folder / "a.pt"
