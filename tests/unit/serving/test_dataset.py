"""pyarrow and our reader find what was written, for any division into blocks, files and episodes."""

import json
from collections import defaultdict

import numpy as np
import pyarrow.dataset
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.protocols import ActionSpec
from rayagi.serving.column_layout import ColumnBlock, ColumnLayout
from rayagi.serving.dataset import open_dataset
from rayagi.serving.errors import DatasetError
from rayagi.serving.manifest import DatasetFolder, Description
from rayagi.serving.program import Recording
from rayagi.serving.writer_process import Writer, WriterJob

CONTINUOUS = ColumnLayout(obs_dim=2, action=ActionSpec(kind="continuous", dim=1, low=(-1.0,), high=(1.0,)))
DISCRETE = ColumnLayout(obs_dim=2, action=ActionSpec(kind="discrete", dim=1, num_choices=3))


def writer(path, layout=CONTINUOUS, file_format="parquet", rows_per_file=1000, num_envs=2, **job):
    if not path.exists():
        DatasetFolder.create(path, Description(task="Task-v0", format=file_format, layout=layout))
    given = {"gmi": 0, "first_env_index": 0, "total_envs": num_envs, "session": 0, "first_episode": 0, **job}
    recording = Recording(
        folder=str(path),
        format=file_format,
        session=given.pop("session"),
        first_episode=given.pop("first_episode"),
        rows_per_file=rows_per_file,
        bytes_per_file=10**9,
        about={"task": "Task-v0"},
    )
    return Writer(WriterJob(recording=recording, layout=layout, num_envs=num_envs, num_steps=4, **given))


def block(terminated, truncated=None, *, obs=None, rewards=None, layout=CONTINUOUS, version=7):
    """(N, L) flags as lists; observations count up over rows unless given."""
    ends = np.array(terminated, dtype=bool)
    envs, steps = ends.shape
    counted = np.arange(envs * steps, dtype=np.float32).reshape(envs, steps)
    return ColumnBlock(
        obs=np.stack([counted, -counted], axis=-1) if obs is None else obs,
        action=counted.astype(np.int64) % 3 if layout.action.is_discrete else counted[..., None] / 10,
        log_prob=-counted / 4,
        reward=np.ones((envs, steps), np.float32) if rewards is None else np.array(rewards, np.float32),
        terminated=ends,
        truncated=np.zeros_like(ends) if truncated is None else np.array(truncated, dtype=bool),
        final_obs=np.full((envs, steps, 2), 50.0, np.float32),
        last_obs=np.full((envs, 2), 99.0, np.float32),
        version=version,
    )


def test_files_without_log_probabilities_are_read(tmp_path):
    own = writer(tmp_path / "d")
    own.take(block([[0, 1], [0, 0]]))
    own.close()
    (path,) = (tmp_path / "d" / "data").iterdir()
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop_columns(["log_prob"]), path)
    for episode in open_dataset(tmp_path / "d").episodes():
        assert np.isnan(episode.log_probs).all()
        assert episode.log_probs.shape == episode.rewards.shape
    assert open_dataset(tmp_path / "d").arrow().to_table()["log_prob"].null_count == 4


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_rows_by_hand_as_pyarrow_reads_them(tmp_path, file_format):
    own = writer(tmp_path / "d", file_format=file_format)
    own.take(block([[0, 1, 0], [0, 0, 0]], truncated=[[0, 0, 0], [0, 0, 1]]))
    own.close()
    kind = "parquet" if file_format == "parquet" else "ipc"
    table = pyarrow.dataset.dataset(tmp_path / "d" / "data", format=kind).to_table()
    rows = table.to_pylist()
    # Environment 0: episode 0 of two steps, then episode 0 + 2 environments, cut by the end. Environment 1: episode 1.
    assert [(row["episode"], row["step"], row["env"]) for row in rows] == [
        (0, 0, 0), (0, 1, 0), (2, 0, 0), (1, 0, 1), (1, 1, 1), (1, 2, 1),
    ]  # fmt: skip
    assert [row["obs"] for row in rows] == [[i, -i] for i in range(6)]
    assert [row["log_prob"] for row in rows] == [-i / 4 for i in range(6)]
    assert [row["terminated"] for row in rows] == [False, True, False, False, False, False]
    assert [row["truncated"] for row in rows] == [False] * 5 + [True]
    assert [row["final_obs"] for row in rows] == [None, [50, 50], [99, 99], None, None, [50, 50]]
    assert {row["policy_version"] for row in rows} == {7}
    assert {(row["gmi"], row["session"]) for row in rows} == {(0, 0)}
    origin = json.loads(table.schema.metadata[b"rayagi.dataset"])
    assert origin["task"] == "Task-v0"
    assert origin["obs_dim"] == 2


def test_discrete_actions_are_an_integer_column(tmp_path):
    own = writer(tmp_path / "d", DISCRETE)
    own.take(block([[0, 0, 0, 1]] * 2, layout=DISCRETE))
    own.close()
    episodes = list(open_dataset(tmp_path / "d").episodes())
    assert [episode.actions.tolist() for episode in episodes] == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert episodes[0].actions.dtype == np.int64


def test_an_episode_over_blocks_and_files_is_one(tmp_path):
    own = writer(tmp_path / "d", rows_per_file=3, num_envs=1)
    for number in range(4):
        own.take(block([[0, 0, 0, number == 2]], rewards=[[1, 2, 3, 4]]))
    own.close()
    dataset = open_dataset(tmp_path / "d")
    assert [file.statistics.rows for file in dataset.files] == [3, 3, 3, 3, 3, 1]
    whole, cut = dataset.episodes()
    assert (whole.number, len(whole.rewards), whole.terminated, whole.is_whole) == (0, 12, True, True)
    assert whole.obs.shape == (13, 2)
    assert whole.obs[-1].tolist() == [50, 50]
    assert whole.rewards.sum() == 30
    assert (cut.number, len(cut.rewards), cut.is_whole) == (1, 4, False)
    assert cut.obs[-1].tolist() == [99, 99]
    assert [episode.number for episode in dataset.episodes(whole_only=True)] == [0]
    summary = dataset.statistics.summary()
    assert (summary["rows"], summary["episodes"], summary["return_mean"]) == (16, 1, 30.0)
    assert summary["length_mean"] == 12


def reference(blocks, num_envs):
    """Episodes per environment, step by step: (obs, rewards, next observation, whole)."""
    episodes = defaultdict(lambda: [([], [])])
    finished = []
    for one in blocks:
        for env in range(num_envs):
            for t in range(one.reward.shape[1]):
                obs, rewards = episodes[env][-1]
                obs.append(one.obs[env, t].tolist())
                rewards.append(float(one.reward[env, t]))
                if one.terminated[env, t] or one.truncated[env, t]:
                    finished.append((env, obs, rewards, one.final_obs[env, t].tolist()))
                    episodes[env].append(([], []))
    for env in range(num_envs):
        obs, rewards = episodes[env][-1]
        if rewards:
            finished.append((env, obs, rewards, blocks[-1].last_obs[env].tolist()))
    return sorted(finished)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_blocks_and_files_give_the_same_episodes_back(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("d") / "d"
    num_envs = data.draw(st.integers(1, 3))
    rows_per_file = data.draw(st.integers(1, 12))
    file_format = data.draw(st.sampled_from(["parquet", "arrow"]))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    blocks = []
    for steps in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)):
        shape = (num_envs, steps)
        blocks.append(
            ColumnBlock(
                obs=generator.standard_normal((*shape, 2), dtype=np.float32),
                action=generator.standard_normal((*shape, 1), dtype=np.float32),
                log_prob=generator.standard_normal(shape, dtype=np.float32),
                reward=generator.standard_normal(shape, dtype=np.float32),
                terminated=generator.random(shape) < 0.3,
                truncated=generator.random(shape) < 0.2,
                final_obs=generator.standard_normal((*shape, 2), dtype=np.float32),
                last_obs=generator.standard_normal((num_envs, 2), dtype=np.float32),
                version=1,
            )
        )
    own = writer(path, file_format=file_format, rows_per_file=rows_per_file, num_envs=num_envs)
    for one in blocks:
        own.take(one)
    own.close()
    dataset = open_dataset(path)
    found = sorted(
        (each.env, each.obs[:-1].tolist(), each.rewards.tolist(), each.obs[-1].tolist())
        for each in dataset.episodes()
    )
    assert found == reference(blocks, num_envs)
    numbers = [each.number for each in dataset.episodes()]
    assert len(set(numbers)) == len(numbers)
    obs = np.concatenate([one.obs.reshape(-1, 2) for one in blocks]).astype(np.float64)
    summary = dataset.statistics.summary()
    assert summary["rows"] == dataset.arrow().count_rows() == len(obs)
    assert summary["obs_mean"] == pytest.approx(obs.mean(axis=0))
    assert summary["obs_std"] == pytest.approx(obs.std(axis=0), abs=1e-9)


def test_environments_of_two_gmis_and_a_second_session_have_numbers_of_their_own(tmp_path):
    path = tmp_path / "d"
    for gmi in range(2):
        own = writer(path, gmi=gmi, first_env_index=2 * gmi, total_envs=4)
        own.take(block([[0, 1, 1], [0, 0, 0]]))
        own.close()
    first = DatasetFolder.open(path).statistics().last_episode
    # The GMI of environments 2 and 3: episodes 2 and 6 of environment 2 (10 has no row yet), and 3.
    assert first == 6
    own = writer(path, session=1, first_episode=first + 1)
    own.take(block([[0, 1, 0], [0, 0, 0]]))
    own.close()
    numbers = [episode.number for episode in open_dataset(path).episodes()]
    assert sorted(numbers) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert open_dataset(path).files[-1].path.name == "s001-g000-00000.parquet"


def test_a_manifest_line_without_its_file_and_a_partial_line_are_ignored(tmp_path):
    own = writer(tmp_path / "d", rows_per_file=2)
    own.take(block([[0, 0], [0, 0]]))
    own.close()
    folder = DatasetFolder.open(tmp_path / "d")
    manifest = folder.path / "manifest.jsonl"
    kept, lost = (json.loads(line) for line in manifest.read_text().splitlines() if line)
    with manifest.open("a") as file:
        file.write('\n{"file": "s000-g000-00009.parquet", "ro')
    (folder.data / lost["file"]).unlink()
    (folder.data / ".s000-g000-00009.parquet.unfinished").write_bytes(b"PAR1")
    assert [file.path.name for file in folder.files()] == [kept["file"]]
    assert open_dataset(folder.path).arrow().count_rows() == 2
    assert pyarrow.dataset.dataset(folder.data).count_rows() == 2  # the unfinished one is ignored
    with folder.being_written():
        # A writer may still be using it, and its last episodes are not counted yet.
        with pytest.raises(
            DatasetError, match="writers of a process that was killed still complete their files"
        ):
            folder.lock()
        assert len(list(folder.data.glob(".*"))) == 1
    folder.lock()
    folder.unlock()
    assert sorted(path.name for path in folder.data.iterdir()) == [kept["file"]]


def test_a_file_that_is_missing_before_others_of_its_writer_is_damage(tmp_path):
    """The rows of an episode before and after it would be joined."""
    own = writer(tmp_path / "d", rows_per_file=2, num_envs=1)
    own.take(block([[0, 0, 0, 0, 1]]))
    own.close()
    first, middle, last = sorted((tmp_path / "d" / "data").iterdir())
    dataset = open_dataset(tmp_path / "d")
    assert [len(each.rewards) for each in dataset.episodes()] == [5]
    middle.rename(tmp_path / "elsewhere")
    with pytest.raises(
        DatasetError, match=r"data/s000-g000-00001\.parquet is missing: copy the whole folder"
    ):
        open_dataset(tmp_path / "d")
    last.unlink()
    (tmp_path / "elsewhere").rename(middle)
    # Its last may have had no name yet: the episode ends where the next observation is known.
    (episode,) = open_dataset(tmp_path / "d").episodes()
    assert episode.obs[:, 0].tolist() == [0, 1, 2, 3]
    assert first.exists()


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_a_damaged_file_is_named(tmp_path, file_format):
    own = writer(tmp_path / "d", file_format=file_format)
    own.take(block([[0, 1], [0, 0]]))
    own.close()
    (file,) = (tmp_path / "d" / "data").iterdir()
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(
        DatasetError, match=rf"d: data/{file.name} cannot be read \(Arrow\w*: .*\): is it whole\?"
    ):
        list(open_dataset(tmp_path / "d").episodes())


def test_folders_that_are_no_dataset_or_not_free_are_refused(tmp_path):
    with pytest.raises(DatasetError, match=r"not a dataset: it has no dataset\.json"):
        open_dataset(tmp_path)
    with pytest.raises(DatasetError, match="none: there is no such folder"):
        open_dataset(tmp_path / "none")
    description = Description(task="Task-v0", format="parquet", layout=CONTINUOUS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(DatasetError, match="exists already and is no dataset; choose another folder"):
        DatasetFolder.create(tmp_path / "mine", description)
    folder = DatasetFolder.create(tmp_path / "d", description)
    with pytest.raises(DatasetError, match="holds a dataset already; add to it with --append"):
        DatasetFolder.create(tmp_path / "d", description)
    assert DatasetFolder.open(folder.path).description == description
    stored = json.loads((folder.path / "dataset.json").read_text())
    (folder.path / "dataset.json").write_text(json.dumps({**stored, "layout": 99}))
    with pytest.raises(DatasetError, match="has layout 99; this version of rayagi reads 1"):
        DatasetFolder.open(folder.path)
    (folder.path / "dataset.json").write_text(json.dumps({**stored, "action": {"low": []}}))
    with pytest.raises(DatasetError, match=r"dataset\.json is damaged"):
        DatasetFolder.open(folder.path)


def test_two_cannot_serve_into_one_dataset(tmp_path):
    description = Description(task="Task-v0", format="parquet", layout=CONTINUOUS)
    folder = DatasetFolder.create(tmp_path / "d", description)
    folder.lock()
    other = DatasetFolder.open(tmp_path / "d")
    with pytest.raises(DatasetError, match="another process is serving into it"):
        other.lock()
    folder.unlock()
    other.lock()
    other.unlock()


def test_null_observations_take_no_space_in_parquet(tmp_path):
    """final_obs is null except at ends of episodes: a column of nulls takes almost no space."""
    own = writer(tmp_path / "d", num_envs=1)
    for _ in range(8):
        own.take(block([[0] * 64]))
    own.close()
    (path,) = (tmp_path / "d" / "data").glob("*.parquet")
    metadata = pyarrow.parquet.ParquetFile(path).metadata
    columns = [metadata.row_group(0).column(place) for place in range(metadata.num_columns)]
    sizes = {column.path_in_schema.split(".")[0]: column.total_uncompressed_size for column in columns}
    assert sizes["final_obs"] < sizes["obs"] / 10
