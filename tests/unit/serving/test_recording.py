"""The real writer process: its channel, a full disk, and killed processes."""

import os
import resource
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow.compute
import pyarrow.dataset
import pytest
import torch

from actors.protocols import ActionSpec, StepResult
from rayagi.run.errors import DiskError
from rayagi.serving.column_layout import ColumnLayout
from rayagi.serving.dataset import open_dataset
from rayagi.serving.errors import WriterError
from rayagi.serving.manifest import DatasetFolder, Description
from rayagi.serving.program import Recording
from rayagi.serving.recording import ChannelSink
from rayagi.serving.writer_process import WriterJob
from tests.waiting import until

LAYOUT = ColumnLayout(
    obs_dim=3, action=ActionSpec(kind="continuous", dim=2, low=(-1.0, -1.0), high=(1.0, 1.0))
)
ENVS, STEPS = 2, 4


def sink(path, *, rows_per_file=10**6):
    DatasetFolder.create(path, Description(task="Task-v0", format="parquet", layout=LAYOUT))
    recording = Recording(
        folder=str(path),
        format="parquet",
        session=0,
        first_episode=0,
        rows_per_file=rows_per_file,
        bytes_per_file=10**9,
    )
    job = WriterJob(
        recording=recording,
        layout=LAYOUT,
        gmi=3,
        num_envs=ENVS,
        first_env_index=0,
        total_envs=ENVS,
        num_steps=STEPS,
    )
    return ChannelSink(job, version=5)


def step(number, *, ends=()):
    """Step ``number`` of both environments: rewards and observations identify it."""
    flags = torch.tensor([env in ends for env in range(ENVS)])
    ids = flags.nonzero().flatten()
    return StepResult(
        obs=torch.full((ENVS, 3), float(number + 1)),
        rewards=torch.full((ENVS,), float(number)),
        terminated=flags,
        truncated=torch.zeros(ENVS, dtype=torch.bool),
        final_ids=ids,
        final_obs=torch.full((len(ids), 3), 1000.0 + number),
    )


def feed(own, numbers, ends=lambda number: ()):
    for number in numbers:
        actions, log_probs = (
            torch.full((ENVS, 2), number / 10 - 1.05),
            torch.tensor([-number / 2, number / 4]),
        )
        own.record_actions(torch.full((ENVS, 3), float(number)), actions, log_probs)
        own.record_step(step(number, ends=ends(number)))


def test_every_step_is_written_once_in_order_with_what_came_after(tmp_path):
    own = sink(tmp_path / "d")
    feed(own, range(10), ends=lambda number: (1,) if number == 6 else ())
    own.close(60.0)
    own.close(60.0)  # safe to call twice
    episodes = {episode.number: episode for episode in open_dataset(tmp_path / "d").episodes()}
    assert sorted(episodes) == [0, 1, 3]
    assert episodes[0].rewards.tolist() == list(range(10))
    assert episodes[0].obs[:, 0].tolist() == list(range(11))
    assert episodes[0].policy_versions.tolist() == [5] * 10
    assert episodes[0].log_probs.tolist() == [-number / 2 for number in range(10)]
    # What the simulator would use: clipped to the range.
    assert episodes[0].actions[:, 0] == pytest.approx(
        [-1.0, *(number / 10 - 1.05 for number in range(1, 10))]
    )
    assert (episodes[1].rewards.tolist(), episodes[1].terminated) == (list(range(7)), True)
    assert episodes[1].obs[:, 1].tolist() == [*range(7), 1006]
    assert episodes[3].rewards.tolist() == [7, 8, 9]


def test_a_full_disk_stops_it_and_leaves_what_was_complete(tmp_path):
    own = sink(tmp_path / "d", rows_per_file=16)
    folder = DatasetFolder.open(tmp_path / "d")
    # Six blocks of eight rows: the writer holds the last one back, so two files are complete, and eight rows are not.
    feed(own, range(6 * STEPS))
    until(lambda: len(folder.files()) == 2)
    # From here on, no file of the writer can grow past a size that every file of sixteen rows has.
    resource.prlimit(own.writer_pid, resource.RLIMIT_FSIZE, (2000, 2000))
    with pytest.raises(
        DiskError, match="File too large; free space there, or serve to another folder"
    ) as error:
        feed(own, range(6 * STEPS, 1000 * STEPS))
    assert error.value.path.startswith(str(folder.data))
    with pytest.raises(WriterError):  # it has ended
        own.close(60.0)
    assert folder.wait_for_writers(30.0)
    names = [file.path.name for file in folder.files()]
    assert sorted(path.name for path in folder.data.iterdir()) == names
    assert len(names) == 2
    table = pyarrow.dataset.dataset(folder.data).to_table()
    assert table.filter(pyarrow.compute.field("env") == 0)["reward"].to_pylist() == list(range(4 * STEPS))


def test_a_killed_writer_is_detected_and_named(tmp_path):
    own = sink(tmp_path / "d")
    feed(own, range(STEPS))
    os.kill(own.writer_pid, signal.SIGKILL)
    with pytest.raises(WriterError, match="writer of GMI 3 ended unexpectedly: it was killed"):
        feed(own, range(1000 * STEPS))


def test_a_non_finite_value_ends_it_and_earlier_rows_are_kept(tmp_path):
    own = sink(tmp_path / "d")
    feed(own, range(2 * STEPS))
    own.record_actions(
        torch.tensor([[0.0, 0.0, 0.0], [0.0, float("nan"), 0.0]]), torch.zeros(ENVS, 2), torch.zeros(ENVS)
    )
    own.record_step(step(2 * STEPS))
    with pytest.raises(
        WriterError, match="an observation of environment 1 is NaN or infinite: check the envir"
    ):
        own.close(60.0)
    episodes = list(open_dataset(tmp_path / "d").episodes())
    assert [episode.rewards.tolist() for episode in episodes] == [list(range(2 * STEPS))] * ENVS


@pytest.mark.slow
def test_a_missing_folder_is_an_error_at_setup(tmp_path, monkeypatch):
    """As on another host, where the path means something else."""
    monkeypatch.setattr(DatasetFolder, "create", lambda path, description: None)
    with pytest.raises(
        WriterError, match=r"writer of GMI 3 failed with DatasetError: .* there is no such folder"
    ):
        sink(tmp_path / "d")


def test_batches_committed_by_a_killed_gmi_are_written(tmp_path):
    code = """
        import os, pathlib, signal, sys
        sys.path.insert(0, sys.argv[1])
        import test_recording as module
        own = module.sink(pathlib.Path(sys.argv[2]))
        module.feed(own, range(module.STEPS))
        assert own._ring.drain(60.0) == 0                # the writer has found it
        module.feed(own, range(module.STEPS, 3 * module.STEPS + 2))   # two more blocks, and one that is not full
        os.kill(os.getpid(), signal.SIGKILL)
    """
    path = tmp_path / "d"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), os.path.dirname(__file__), str(path)],
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    folder = DatasetFolder.open(path)
    until(lambda: folder.files())
    episodes = list(open_dataset(path).episodes())
    assert [episode.rewards.tolist() for episode in episodes] == [list(range(3 * STEPS))] * ENVS
    assert np.all(episodes[0].obs[-1] == 3 * STEPS)
