"""HDF5 in robomimic's layout, written by hand with h5py."""

import numpy as np
import pytest
from trajectories_by_hand import content

from rayagi.replay import load, open_source
from rayagi.serving.errors import DatasetError

h5py = pytest.importorskip(
    "h5py", reason="the extra 'hdf5' is not installed: nothing of robomimic was tested"
)


def write(path, *dones, next_obs=True, without=(), **others):
    """A demonstration for each list of dones, in which row i of all demonstrations has i everywhere."""
    begin = 0
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(map(len, dones))
        # HDF5 lists names as texts: demo_10 before demo_2.
        for number, done in enumerate(dones):
            rows = np.arange(begin, begin + len(done), dtype=np.float64)
            begin += len(done)
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = len(done)
            columns = {
                "obs/robot": np.stack([rows, -rows], 1),
                "obs/object": rows[:, None].astype(np.float32),
                "actions": rows[:, None],
                "rewards": rows,
                "dones": np.array(done),
                "states": rows[:, None],
                **others,
            }
            if next_obs:
                columns |= {f"next_{name}": columns[name] + 1 for name in ("obs/robot", "obs/object")}
            for name, values in columns.items():
                if name not in without:
                    demo[name] = values
        file["mask/train"] = np.array([b"demo_0"])
        file["mask/valid"] = [f"demo_{number}" for number in reversed(range(1, len(dones)))]
    return path


def test_each_demonstration_is_a_trajectory(tmp_path):
    path = write(tmp_path / "a.hdf5", [0, 0, 1], [0, 0])
    source = open_source(path)
    assert (source.kind, source.lengths.tolist(), source.left_out) == ("robomimic", [3, 2], ("states",))
    with load(path) as store:
        first, second = content(store)
    assert first["obs.robot"].tolist() == [[0, 0], [1, -1], [2, -2], [3, -1]]
    assert first["obs.object"].tolist() == [[0], [1], [2], [3]]
    assert first["obs.object"].dtype == np.float32
    assert (first["action"].tolist(), first["reward"].tolist()) == ([[0], [1], [2]], [0, 1, 2])
    assert first["terminated"].tolist() == [False, False, True]
    assert second["obs.object"].tolist() == [[3], [4], [5]]
    # It ends with the recording.
    assert not second["terminated"].any()
    assert not second["truncated"].any()


def test_without_next_observations_a_step_is_left_out_unless_it_is_done(tmp_path):
    path = write(tmp_path / "a.h5", [0, 0, 1], [0, 0], [0], next_obs=False)
    with load(path) as store:
        first, second = content(store)
    assert first["obs.object"][:, 0].tolist() == [0, 1, 2, 2]  # nothing bootstraps from the last
    assert second["obs.object"][:, 0].tolist() == [3, 4]
    assert second["reward"].tolist() == [3]


def test_demonstrations_come_in_the_order_of_their_numbers(tmp_path):
    path = write(tmp_path / "a.hdf5", *[[1]] * 12)
    with load(path) as store:
        assert [each["reward"].tolist() for each in content(store)] == [[number] for number in range(12)]


def test_a_mask_chooses_demonstrations(tmp_path):
    path = write(tmp_path / "a.hdf5", *[[1]] * 12)

    def rewards(mask):
        with load(path, mask=mask) as store:
            return [each["reward"].tolist() for each in content(store)]

    assert rewards("train") == [[0]]
    assert rewards("valid") == [[number] for number in range(1, 12)]
    assert len(rewards(None)) == 12


def test_a_mask_that_is_not_there_or_fits_nothing_is_said(tmp_path):
    path = write(tmp_path / "a.hdf5", [0, 1])
    with h5py.File(path, "r+") as file:
        file["mask/other"] = np.array([b"demo_0", b"demo_7"])
    with pytest.raises(DatasetError, match=r"has no mask 'test': its masks are other, train, valid"):
        load(path, mask="test")
    with pytest.raises(DatasetError, match="has no demonstration in mask/valid"):
        load(path, mask="valid")
    with pytest.raises(DatasetError, match="has no demonstrations demo_7, which mask/other lists"):
        load(path, mask="other")
    with h5py.File(path, "r+") as file:
        del file["mask"]
    with pytest.raises(DatasetError, match="has no mask 'train': its masks are none"):
        load(path, mask="train")
    flat = tmp_path / "flat.hdf5"
    with h5py.File(flat, "w") as file:
        file["actions"] = np.zeros((1, 1))
    with pytest.raises(DatasetError, match="has no mask 'train': only files of robomimic have masks"):
        load(flat, mask="train")


def test_named_parts_are_read_alone_and_other_arrays_if_they_are_named(tmp_path):
    path = write(tmp_path / "a.hdf5", [0, 1])
    with load(path, columns=["obs.object", "states"]) as store:
        (only,) = content(store)
    assert "obs.robot" not in only
    assert only["states"].tolist() == [[0], [1]]
    with pytest.raises(DatasetError, match=r"has no column 'obs\.camera': its columns are .*obs\.robot"):
        open_source(path, columns=["obs.camera"])


def test_recordings_of_an_operator_may_have_no_rewards_and_no_ends(tmp_path):
    path = write(tmp_path / "a.hdf5", [0, 0, 0], without=("rewards", "dones"))
    with load(path) as store:
        (only,) = content(store)
    assert "reward" not in only
    assert not only["terminated"].any()
    assert len(only["action"]) == 3


def test_what_is_wrong_in_a_demonstration_is_said(tmp_path):
    twice = write(tmp_path / "a.hdf5", [0, 2])
    with pytest.raises(DatasetError, match="/data/demo_0/dones has values other than 0 and 1"):
        load(twice)
    short = write(tmp_path / "b.hdf5", [0, 1], rewards=np.zeros(1))
    with pytest.raises(
        DatasetError, match=r"trajectory 0 has reward of float64\[1\] where float64\[2\] is expected"
    ):
        load(short)
    partless = write(tmp_path / "c.hdf5", [0, 1], [0, 1])
    with h5py.File(partless, "r+") as file:
        del file["data/demo_1/obs/robot"]
    with pytest.raises(DatasetError, match="cannot be read as robomimic"):
        load(partless)
    with pytest.raises(DatasetError, match="has no trajectory with a step"):
        load(write(tmp_path / "d.hdf5", [0], next_obs=False))
