import errno
import fcntl
import json
import os

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rayagi.config.errors import ConfigError
from rayagi.run.csv_log import read_rows
from rayagi.run.errors import DiskError, RunFolderError, RunVersionError
from rayagi.run.folder import create_run, open_run
from rayagi.run.limits import Position
from rayagi.run.recorders import FileRecorder

AT_2 = Position(
    iteration=2, env_steps=20, train_s=2.0, evaluation_return=None, training_return=None, training_episodes=0
)


def make(tmp_path, **options):
    return create_run(tmp_path / "runs", "Ant-v5", seed=3, rayagi_version="0.1.0", **options)


def test_a_new_run_is_named_by_task_date_and_time(tmp_path):
    folder = make(tmp_path)
    assert folder.path.name.startswith("Ant-v5-20")
    assert open_run(folder.path).record.seed == 3


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(tmp_path):
    paths = {make(tmp_path).path for _ in range(4)}
    assert len(paths) == 4


def test_a_task_with_slashes_still_makes_one_folder(tmp_path):
    folder = create_run(tmp_path, "ALE/Pong-v5", seed=0, rayagi_version="0.1.0")
    assert folder.path.parent == tmp_path
    assert folder.path.name.startswith("ALE_Pong-v5-")


def test_a_given_name_is_not_taken_twice(tmp_path):
    make(tmp_path, name="mine")
    with pytest.raises(RunFolderError, match="exists already; choose another --name"):
        make(tmp_path, name="mine")


def test_a_run_of_another_layout_is_refused_with_both_versions(tmp_path):
    folder = make(tmp_path)
    stored = json.loads((folder.path / "run.json").read_text())
    stored |= {"schema_version": 7, "rayagi_version": "9.0"}
    (folder.path / "run.json").write_text(json.dumps(stored))
    with pytest.raises(
        RunVersionError, match=r"layout 7, written by rayagi 9\.0; this version reads layout 1"
    ):
        open_run(folder.path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 1}', "null", "[" * 100_000])
def test_a_damaged_run_json_is_an_error_that_names_it(tmp_path, content):
    folder = make(tmp_path)
    (folder.path / "run.json").write_text(content)
    with pytest.raises((RunFolderError, RunVersionError), match=str(folder.path)):
        open_run(folder.path)


@pytest.mark.parametrize("content", ["[]", "null", "3"])
def test_a_run_json_without_an_object_is_no_run_of_another_version(tmp_path, content):
    folder = make(tmp_path)
    (folder.path / "run.json").write_text(content)
    with pytest.raises(RunFolderError, match="damaged: it has no object; restore it from a copy"):
        open_run(folder.path)


@pytest.mark.parametrize("name", ["run.json", "progress.csv", "checkpoints/last.json"])
def test_a_pipe_in_a_run_folder_is_named_and_not_waited_for(tmp_path, name):
    folder = make(tmp_path)
    (folder.path / "checkpoints").mkdir(exist_ok=True)
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)
    with pytest.raises(RunFolderError, match=f"{name}: is a pipe, a device or a socket"):
        open_run(folder.path)


def test_a_folder_that_is_no_run_says_which_runs_are_near(tmp_path):
    folder = make(tmp_path, name="there")
    with pytest.raises(RunFolderError, match=f"no such run folder; runs there: {folder.path}"):
        open_run(tmp_path / "runs" / "missing")
    with pytest.raises(RunFolderError, match=r"it has no run\.json"):
        open_run(tmp_path / "runs")


def test_two_processes_cannot_write_to_one_run(tmp_path):
    folder = make(tmp_path)
    other = open_run(folder.path)
    with pytest.raises(RunFolderError, match="another process is training this run"):
        other.lock()
    folder.unlock()
    other.lock()


def test_the_lock_shows_whether_a_run_is_being_trained(tmp_path):
    folder = make(tmp_path)
    other = open_run(folder.path)
    assert folder.is_locked()
    assert other.is_locked()
    folder.unlock()
    assert not other.is_locked()
    other.lock()  # is_locked left no lock behind


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])  # of NFS and of Lustre without locks
def test_a_file_system_without_locks_is_said_and_no_folder_is_left(tmp_path, monkeypatch, number):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        DiskError, match=f"{os.strerror(number)}; choose a folder whose file system has locks"
    ):
        make(tmp_path)
    assert list((tmp_path / "runs").iterdir()) == []


def test_numbers_in_a_configuration_are_read_as_everywhere_else(tmp_path):
    folder = make(tmp_path)
    (folder.path / "config.yaml").write_text("ppo: {learning_rate: 3e-4}\n")
    assert folder.read_config() == {"ppo": {"learning_rate": 0.0003}}
    (folder.path / "config.yaml").write_text("seed: 1\nseed: 2\n")
    with pytest.raises(RunFolderError, match="'seed' is given twice"):
        folder.read_config()
    (folder.path / "config.yaml").write_text("env: 3\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: env = 3: must be a mapping"):
        folder.read_spec(trust_modules=False)
    (folder.path / "config.yaml").write_bytes(b"seed: \xff\n")
    with pytest.raises(RunFolderError, match=r"config\.yaml cannot be read"):
        folder.read_config()


def test_updates_are_atomic(tmp_path):
    folder = make(tmp_path)
    folder.update(status="finished", reason="5 min of training done")
    assert open_run(folder.path).record.status == "finished"
    assert not [entry for entry in folder.path.iterdir() if entry.name.endswith(".tmp")]


def test_reward_terms_become_columns_and_tensorboard_tags_when_they_appear_and_after_a_resume(tmp_path):
    folder = make(tmp_path)
    files = FileRecorder(folder)
    files.iterated([{"iteration": 1, "env_steps_total": 10, "train_s": 1}], AT_2)
    terms = {"reward_up": 3.5, "reward_effort": -0.25}
    files.iterated([{"iteration": i, "env_steps_total": 10 * i, "train_s": 1, **terms} for i in (2, 3)], AT_2)
    files.close()
    resumed = FileRecorder(folder, resumed_at=AT_2)
    resumed.iterated([{"iteration": 3, "env_steps_total": 30, "train_s": 1}], AT_2)
    resumed.iterated(
        [{"iteration": 4, "env_steps_total": 40, "train_s": 1, "reward_up": 7.0, "reward_new": 1.0}], AT_2
    )
    resumed.close()
    names = ("iteration", "reward_up", "reward_effort", "reward_new")
    rows = [tuple(row.get(name) for name in names) for row in read_rows(folder.progress_csv)]
    assert rows == [(1, None, None, None), (2, 3.5, -0.25, None), (3, None, None, None), (4, 7.0, None, 1.0)]
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/reward_up")] == [(20, 3.5), (40, 7.0)]


def test_tensorboard_has_histograms_of_replays(tmp_path):
    folder = make(tmp_path)
    files = FileRecorder(folder)
    counts = [0] * 64
    counts[0], counts[2], counts[3] = 5, 4, 2  # of values of at most 0, of 2 to 3, and of 4 to 7
    row = {"iteration": 1, "env_steps_total": 10}
    files.counted({"replay_staleness": counts, "replay_times_sampled": [0] * 64}, row)
    files.counted({"replay_age": [0] * 30 + [7] + [0] * 33}, {"iteration": 2, "env_steps_total": None})
    files.close()
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["histograms"]) == {"replay/staleness", "replay/age_s"}
    (staleness,), (age,) = events.Histograms("replay/staleness"), events.Histograms("replay/age_s")
    assert (staleness.step, age.step) == (10, 2)
    found = staleness.histogram_value
    assert (found.min, found.max, found.num) == (0, 8, 11)
    assert (found.bucket_limit, found.bucket) == ([1, 2, 4, 8], [5, 0, 4, 2])
    assert found.sum == 4 * 3 + 2 * 6
    assert age.histogram_value.bucket == [7]
    assert (age.histogram_value.min, age.histogram_value.max) == pytest.approx((2**29 * 1e-9, 2**30 * 1e-9))


def test_a_rewound_run_has_no_later_rows(tmp_path):
    folder = make(tmp_path)
    files = FileRecorder(folder)
    files.iterated([{"iteration": i, "env_steps_total": 10 * i, "train_s": 1} for i in (1, 2, 3, 4)], AT_2)
    files.evaluated({"iteration": 3, "env_steps_total": 30, "train_s": 1}, best=True)
    files.rewound(AT_2)
    files.iterated([{"iteration": 3, "env_steps_total": 31, "train_s": 1}], AT_2)
    files.close()
    rows = [(row["iteration"], row["env_steps_total"]) for row in read_rows(folder.progress_csv)]
    assert rows == [(1, 10), (2, 20), (3, 31)]
    assert read_rows(folder.evaluations_csv) == []
