import itertools
import json
import os
import resource
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from rayagi.run.checkpoints import CheckpointStore, load_tensors
from rayagi.run.errors import CheckpointError, DiskError, NoCheckpointError
from tests.kills import dies_before_change
from tests.programs import run_python


def save(store, iteration, best=None):
    state = {
        "shared": {"weights": torch.full((3,), float(iteration)), "rng": torch.get_rng_state()},
        "local": [
            {
                "qpos": np.full(4, iteration, dtype=np.float64),
                "episode": np.int64(iteration),
                "act": np.zeros((2, 0)),
            }
        ],
        "num_gmis": 1,
    }
    counters = {"iteration": iteration, "env_steps": 64 * iteration}
    return store.save(state, counters, best=None if best is None else {"metric": "return", "value": best})


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "run" / "checkpoints")


def test_a_state_comes_back_exactly(store):
    assert save(store, 3) == "iteration_000003"
    checkpoint = store.load()
    assert torch.equal(checkpoint.state["shared"]["weights"], torch.full((3,), 3.0))
    np.testing.assert_array_equal(checkpoint.state["local"][0]["qpos"], np.full(4, 3.0))
    assert checkpoint.state["num_gmis"] == 1
    assert checkpoint.counters == {"iteration": 3, "env_steps": 192}


def test_the_best_and_the_last_two_are_kept(store):
    for iteration in range(1, 7):
        save(store, iteration, best=9.0 if iteration == 2 else None)
    assert store.names() == ["iteration_000002", "iteration_000005", "iteration_000006"]
    assert store.pointer("best") == {"checkpoint": "iteration_000002", "metric": "return", "value": 9.0}
    assert store.pointer("last") == {"checkpoint": "iteration_000006"}


def test_json_that_is_nested_too_deeply_is_damaged(store, tmp_path):
    save(store, 1)
    save(store, 2, best=1.0)
    folder = tmp_path / "run" / "checkpoints"
    for path in (folder / "best.json", folder / "iteration_000002" / "manifest.json"):
        path.write_text("[" * 100_000)
    assert store.pointer("best") is None
    assert store.load().name == "iteration_000001"


def test_a_policy_is_read_without_the_environments(store):
    save(store, 1)
    assert set(store.load("best", with_local=False).state) == {"shared", "num_gmis"}


@pytest.mark.parametrize("file", ["shared.pt", "local.pt", "counters.json", "manifest.json"])
def test_a_truncated_checkpoint_falls_back_to_the_one_before_with_a_message(store, tmp_path, file):
    save(store, 1)
    save(store, 2)
    damaged = tmp_path / "run" / "checkpoints" / "iteration_000002" / file
    os.truncate(damaged, damaged.stat().st_size // 2)
    checkpoint = store.load()
    assert checkpoint.name == "iteration_000001"
    assert len(checkpoint.damaged) == 1
    assert "iteration_000002 is damaged" in checkpoint.damaged[0]
    assert file in checkpoint.damaged[0]


def test_a_flipped_byte_is_detected(store, tmp_path):
    save(store, 1)
    path = tmp_path / "run" / "checkpoints" / "iteration_000001" / "shared.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(NoCheckpointError, match="does not match its checksum"):
        store.load()


def test_a_missing_checkpoint_says_which_there_are(store):
    save(store, 5)
    with pytest.raises(NoCheckpointError, match="'iteration_000009'; usable ones: iteration_000005"):
        store.load("iteration_000009")


def test_a_crash_between_write_and_rename_leaves_the_one_before(store, tmp_path):
    save(store, 1)
    # The state of a process killed before the rename: complete content under the temporary name.
    folder = tmp_path / "run" / "checkpoints"
    unfinished = folder / ".iteration_000002.4711"
    unfinished.mkdir()
    (unfinished / "shared.pt").write_bytes(b"half")
    assert store.names() == ["iteration_000001"]
    assert store.load().name == "iteration_000001"
    store.rewind(1)
    assert not unfinished.exists()
    assert save(store, 2) == "iteration_000002"
    assert store.load().name == "iteration_000002"


def test_a_killed_writer_leaves_the_one_before(store, tmp_path):
    save(store, 1)
    code = """
        import os, pathlib, sys, torch
        from rayagi.run import checkpoints
        # Dies where a power cut hurts most: everything is written, nothing renamed.
        checkpoints.sync_path = lambda folder: os.kill(os.getpid(), 9)
        store = checkpoints.CheckpointStore(pathlib.Path(sys.argv[1]))
        store.save({"shared": {"w": torch.ones(2)}, "local": [], "num_gmis": 1}, {"iteration": 2})
    """
    folder = tmp_path / "run" / "checkpoints"
    done = run_python(code, folder, check=False)
    assert done.returncode == -9
    assert len(list(folder.glob(".iteration_000002.*"))) == 1
    assert store.load().name == "iteration_000001"
    assert store.pointer("last") == {"checkpoint": "iteration_000001"}


def test_killed_at_any_change_of_a_name_a_whole_checkpoint_is_the_last_and_one_is_the_best(tmp_path):
    last, best = [], []
    for num_changes in itertools.count():
        store = CheckpointStore(tmp_path / str(num_changes))
        for iteration in (1, 2, 3):
            save(store, iteration, best=1.0 if iteration == 1 else None)
        is_killed = dies_before_change(num_changes, partial(save, store, 4, best=4.0))
        last.append(store.load().name)
        best.append(store.load("best").name)
        store.rewind(int(last[-1][-1]))
        assert not list(tmp_path.glob("*/.iteration*"))
        save(store, 5)
        assert store.load().name == "iteration_000005"
        if not is_killed:
            break
    assert (last, best) == (sorted(last), sorted(best))
    assert (last[0], last[-1]) == ("iteration_000003", "iteration_000004")
    assert (best[0], best[-1]) == ("iteration_000001", "iteration_000004")
    assert len(last) > 10


def test_killed_at_any_change_of_a_name_a_rewound_run_has_the_checkpoint_that_it_goes_on_from(tmp_path):
    for num_changes in itertools.count():
        folder = tmp_path / str(num_changes)
        store = CheckpointStore(folder)
        for iteration in (3, 2, 3):  # the first has been set aside before
            save(store, iteration, best=float(iteration))
            if iteration == 2:
                (folder / "iteration_000003").rename(folder / "damaged_iteration_000003")
        (folder / "iteration_000003" / "shared.pt").write_bytes(b"half")
        is_killed = dies_before_change(num_changes, partial(store.rewind, 2))
        assert store.load().name == store.load("best").name == "iteration_000002"
        if not is_killed:
            break
    assert num_changes > 5


def test_a_full_disk_leaves_the_one_before_and_names_the_path(store, tmp_path):
    save(store, 1)
    code = """
        import pathlib, resource, sys, torch
        from rayagi.run.checkpoints import CheckpointStore
        from rayagi.run.errors import DiskError
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        store = CheckpointStore(pathlib.Path(sys.argv[1]))
        try:
            store.save({"shared": {"w": torch.ones(100_000)}, "local": [], "num_gmis": 1}, {"iteration": 2})
        except DiskError as error:
            print(error)
    """
    folder = tmp_path / "run" / "checkpoints"
    done = run_python(code, folder)
    assert f"cannot write {folder}" in done.stdout
    assert "File too large" in done.stdout
    assert store.load().name == "iteration_000001"
    assert not list(folder.glob(".iteration*"))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 20_000


def test_a_run_whose_folder_of_checkpoints_was_removed_saves_into_a_new_one(tmp_path):
    """A copy of a run may lack empty folders."""
    (tmp_path / "run").mkdir()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.rewind(-1)
    assert save(store, 1) == "iteration_000001"
    assert store.names() == ["iteration_000001"]


def test_a_folder_of_checkpoints_that_is_removed_while_it_is_used_is_not_made_anew(store, tmp_path):
    (tmp_path / "run").mkdir()
    store.rewind(-1)
    (tmp_path / "run" / "checkpoints").rmdir()
    with pytest.raises(
        DiskError, match="the folder that it belongs in is not there, or was removed or renamed"
    ):
        save(store, 1)


def test_rewinding_moves_later_checkpoints_aside(store, tmp_path):
    save(store, 1, best=1.0)
    save(store, 2, best=2.0)
    store.rewind(1)
    assert store.names() == ["iteration_000001"]
    assert store.pointer("best") is None
    assert (tmp_path / "run" / "checkpoints" / "damaged_iteration_000002").is_dir()


def test_an_untrusted_checkpoint_runs_no_code(tmp_path):
    import io

    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    buffer = io.BytesIO()
    torch.save({"shared": Evil()}, buffer)
    with pytest.raises(
        CheckpointError, match=r"shared\.pt cannot be read \(Trying to load unsupported GLOBAL posix\.system"
    ):
        load_tensors(buffer.getvalue(), tmp_path / "iteration_000001" / "shared.pt")


@pytest.mark.parametrize(
    "program", [b"\x80\x020.", b"\x80\x02h\x05.", b"\x80\x02\x86.", b"\x80\x02X", b"\x80\x02K\x05."]
)
def test_whatever_pickle_a_checkpoint_holds_it_is_said_to_be_damaged(program, tmp_path):
    """Pickle programs that pop from an empty stack, get what is not memorised, end early, or make a number."""
    import io
    import zipfile

    saved, changed = io.BytesIO(), io.BytesIO()
    torch.save({}, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            target.writestr(name, program if name.endswith("data.pkl") else source.read(name))
    for data in (changed.getvalue(), b"junk", b""):
        with pytest.raises(CheckpointError, match=r"shared\.pt cannot be read"):
            load_tensors(data, tmp_path / "iteration_000001" / "shared.pt")


def test_the_manifest_covers_every_file(store, tmp_path):
    save(store, 1)
    folder = tmp_path / "run" / "checkpoints" / "iteration_000001"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(listed) == {entry.name for entry in folder.iterdir()} - {"manifest.json"}


def replays(folder):
    """As a session of two GMIs, of which one has a replay."""
    (folder / "gmi_1").mkdir()
    (folder / "gmi_1" / "manifest").write_text("")
    return {1: ""}


def test_replays_are_part_of_a_checkpoint(store, tmp_path):
    state, folder = {"shared": {}, "local": [{}, {}], "num_gmis": 2}, tmp_path / "run" / "checkpoints"
    store.save(state, {"iteration": 1, "env_steps": 1}, save_replays=replays)
    found = store.load().state["replays"]
    assert found == {1: str(folder / "iteration_000001" / "replay" / "gmi_1")}
    store.save(state, {"iteration": 2, "env_steps": 2}, save_replays=lambda folder: {})
    assert store.load().state["replays"] == {}
    assert not (folder / "iteration_000002" / "replay").exists()
    store.save(state, {"iteration": 3, "env_steps": 3}, save_replays=replays)
    (folder / "iteration_000003" / "replay" / "gmi_1" / "manifest").unlink()
    assert "replay/gmi_1 is missing" in store.load().damaged[0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({0: "replay checkpoint x cannot be written (No space left on device)"}, "No space left on device"),
        (
            {0: ""},
            "the replay of GMI 0 is not there, since its host has another disk; choose a folder that all",
        ),
    ],
)
def test_a_replay_that_cannot_be_written_leaves_the_former_checkpoint(store, tmp_path, answer, message):
    save(store, 1)
    state = {"shared": {}, "local": [{}], "num_gmis": 1}
    with pytest.raises(DiskError, match=message):
        store.save(state, {"iteration": 2, "env_steps": 2}, save_replays=lambda folder: answer)
    assert store.names() == ["iteration_000001"]
    assert [entry.name for entry in (tmp_path / "run" / "checkpoints").glob(".*")] == []


def test_a_damaged_best_json_is_said_and_no_checkpoint_is_removed(store, tmp_path):
    save(store, 1, best=9.0)
    (tmp_path / "run/checkpoints/best.json").write_text('{"checkpoint": [')
    for iteration in range(2, 8):
        save(store, iteration)
    loaded = store.load("best")
    assert loaded.name == "iteration_000007"
    (reason,) = loaded.damaged
    assert reason.endswith("best.json is damaged, so the best checkpoint is not known")
    assert "iteration_000001" in store.names()
    assert store.load("last").damaged == ()


def test_the_replays_of_a_relative_folder_are_found_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(Path("runs/checkpoints"))
    store.save(
        {"shared": {}, "local": [{}, {}], "num_gmis": 2},
        {"iteration": 1, "env_steps": 1},
        save_replays=replays,
    )
    assert store.load().state["replays"] == {
        1: str(tmp_path / "runs/checkpoints/iteration_000001/replay/gmi_1")
    }
