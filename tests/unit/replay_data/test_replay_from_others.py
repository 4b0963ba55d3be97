"""Files that Minari, RLlib and torch write themselves, and LeRobot's layout by hand."""

import base64
import json
import os
import pickle

import lz4.frame
import msgpack
import msgpack_numpy
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gymnasium import spaces
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.offline.json_writer import JsonWriter
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.compression import pack
from trajectories_by_hand import assert_equal, content, trajectories

from rayagi.replay import load, open_source
from rayagi.replay.arrow import as_array
from rayagi.replay.tables import parquet_files
from rayagi.serving.errors import DatasetError


@pytest.mark.parametrize("data_format", ["arrow", "parquet", "hdf5"])
def test_minari_with_observations_of_several_parts(tmp_path, data_format):
    minari = pytest.importorskip("minari", reason="the extra 'minari' is not installed")
    if data_format == "hdf5":
        pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    rng = np.random.default_rng(0)
    obs_space = spaces.Dict(
        position=spaces.Box(-np.inf, np.inf, (2, 3), np.float64), goal=spaces.Box(-9, 9, (2,), np.float32)
    )
    storage = MinariStorage.new(
        tmp_path / "d", observation_space=obs_space, action_space=spaces.Discrete(4), data_format=data_format
    )
    storage.update_metadata({"dataset_id": "d-v0", "minari_version": minari.__version__})
    wanted = []
    for number, length in enumerate((4, 2)):
        last = np.arange(length) == length - 1
        wanted.append(
            {
                "obs.goal": rng.random((length + 1, 2), np.float32),
                "obs.position": rng.random((length + 1, 2, 3)),
                "action": rng.integers(0, 4, length),
                "reward": rng.random(length),
                "terminated": last & (number == 0),
                "truncated": last & (number == 1),
            }
        )
        one = wanted[-1]
        buffer = EpisodeBuffer(
            id=number,
            observations={"position": one["obs.position"], "goal": one["obs.goal"]},
            actions=one["action"],
            rewards=one["reward"].tolist(),
            terminations=one["terminated"].tolist(),
            truncations=one["truncated"].tolist(),
            infos={},
        )
        storage.update_episodes([buffer])
    assert minari.MinariDataset(tmp_path / "d").total_steps == 6
    with load(tmp_path / "d") as store:
        found = content(store)
    assert_equal([{name: each[name] for name in wanted[0]} for each in found], wanted)


def test_minari_s_images_are_refused(tmp_path):
    image = {"type": "Box", "dtype": "uint8", "shape": [64, 64, 3], "low": 0, "high": 255}
    about = {
        "data_format": "arrow",
        "total_episodes": 1,
        "observation_space": json.dumps(image),
        "action_space": json.dumps({"type": "Discrete", "n": 2, "start": 0, "dtype": "int64"}),
    }
    (tmp_path / "metadata.json").write_text(json.dumps(about))
    with pytest.raises(DatasetError, match="obs has JPEG images: write the dataset with jpeg_encoding=False"):
        open_source(tmp_path)


def packed(episode):
    return msgpack.packb(episode.get_state(), default=msgpack_numpy.encode)


@pytest.mark.parametrize("finalized", [False, True])
def test_rllib_s_episodes_without_their_look_back(tmp_path, finalized):
    wanted = trajectories(lengths=(5, 2), ends="tu")
    items = []
    for number, each in enumerate(wanted):
        length = len(each["reward"])
        episode = SingleAgentEpisode(
            id_=str(number),
            observations=list(each["obs"]),
            actions=list(each["action"]),
            rewards=each["reward"].tolist(),
            terminated=bool(each["terminated"][-1]),
            truncated=bool(each["truncated"][-1]),
            extra_model_outputs={"action_logp": [-1.5] * length},
            len_lookback_buffer=3 if number == 0 else 0,
        )
        items.append(packed(episode.to_numpy() if finalized else episode))
    (tmp_path / "run-1").mkdir()
    pq.write_table(pa.table({"item": items}), tmp_path / "run-1" / "0.parquet")
    # The first episode's steps 0-2 are look-back: its own steps are 3 and 4.
    wanted[0] = {name: values[3:] for name, values in wanted[0].items()}
    with load(tmp_path) as store:
        found = content(store)
    assert [each["log_prob"].tolist() for each in found] == [[-1.5] * 2] * 2
    assert_equal([{name: each[name] for name in wanted[0]} for each in found], wanted)


@pytest.mark.parametrize("compressed", [False, True])
def test_rllib_s_steps(tmp_path, compressed):
    wanted = trajectories(lengths=(3, 1, 4), ends="tuc")
    rows = []
    for number, each in enumerate(wanted):
        for step in range(len(each["reward"])):
            pair = each["obs"][step], each["obs"][step + 1]
            obs, after = map(pack, pair) if compressed else (one.tolist() for one in pair)
            rows.append(
                {
                    "eps_id": f"id{number}",
                    "agent_id": None,
                    "module_id": None,
                    "obs": obs,
                    "new_obs": after,
                    "actions": each["action"][step].tolist(),
                    "rewards": float(each["reward"][step]),
                    "terminateds": bool(each["terminated"][step]),
                    "truncateds": bool(each["truncated"][step]),
                }
            )
    pq.write_table(pa.Table.from_pylist(rows[:5]), tmp_path / "0.parquet")
    pq.write_table(pa.Table.from_pylist(rows[5:]), tmp_path / "1.parquet")
    source = open_source(tmp_path)
    assert source.kind == "rllib steps"
    assert source.lengths.tolist() == [3, 1, 4]
    with load(tmp_path) as store:
        found = content(store)
    for own, expected in zip(found, wanted, strict=True):
        for name, values in expected.items():
            assert own[name].tolist() == values.tolist()


def written_as_json(path, batches, compress=("obs", "new_obs")):
    """Sample batches as RLlib's own writer has them. A small file size: several files."""
    writer = JsonWriter(str(path), max_file_size=500, compress_columns=compress)
    for number, batch in enumerate(batches):
        if writer.cur_file is not None:
            writer.cur_file.close()
            writer.cur_file = None
        writer.ioctx.worker_index = number  # in the name of the file
        writer.write(batch)
    writer.cur_file.close()


def sample_batch(parts, **more):
    """Steps begin to end of trajectories, given as (number, trajectory, begin, end)."""
    columns = {
        "obs": [each["obs"][begin:end] for _, each, begin, end in parts],
        "new_obs": [each["obs"][begin + 1 : end + 1] for _, each, begin, end in parts],
        "actions": [each["action"][begin:end] for _, each, begin, end in parts],
        "rewards": [each["reward"][begin:end] for _, each, begin, end in parts],
        "terminateds": [each["terminated"][begin:end] for _, each, begin, end in parts],
        "truncateds": [each["truncated"][begin:end] for _, each, begin, end in parts],
        "eps_id": [np.full(end - begin, 10**15 + number) for number, _, begin, end in parts],
        "t": [np.arange(begin, end) for _, _, begin, end in parts],
    }
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    count = len(joined["t"])
    joined["infos"] = np.array([{"a": number} for number in range(count)])
    joined["values"] = np.arange(count, dtype=np.float32)
    return SampleBatch({**joined, **more})


@pytest.mark.parametrize("compress", [("obs", "new_obs"), ()])
@pytest.mark.parametrize("several_agents", [False, True])
def test_rllib_s_json_batches_of_interleaved_episodes(tmp_path, compress, several_agents):
    a, b, c = trajectories(lengths=(5, 3, 2), ends="tuc")
    batches = [
        sample_batch([(0, a, 0, 2), (1, b, 0, 1)]),  # two environments in turn
        sample_batch([(0, a, 2, 5), (1, b, 1, 2)]),
        sample_batch([(1, b, 2, 3), (2, c, 0, 2)]),
    ]
    if several_agents:
        batches = [MultiAgentBatch({"default_policy": batch}, batch.count) for batch in batches]
    written_as_json(tmp_path, batches, compress)
    assert len(list(tmp_path.iterdir())) == 3
    source = open_source(tmp_path)
    assert (source.kind, source.lengths.tolist()) == ("rllib batches", [5, 3, 2])
    assert source.left_out == ("values",)
    with load(tmp_path, columns=["values"]) as store:
        found = content(store)
    assert [each.pop("values").tolist() for each in found] == [[0, 1, 0, 1, 2], [2, 3, 0], [1, 2]]
    assert_equal(found, [a, b, c])


def test_rllib_s_older_json_batches(tmp_path):
    """Of Ray before 2.3: dones, no truncateds; one file. Steps that are missing within an episode end a trajectory."""
    (a,) = trajectories(lengths=(5,), ends="t")
    batch = sample_batch([(0, a, 0, 2), (0, a, 3, 5)])
    del batch["truncateds"], batch["new_obs"]
    written_as_json(tmp_path, [batch[:2], batch[2:]])
    files = sorted(tmp_path.iterdir())
    text = "\n".join(file.read_text() for file in files) + "\n\n"
    (tmp_path / "all.json").write_text(
        text.replace("terminateds", "dones")
    )  # RLlib refuses to write that name now
    source = open_source(tmp_path / "all.json")
    # Of steps 0 and 1, the observation after the second is not known; 3 and 4 are terminated.
    assert source.lengths.tolist() == [1, 2]
    first, second = source.read()
    np.testing.assert_array_equal(first["obs"], a["obs"][:2])
    np.testing.assert_array_equal(second["action"], a["action"][3:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: it has no steps"),
        ("{", "cannot be read as rllib batches"),
        ("[1]", "cannot be read as rllib batches"),
        ('{"type": "SampleBatch"}', "cannot be read as rllib batches"),
        ('{"type": "SampleBatch", "eps_id": [1], "obs": [[1.0]], "actions": [1, 2]}', "expected 1 step"),
        ('{"type": "SampleBatch", "eps_id": [1], "obs": [[1.0]]}', "action"),
        (
            '{"type": "SampleBatch", "eps_id": [1], "obs": [[1.0]], "actions": [1], "rewards": [1], "dones": [2]}',
            "dones has values other than 0 and 1",
        ),
        (
            '{"type": "MultiAgentBatch", "policy_batches": {"a": {}, "b": {}}}',
            "has the policies a, b: one replay has one policy's steps",
        ),
    ],
)
def test_json_that_is_no_recording_is_explained(tmp_path, text, message):
    (tmp_path / "output-1.json").write_text(text)
    with pytest.raises(DatasetError, match=message):
        open_source(tmp_path)


def test_a_compressed_column_cannot_run_code(tmp_path):
    class Bad:
        def __reduce__(self):
            return (print, ("run",))

    text = base64.b64encode(lz4.frame.compress(pickle.dumps(Bad()))).decode()
    row = {"eps_id": "a", "obs": text, "new_obs": text, "actions": 0, "rewards": 0.0}
    row |= {"terminateds": True, "truncateds": False}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "0.parquet")
    with pytest.raises(DatasetError, match=r"builtins\.print in a compressed column"):
        open_source(tmp_path)


def lerobot(path, wanted, **features):
    """A dataset in LeRobot v3's layout, as its documentation has it: without the observation after the last action."""
    (path / "meta").mkdir(parents=True)
    (path / "data" / "chunk-000").mkdir(parents=True)
    sizes = {"observation.state": 2, "action": 2, "next.reward": 1, "next.done": 1} | features
    kinds = {"next.done": "bool"}
    info = {
        "codebase_version": "v3.0",
        "fps": 30,
        "features": {
            name: {"dtype": kinds.get(name, "float32"), "shape": [size]} for name, size in sizes.items()
        }
        | {"observation.images.top": {"dtype": "video", "shape": [8, 8, 3]}},
    }
    (path / "meta" / "info.json").write_text(json.dumps(info))
    for number, each in enumerate(wanted):
        length = len(each["reward"])
        table = {
            "observation.state": each["obs"][:-1].tolist(),
            "action": each["action"].tolist(),
            "next.reward": each["reward"],
            "next.done": each["terminated"],
            "episode_index": np.full(length, number),
            "frame_index": np.arange(length),
        }
        pq.write_table(pa.table(table), path / "data" / "chunk-000" / f"file-{number:03d}.parquet")
    return path


def test_lerobot_s_frames(tmp_path):
    rows = trajectories(lengths=(3, 4), ends="tc")
    for each in rows:
        each["action"] = each["action"].astype(np.float64)
    path = lerobot(tmp_path / "d", rows)
    source = open_source(path)
    assert source.left_out == ("observation.images.top",)
    assert source.lengths.tolist() == [3, 3]
    first, second = source.read()
    # Terminated: its last observation is repeated. Cut: its last step is left out.
    assert first["obs"].tolist() == [*rows[0]["obs"][:3].tolist(), rows[0]["obs"][2].tolist()]
    assert second["obs"].tolist() == rows[1]["obs"][:4].tolist()
    assert second["reward"].tolist() == rows[1]["reward"][:3].tolist()
    info = json.loads((path / "meta" / "info.json").read_text())
    (path / "meta" / "info.json").write_text(json.dumps(info | {"codebase_version": "v2.1"}))
    with pytest.raises(DatasetError, match=r"has LeRobot's version v2\.1, where v3\.0 is read"):
        open_source(path)


def test_a_missing_file_of_frames_is_noticed(tmp_path):
    path = lerobot(tmp_path / "d", trajectories(lengths=(3, 4), ends="tt"))
    info = json.loads((path / "meta" / "info.json").read_text()) | {"total_frames": 7}
    (path / "meta" / "info.json").write_text(json.dumps(info))
    assert open_source(path).num_steps == 7
    (path / "data" / "chunk-000" / "file-001.parquet").unlink()
    with pytest.raises(DatasetError, match=r"has 3 frames where info\.json says 7"):
        open_source(path)


def test_tensors_by_either_name_and_nothing_else(tmp_path):
    flat = {"obs": torch.arange(4.0)[:, None], "actions": torch.zeros(4, 1), "rewards": torch.ones(4)}
    flat["terminals"] = torch.tensor([False, True, False, True])
    torch.save(flat, tmp_path / "a.pt")
    with load(tmp_path / "a.pt") as store:
        assert [each["obs"][:, 0].tolist() for each in content(store)] == [[0, 1, 1], [2, 3, 3]]
    for number, (bad, message) in enumerate(
        [
            ([torch.zeros(3)], "has no dict of tensors"),
            (
                {"obs": torch.zeros(3), "action": torch.zeros(3, dtype=torch.bfloat16)},
                "column 'action' has type",
            ),
            ({"obs": Exception("code")}, "cannot be read as torch"),
        ]
    ):
        torch.save(bad, tmp_path / f"{number}.pt")
        with pytest.raises(DatasetError, match=message):
            load(tmp_path / f"{number}.pt")


def test_damaged_parquet_and_lists_of_different_lengths(tmp_path):
    table = pa.table(
        {"eps_id": ["a", "a"], "obs": [[1.0], [1.0, 2.0]], "actions": [0, 1], "terminateds": [False, True]}
    )
    pq.write_table(table, tmp_path / "0.parquet")
    with pytest.raises(DatasetError, match="its lists have different lengths"):
        list(open_source(tmp_path).read())
    whole = (tmp_path / "0.parquet").read_bytes()
    (tmp_path / "0.parquet").write_bytes(whole[:-100])
    with pytest.raises(DatasetError, match="cannot be read as Parquet"):
        open_source(tmp_path)


def test_a_folder_that_cannot_be_listed_is_passed_over(tmp_path, monkeypatch):
    """As one that vanishes while a large folder is searched."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.parquet").write_bytes(b"")
    (tmp_path / "gone").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "1.parquet").write_bytes(b"")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert parquet_files(tmp_path) == [tmp_path / "a" / "0.parquet"]


def test_files_are_in_the_order_of_their_numbers(tmp_path):
    names = ["part-2.parquet", "part-10.parquet", "x/1_000009.parquet", "x/10_000000.parquet"]
    (tmp_path / "x").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert parquet_files(tmp_path) == [tmp_path / name for name in names]


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float32(), 2)])
def test_a_null_in_a_vector_is_an_error(kind):
    with pytest.raises(ValueError, match="null in 1 value of its lists"):
        as_array(pa.array([[1, None], [2, 3]], kind))


def test_damaged_json_is_one_sentence(tmp_path):
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text("[]")
    with pytest.raises(DatasetError, match="cannot be read as lerobot"):
        open_source(tmp_path)
    empty = base64.b64encode(lz4.frame.compress(b"")).decode()
    batch = {"type": "SampleBatch", "eps_id": [0], "obs": empty, "actions": [0], "terminateds": [True]}
    (tmp_path / "a.json").write_text(json.dumps(batch))
    with pytest.raises(DatasetError, match="cannot be read as rllib batches"):
        open_source(tmp_path / "a.json")


def test_a_name_that_no_file_can_have(tmp_path):
    with pytest.raises(DatasetError, match=r"cannot be read as a dataset .*File name too long"):
        open_source(tmp_path / f"{'a' * 300}.pt")


def test_two_names_of_one_tensor(tmp_path):
    torch.save(
        {"obs": torch.zeros(2, 1), "action": torch.zeros(2), "actions": torch.ones(2)}, tmp_path / "a.pt"
    )
    with pytest.raises(DatasetError, match="has 'actions' and 'action', two names of one column"):
        open_source(tmp_path / "a.pt")


def test_ends_under_other_names_are_not_overlooked(tmp_path):
    """Else six steps of two trajectories would be one, which learners bootstrap through."""
    steps = {"obs": torch.arange(6.0)[:, None], "action": torch.zeros(6, 1), "reward": torch.ones(6)}
    ends = torch.tensor([0, 0, 1, 0, 0, 1], dtype=torch.bool)
    nexts = {"next_obs": torch.arange(6.0)[:, None] + 1}
    for number, (more, message) in enumerate(
        [
            (
                {"dones": ends},
                "has 'dones', and no 'terminated' .* rename it, or add 'terminated', all false",
            ),
            ({"done": ends, **nexts}, "has 'done', and no 'terminated'"),
            (
                {"episode_over": ends},
                "says nowhere where .* its columns are obs, action, reward, episode_over",
            ),
        ]
    ):
        torch.save(steps | more, tmp_path / f"{number}.pt")
        with pytest.raises(DatasetError, match=message):
            open_source(tmp_path / f"{number}.pt")
    for number, (more, lengths) in enumerate(
        [
            ({"terminated": ends, "done": ends}, [3, 3]),
            ({"terminated": ends & False}, [5]),
            ({"trajectory_number": ends.cumsum(0) - ends.int()}, [2, 2]),
            (nexts, [6]),
        ]
    ):
        torch.save(steps | more, tmp_path / f"good-{number}.pt")
        assert open_source(tmp_path / f"good-{number}.pt").lengths.tolist() == lengths


def own_steps(path, **changes):
    """A file of one's own with a row per step, in RLlib's layout: two trajectories. A change to None is a column less."""
    columns = {
        "eps_id": ["a", "a", "b"],
        "obs": [[0.0], [1.0], [2.0]],
        "actions": [0, 1, 2],
        "rewards": [0.0, 1.0, 2.0],
        "terminateds": [False, True, True],
    }
    pq.write_table(pa.table({k: v for k, v in (columns | changes).items() if v is not None}), path)
    return path


def test_one_file_of_steps(tmp_path):
    found = list(open_source(own_steps(tmp_path / "own.parquet")).read())
    assert [each["reward"].tolist() for each in found] == [[0, 1], [2]]
    assert [each["obs"][:, 0].tolist() for each in found] == [[0, 1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [0.0, None, 2.0]}, r"\(ValueError: rewards: null in 1 row\)"),
        ({"terminateds": [False, None, True]}, r"\(ValueError: terminateds: null in 1 row\)"),
        ({"obs": [[0.0], [1.0, 1.0], [2.0]]}, r"\(ValueError: obs: its lists have different lengths\)"),
        (
            {"actions": pa.array([1, 2, 3], pa.date32())},
            r"\(ValueError: actions: date32\[day\] is no type of numbers\)",
        ),
        (
            {"eps_id": None},
            "no column 'eps_id', the number of each step's trajectory: name yours so, and the others obs, actions, rewards, "
            "terminateds, truncateds, new_obs, action_logp; its columns are obs, actions, rewards, terminateds$",
        ),
        (
            {"actions": None},
            "has no column 'action' or 'actions': its columns are obs, reward, terminated, truncated$",
        ),
    ],
)
def test_a_file_of_one_s_own_that_differs_is_told_where(tmp_path, changes, message):
    with pytest.raises(DatasetError, match=message):
        list(open_source(own_steps(tmp_path / "own.parquet", **changes)).read())


def test_a_message_does_not_list_hundreds_of_columns(tmp_path):
    torch.save({f"demo_{number}": torch.zeros(3) for number in range(300)}, tmp_path / "a.pt")
    with pytest.raises(
        DatasetError,
        match=r"has no column 'obs' or 'observations': its columns are demo_0, .*demo_11, \.\.\. \(302 in all\)$",
    ):
        open_source(tmp_path / "a.pt")


def test_a_dataset_in_minari_s_folder_is_found_by_its_name(tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "all"))
    folder = tmp_path / "all" / "D4RL" / "pen" / "human-v2"
    (folder / "data").mkdir(parents=True)
    about = {"data_format": "hdf5", "total_episodes": 1, "jpeg_encoding": False}
    (folder / "data" / "metadata.json").write_text(json.dumps(about))
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for name, values in (
            ("observations", np.zeros((3, 2))),
            ("actions", np.ones((2, 1))),
            ("rewards", np.ones(2)),
            ("terminations", np.array([False, True])),
            ("truncations", np.array([False, False])),
        ):
            file[f"episode_0/{name}"] = values
    source = open_source("D4RL/pen/human-v2")
    assert (source.path, source.lengths.tolist()) == (folder, [2])
    with load("D4RL/pen/human-v2") as store:
        assert len(content(store)) == 1
    # What is in the working folder comes first.
    torch.save({"obs": torch.zeros(4, 1)}, "walks-v0")
    with pytest.raises(DatasetError, match="walks-v0: is of no known format"):
        open_source("walks-v0")


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_missing_dataset_of_minari_says_how_to_get_it(tmp_path, monkeypatch, is_installed):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr("rayagi.replay.minari.find_spec", lambda name: is_installed or None)
    install = "" if is_installed else r"pip install 'rayagi\[minari\]', then "
    expected = (
        rf"D4RL/pen/human-v2: does not exist, nor does {tmp_path}/D4RL/pen/human-v2: if it is one of Minari's, "
        rf"{install}`minari download D4RL/pen/human-v2`$"
    )
    with pytest.raises(DatasetError, match=expected):
        open_source("D4RL/pen/human-v2")
    with pytest.raises(DatasetError, match=r"missing\.pt: does not exist$"):
        open_source("missing.pt")
