"""A further column with the name of one of our columns is no substitute for the format's own."""

import json

import msgpack
import msgpack_numpy
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from minari_by_hand import episode, write_minari

from rayagi.replay import open_source

SEVENS = {
    "action": np.full((3, 1), 7.0),
    "reward": np.full(3, 7.0),
    "obs": np.full((3, 2), 7.0),
    "obs.x": np.full((3, 2), 7.0),
    "terminated": np.ones(3, bool),
}
"""Further columns of three rows."""


def assert_own(path, *, left_out=()):
    """One trajectory of steps 0 and 1, the first of which is not terminated."""
    source = open_source(path)
    (found,) = source.read()
    assert [name for name in found if name.startswith("obs")] == ["obs"]
    assert found["obs"][:, 0].tolist()[:2] == [0, 1]
    assert found["action"].reshape(-1).tolist() == [0, 1]
    assert found["reward"].tolist() == [0, 1]
    assert found["terminated"].tolist() == [False, True]
    assert set(source.left_out) == {f"infos/{name}" for name in left_out or SEVENS}
    (found,) = open_source(path, columns=["infos/action"]).read()
    assert found["infos/action"].reshape(-1).tolist() == [7, 7]


@pytest.mark.parametrize("data_format", ["hdf5", "parquet"])
def test_infos_of_minari(tmp_path, data_format):
    if data_format == "hdf5":
        pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    assert_own(write_minari(tmp_path / "d", [episode(2, **SEVENS)], data_format))


def test_features_of_lerobot(tmp_path):
    (tmp_path / "meta").mkdir()
    (tmp_path / "data").mkdir()
    further = {name: values[:2] for name, values in SEVENS.items() if name != "action"}
    own = {
        "observation.state": np.array([[0.0, 0.0], [1.0, 1.0]]),
        "action": np.array([[0.0], [1.0]]),
        "next.reward": np.array([0.0, 1.0]),
        "next.done": np.array([False, True]),
        "infos/action": np.full((2, 1), 7.0),
    }
    features = {
        name: {"dtype": values.dtype.name, "shape": list(values.shape[1:] or (1,))}
        for name, values in {**own, **further}.items()
    }
    (tmp_path / "meta" / "info.json").write_text(
        json.dumps({"codebase_version": "v3.0", "features": features})
    )
    rows = {**own, **further, "episode_index": np.zeros(2, int), "frame_index": np.arange(2)}
    pq.write_table(
        pa.table({name: values.tolist() for name, values in rows.items()}), tmp_path / "data" / "0.parquet"
    )
    assert_own(tmp_path)


STEPS = {
    "eps_id": [0, 0],
    "obs": [[0.0, 0.0], [1.0, 1.0]],
    "actions": [0, 1],
    "rewards": [0.0, 1.0],
    "terminateds": [False, True],
}
FURTHER_STEPS = {name: values[:2].tolist() for name, values in SEVENS.items() if name != "obs"}


def test_columns_of_rllib_s_steps(tmp_path):
    pq.write_table(pa.table(STEPS | FURTHER_STEPS), tmp_path / "steps.parquet")
    assert_own(tmp_path / "steps.parquet", left_out=FURTHER_STEPS)


def test_columns_of_rllib_s_json(tmp_path):
    batch = {"type": "SampleBatch", "new_obs": STEPS["obs"], **STEPS, **FURTHER_STEPS}
    (tmp_path / "steps.json").write_text(json.dumps(batch))
    assert_own(tmp_path / "steps.json", left_out=FURTHER_STEPS)


def test_model_outputs_of_rllib_s_episodes(tmp_path):
    def buffer(values):
        return {"data": np.asarray(values), "lookback": 0}

    state = {
        "observations": buffer([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]),
        "actions": buffer([0, 1]),
        "rewards": buffer([0.0, 1.0]),
        "is_terminated": True,
        "is_truncated": False,
        "extra_model_outputs": {name: buffer(values[:2]) for name, values in SEVENS.items()},
    }
    item = msgpack.packb(state, default=msgpack_numpy.encode)
    pq.write_table(pa.table({"item": [item]}), tmp_path / "episodes.parquet")
    assert_own(tmp_path / "episodes.parquet")


def test_infos_of_d4rl(tmp_path):
    h5py = pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    own = {
        "observations": STEPS["obs"],
        "actions": [0, 1],
        "rewards": [0.0, 1.0],
        "terminals": [False, True],
        **{f"infos/{name}": values[:2] for name, values in SEVENS.items()},
    }
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name, values in own.items():
            file[name] = values
    assert_own(tmp_path / "a.hdf5")


def test_arrays_of_robomimic(tmp_path):
    h5py = pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        demo = file.create_group("data/demo_0")
        for name, values in {
            "obs/x": np.array([[0.0], [1.0]]),
            "actions": np.array([[0.0], [1.0]]),
            "dones": np.array([0, 1]),
            "terminated": np.array([1, 1]),
            "obs.x": np.full((2, 1), 7.0),
        }.items():
            demo[name] = values
    source = open_source(tmp_path / "a.hdf5")
    (found,) = source.read()
    assert found["obs.x"].tolist() == [[0], [1], [1]]
    assert found["terminated"].tolist() == [False, True]
    assert set(source.left_out) == {"infos/terminated", "infos/obs.x"}
