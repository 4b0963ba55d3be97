"""HDF5 in D4RL's layout, written by hand with h5py: where trajectories end, and what follows their last action."""

import numpy as np
import pytest
from trajectories_by_hand import assert_equal, content, trajectories

from actors.replay import ReplayError, SubSequences, select
from rayagi.replay import load, open_source
from rayagi.serving.errors import DatasetError

h5py = pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed: nothing of D4RL was tested")


def write(path, columns):
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values
    return path


def columns(terminals, timeouts=None, **others):
    """Observation i is (i, -i), action and reward i are i."""
    count = np.arange(len(terminals), dtype=np.float32)
    found = {
        "observations": np.stack([count, -count], 1),
        "actions": count[:, None],
        "rewards": count,
        "terminals": np.array(terminals, bool),
        **others,
    }
    return found if timeouts is None else {**found, "timeouts": np.array(timeouts, bool)}


def test_without_next_observations_a_step_is_left_out_unless_it_terminated(tmp_path):
    # Rows 0-2 terminate; 3-5 reach the time limit; 6 alone reaches it; 7-8 are cut by the end of the file.
    path = write(tmp_path / "a.hdf5", columns([0, 0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 0, 0]))
    with load(path) as store:
        first, second, third = content(store)
    assert first["obs"][:, 0].tolist() == [0, 1, 2, 2]  # nothing bootstraps from the last
    assert first["terminated"].tolist() == [False, False, True]
    assert second["obs"][:, 0].tolist() == [3, 4, 5]
    assert second["reward"].tolist() == [3, 4]
    assert second["truncated"].tolist() == [False, True]
    assert third["obs"][:, 0].tolist() == [7, 8]
    assert not third["terminated"].any()
    assert not third["truncated"].any()
    assert open_source(path).lengths.tolist() == [3, 2, 1]


def test_next_observations_close_every_trajectory(tmp_path):
    wanted = trajectories()
    flat = {
        "observations": np.concatenate([each["obs"][:-1] for each in wanted]),
        "next_observations": np.concatenate([each["obs"][1:] for each in wanted]),
    }
    theirs = {"action": "actions", "reward": "rewards", "terminated": "terminals", "truncated": "timeouts"}
    flat |= {name: np.concatenate([each[own] for each in wanted]) for own, name in theirs.items()}
    with load(write(tmp_path / "a.hdf5", flat)) as store:
        assert_equal(content(store), wanted)
    # Without timeouts, the trajectories end where the next observation is not the next row's.
    del flat["timeouts"]
    with load(write(tmp_path / "b.hdf5", flat)) as store:
        assert_equal(content(store), wanted)


@pytest.mark.parametrize(
    ("obs", "after"), [("float32", "float64"), ("float64", "float32"), ("float32", "float16")]
)
def test_next_observations_of_another_width_are_the_same_numbers(tmp_path, caplog, obs, after):
    """A third is another number in each type."""
    numbers = np.arange(7)[:, None] / 3
    found = columns([0, 0, 1, 0, 0, 0], [0] * 6)
    found |= {"observations": numbers[:-1].astype(obs), "next_observations": numbers[1:].astype(after)}
    source = open_source(write(tmp_path / "a.hdf5", found))
    assert source.lengths.tolist() == [3, 3]
    assert not caplog.messages
    first, second = source.read()
    assert first["obs"].dtype == second["obs"].dtype == obs
    assert second["obs"][-1] == numbers[6].astype(after).astype(obs)


def test_next_observations_that_are_never_the_next_row_s(tmp_path, caplog):
    found = columns([0] * 10, [0] * 10)
    path = write(tmp_path / "a.hdf5", found | {"next_observations": found["observations"] + 9})
    assert open_source(path).lengths.tolist() == [1] * 10
    assert caplog.messages == [
        f"{path}: behind 9 of 9 steps that nothing else ends, next_obs is not the next row's obs: each ends a trajectory"
    ]


def test_pieces_have_the_observation_after_their_last_step(tmp_path):
    path = write(tmp_path / "a.hdf5", columns([0, 0, 0, 0, 0, 0, 1]))
    with load(path, max_length=3) as store:
        found = content(store)
    assert [each["obs"][:, 0].tolist() for each in found] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 6]]
    assert [each["terminated"].tolist() for each in found] == [[False] * 3, [False] * 3, [True]]
    with load(path, max_length=1) as store:
        assert len(store) == 7


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_shards_hold_the_rows_of_the_whole_table(tmp_path, num_shards):
    path = write(tmp_path / "a.hdf5", columns([0, 0, 0, 1] * 5))
    whole = [each["reward"].tolist() for each in content(load(path, max_length=3))]
    shards = [load(path, max_length=3, shard=shard, num_shards=num_shards) for shard in range(num_shards)]
    assert [each["reward"].tolist() for shard in shards for each in content(shard)] == whole
    assert [int(shard.status()["timestamp"][0]) for shard in shards if len(shard)] == [
        shard.base for shard in shards if len(shard)
    ]


def test_a_dataset_larger_than_the_budget_is_spilled(tmp_path):
    count = 40_000
    path = write(tmp_path / "a.hdf5", columns(np.arange(count) % 100 == 99))
    with load(path, memory_bytes=300_000, folder=tmp_path, selectors=(SubSequences(10),)) as store:
        assert store.counters()["spilled"] > 100
        assert np.concatenate([each["reward"] for each in content(store)]).tolist() == list(range(count))
        assert len(select(store, SubSequences(10), 64, seed=0, draw=0)) == 64


def test_further_columns_are_read_if_they_are_named(tmp_path):
    infos = {"infos/qpos": np.ones((3, 4)), "infos/action_log_probs": np.zeros(3, np.float32)}
    path = write(tmp_path / "a.hdf5", columns([0, 0, 1], **infos) | {"metadata/note": np.zeros(2)})
    source = open_source(path)
    assert [column.name for column in source.schema.columns][5:] == ["log_prob"]
    assert source.left_out == ("qpos",)
    assert open_source(path, columns=["qpos"]).schema.columns[6].shape == (4,)
    with pytest.raises(DatasetError, match=r"has no column 'qvel': its columns are action"):
        open_source(path, columns=["qvel"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": np.zeros(2, np.float32)}, "is damaged: reward has 2 rows where action has 3"),
        ({"terminals": np.array([0, 2, 1])}, "terminated has values other than 0 and 1"),
        ({"terminals": np.array([0, np.nan, 1])}, "terminated has values other than 0 and 1"),
        ({"rewards": np.zeros((3, 2), np.float32)}, r"reward has shape \[3, 2\] where \[3\] is expected"),
        ({"actions": np.array([b"a", b"b", b"c"])}, "column 'action' has type"),
        ({"actions": None}, "has no column 'action'"),
        (
            {"next_observations": np.zeros((3, 2), complex)},
            "next_obs is of complex128 where obs is of float32",
        ),
        ({"next_observations": np.zeros((3, 5))}, r"next_obs has shape \[3, 5\] where obs has \[3, 2\]"),
    ],
)
def test_a_file_of_another_layout_is_said_to_be_so(tmp_path, change, message):
    found = {name: values for name, values in (columns([0, 0, 1]) | change).items() if values is not None}
    with pytest.raises(DatasetError, match=message):
        open_source(write(tmp_path / "a.hdf5", found))


def test_damaged_empty_and_unknown_files(tmp_path):
    whole = write(tmp_path / "a.hdf5", columns([0] * 2000)).read_bytes()
    (tmp_path / "b.hdf5").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match="cannot be read as hdf5"):
        load(tmp_path / "b.hdf5")
    with pytest.raises(DatasetError, match="is empty"):
        load(write(tmp_path / "c.hdf5", columns([])))
    with pytest.raises(DatasetError, match="has no trajectory with a step whose next observation is known"):
        load(write(tmp_path / "d.hdf5", columns([0])))
    with pytest.raises(DatasetError, match="does not exist"):
        load(tmp_path / "e.hdf5")
    with pytest.raises(ReplayError, match="give a folder"):
        load(tmp_path / "a.hdf5", memory_bytes=1000)


def test_flags_as_floats_and_scalars_with_an_axis(tmp_path):
    found = columns([0, 0, 1])
    found["rewards"], found["terminals"] = found["rewards"][:, None], np.array([[0.0], [0.0], [1.0]])
    with load(write(tmp_path / "a.hdf5", found)) as store:
        (only,) = content(store)
    assert only["reward"].tolist() == [0, 1, 2]
    assert only["terminated"].tolist() == [False, False, True]


def test_an_info_of_a_taken_name_keeps_its_own(tmp_path):
    path = write(
        tmp_path / "a.hdf5", columns([0, 0, 1], **{"infos/action": np.ones(3), "infos/goal": np.ones(3)})
    )
    assert open_source(path).left_out == ("infos/action", "goal")
    with load(path, columns=["infos/action"]) as store:
        (found,) = content(store)
    assert found["action"][:, 0].tolist() == [0, 1, 2]
    assert found["infos/action"].tolist() == [1, 1, 1]


def test_two_names_of_one_column(tmp_path):
    path = write(tmp_path / "a.hdf5", columns([0, 0, 1], action=np.ones(3)))
    with pytest.raises(DatasetError, match="has 'actions' and 'action', two names of one column"):
        open_source(path)
