"""Files that are unusual but whole are read; those that say nothing clear are refused with a sentence that is true."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from minari_by_hand import episode, write_minari
from test_replay_from_others import lerobot, own_steps
from trajectories_by_hand import assert_equal, trajectories

from rayagi.replay import load, open_source
from rayagi.serving.errors import DatasetError

STEPS = {
    "observations": np.arange(8.0).reshape(4, 2),
    "actions": np.arange(4.0)[:, None],
    "rewards": np.arange(4.0),
    "terminals": np.array([0, 1, 0, 1]),
}
"""Two trajectories of two steps."""


def write_hdf5(path, columns):
    h5py = pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values
    return path


def swapped(columns):
    """The same numbers in the byte order that this machine does not have."""
    return {name: values.astype(values.dtype.newbyteorder()) for name, values in columns.items()}


@pytest.mark.parametrize("kind", ["d4rl", "robomimic", "minari"])
def test_numbers_of_the_other_byte_order(tmp_path, kind):
    columns, one = STEPS, episode(3)
    flat = {name: values for name, values in one.items() if name != "infos"}
    files = {}
    for name, change in (("native", dict), ("other", swapped)):
        path = tmp_path / name
        if kind == "d4rl":
            files[name] = write_hdf5(path.with_suffix(".hdf5"), change(columns))
        elif kind == "robomimic":
            demo = {
                "obs/x": flat["observations"][:-1],
                "next_obs/x": flat["observations"][1:],
                "dones": np.array([0, 0, 1]),
            }
            demo |= {"actions": flat["actions"], "rewards": flat["rewards"]}
            demo = {f"data/demo_0/{column}": values for column, values in change(demo).items()}
            files[name] = write_hdf5(path.with_suffix(".hdf5"), demo)
        else:
            pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
            files[name] = write_minari(path, [change(flat) | {"infos": {}}])
    assert_equal(list(open_source(files["other"]).read()), list(open_source(files["native"]).read()))
    load(files["other"]).close()


@pytest.mark.parametrize("is_external", [False, True])
def test_observations_behind_a_link(tmp_path, is_external):
    h5py = pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    write_hdf5(tmp_path / "other.hdf5", {"elsewhere/o": STEPS["observations"]})
    path = write_hdf5(tmp_path / "a.hdf5", STEPS | {"elsewhere/o": STEPS["observations"]})
    with h5py.File(path, "a") as file:
        del file["observations"]
        link = (
            h5py.ExternalLink("other.hdf5", "/elsewhere/o") if is_external else h5py.SoftLink("/elsewhere/o")
        )
        file["observations"] = link
    assert [each["obs"][:, 0].tolist() for each in open_source(path).read()] == [[0, 2, 2], [4, 6, 6]]


@pytest.mark.parametrize("name", ["seed", "infos/x"])
def test_an_array_of_other_rows_that_is_not_read(tmp_path, name):
    path = write_hdf5(tmp_path / "a.hdf5", STEPS | {name: np.ones(1)})
    source = open_source(path)
    assert source.lengths.tolist() == [2, 2]
    with pytest.raises(
        DatasetError, match=rf"is damaged: {source.left_out[0]} has 1 rows where action has 4"
    ):
        open_source(path, columns=source.left_out)


def test_a_trajectory_without_a_number(tmp_path):
    numbers = torch.tensor([0, 0, torch.nan, torch.nan])
    steps = {"obs": torch.zeros(4, 1), "action": torch.zeros(4, 1), "trajectory_number": numbers}
    torch.save(steps, tmp_path / "a.pt")
    with pytest.raises(DatasetError, match="trajectory_number has NaN, which is the number of no trajectory"):
        open_source(tmp_path / "a.pt")


@pytest.mark.parametrize("numbers", [[0, None, 1], [0.0, float("nan"), 1.0]])
def test_a_row_without_a_trajectory(tmp_path, numbers):
    path = own_steps(tmp_path / "own.parquet", eps_id=numbers)
    with pytest.raises(
        DatasetError, match="eps_id is null or NaN: it is the number of each row's trajectory"
    ):
        open_source(path)


@pytest.mark.parametrize(
    ("episodes", "frames", "message"),
    [
        ([0, 1, 0, 1], [0, 0, 1, 1], "row 2 is frame 1 of episode 0 where frame 0 is expected"),
        ([0, 0, 0, 1], [0, 2, 3, 0], "row 1 is frame 2 of episode 0 where frame 1 is expected"),
        ([0, 0, 1, 1], [0, 1, 1, 2], "row 2 is frame 1 of episode 1 where frame 0 is expected"),
    ],
)
def test_frames_that_do_not_follow_each_other(tmp_path, episodes, frames, message):
    path = lerobot(tmp_path / "d", trajectories(lengths=(4,), ends="t"))
    file = path / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(file).drop_columns(["episode_index", "frame_index"])
    table = table.append_column("episode_index", pa.array(episodes))
    pq.write_table(table.append_column("frame_index", pa.array(frames)), file)
    with pytest.raises(DatasetError, match=message):
        open_source(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.pt")
    with pytest.raises(DatasetError, match=r"a\.pt: is no file or folder"):
        open_source(tmp_path / "a.pt")


def test_nobody_is_advised_to_run_the_code_of_a_file(tmp_path):
    torch.save({"obs": Exception("code")}, tmp_path / "a.pt")
    with pytest.raises(
        DatasetError, match=r"it is no file of torch\.save, or has more than tensors"
    ) as caught:
        open_source(tmp_path / "a.pt")
    assert "weights_only" not in str(caught.value)
