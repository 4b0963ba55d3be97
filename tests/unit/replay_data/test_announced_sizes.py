"""Files that announce more than there is memory for are refused before it is allocated."""

import base64
import json
import pickle

import lz4.frame
import numpy as np
import pytest
import torch
from minari_by_hand import episode, write_minari

from placement.inventory import limits
from rayagi.replay import open_source
from rayagi.replay.trajectories import reading
from rayagi.serving.errors import DatasetError


@pytest.mark.parametrize(
    ("rows", "width", "message"),
    [
        (
            10**12,
            1,
            "announces 29802.32 GiB of flags and ends, where this process may use 1.00 GiB: is it damaged",
        ),
        (10, 10**10, "announces 37.25 GiB a step, where this process may use"),
    ],
)
@pytest.mark.parametrize("kind", ["torch", "hdf5"])
def test_rows_and_steps_larger_than_memory(tmp_path, monkeypatch, kind, rows, width, message):
    monkeypatch.setattr(limits, "memory_bytes", lambda: 2**30)
    shapes = {"obs": (rows, width), "action": (rows,), "reward": (rows,), "terminated": (rows,)}
    if kind == "torch":
        path = tmp_path / "a.pt"
        torch.save(
            {name: torch.zeros([1] * len(shape)).expand(shape) for name, shape in shapes.items()}, path
        )
    else:
        h5py = pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
        path = tmp_path / "a.hdf5"
        with h5py.File(path, "w") as file:
            for name, shape in shapes.items():
                file.create_dataset(name, shape, "f4", chunks=tuple(min(size, 1000) for size in shape))
    with pytest.raises(DatasetError, match=message):
        open_source(path)


def test_an_episode_of_minari_larger_than_memory(tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    path = write_minari(tmp_path / "d", [episode(3)])
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        file.create_dataset("episode_0/infos/x", (10**9, 10), "f4", chunks=(1000, 10))
    monkeypatch.setattr(limits, "memory_bytes", lambda: 2**30)
    with pytest.raises(DatasetError, match=r"announces 37\.25 GiB of episode_0"):
        open_source(path)


def test_a_demonstration_of_robomimic_larger_than_memory(tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["data/demo_0/actions"] = np.zeros((3, 1))
        file.create_dataset("data/demo_0/obs/x", (10**9, 10), "f4", chunks=(1000, 10))
    monkeypatch.setattr(limits, "memory_bytes", lambda: 2**30)
    with pytest.raises(DatasetError, match=r"announces 37\.25 GiB of /data/demo_0/obs/x"):
        list(open_source(tmp_path / "a.hdf5").read())


class _Zeros:
    """Pickled as an array that is made by its size, without values."""

    def __init__(self, size):
        self.size = size

    def __reduce__(self):
        return np.ndarray, ((self.size,),)


def test_a_compressed_column_without_values(tmp_path):
    text = base64.b64encode(lz4.frame.compress(pickle.dumps(_Zeros(1000)))).decode()
    batch = {"type": "SampleBatch", "eps_id": [0], "obs": text, "actions": [0], "terminateds": [True]}
    (tmp_path / "a.json").write_text(json.dumps(batch))
    with pytest.raises(DatasetError, match="a compressed column has no arrays of numbers"):
        open_source(tmp_path / "a.json")


def test_memory_that_ends_while_a_file_is_read(tmp_path):
    message = "a.pt: needs more memory to be read than there is: Unable to allocate 8 TiB"
    with pytest.raises(DatasetError, match=message), reading(tmp_path / "a.pt", "torch"):
        raise MemoryError("Unable to allocate 8 TiB")
