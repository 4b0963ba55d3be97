"""The folder of an RLlib checkpoint: what was there stays until the new one is complete."""

import itertools
import logging
import os
import resource
import shutil
import signal
from functools import partial

import pyarrow.fs
import pytest

from rayagi.rllib_run import replaced_checkpoint
from rayagi.run.atomic import complete_run
from rayagi.run.errors import DiskError, RunFolderError
from rayagi.run.folder import complete_interrupted_save
from tests.kills import dies_before_change
from tests.programs import run_python

LOCAL = pyarrow.fs.LocalFileSystem()


def write(folder, number, size=10, iteration=None):
    """A checkpoint as RLlib and rayagi lay it out, with its number in every file."""
    run = folder / "checkpoints" / f"iteration_{iteration or number:06d}"
    run.mkdir(parents=True)
    of_rllib = (folder / "algorithm_state.pkl", folder / "rllib_checkpoint.json")
    for file in (*of_rllib, run / "shared.pt", folder / "checkpoints" / "last.json"):
        file.write_text(str(number) * size)


def save(path, filesystem, number, size=10, error=None, iteration=None):
    with replaced_checkpoint(path, filesystem) as folder:
        write(folder, number, size, iteration)
        if error is not None:
            raise error


def numbers(folder):
    """Each file, and the number in it."""
    return {
        file.relative_to(folder).as_posix(): file.read_text()[:1]
        for file in folder.rglob("*")
        if file.is_file()
    }


def of(number, iteration=None):
    return {
        "algorithm_state.pkl": str(number),
        "rllib_checkpoint.json": str(number),
        "checkpoints/last.json": str(number),
        f"checkpoints/iteration_{iteration or number:06d}/shared.pt": str(number),
    }


@pytest.mark.parametrize("is_local", [True, False])
def test_a_checkpoint_replaces_the_one_before_it_and_nothing_else(tmp_path, is_local):
    out = tmp_path / "a" / "out"
    filesystem, path = (
        (LOCAL, str(out)) if is_local else (pyarrow.fs.SubTreeFileSystem(str(tmp_path), LOCAL), "a/out")
    )
    for number in (1, 2, 2):
        save(path, filesystem, number)
        assert numbers(out) == of(number) | ({"notes": "m"} if number == 2 else {})
        (out / "notes").write_text("mine")
    assert [each.name for each in out.iterdir() if each.name[0] == "."] == []


@pytest.mark.parametrize("is_local", [True, False])
def test_files_of_somebody_else_are_not_replaced(tmp_path, is_local):
    """A folder of the user's own, in which names happen to be those of a checkpoint."""
    filesystem, path = (
        (LOCAL, str(tmp_path)) if is_local else (pyarrow.fs.SubTreeFileSystem(str(tmp_path), LOCAL), "")
    )
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.pt").write_text("mine")
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(
        RunFolderError, match="has checkpoints, which a checkpoint would replace, and is none"
    ):
        save(path, filesystem, 1)
    assert numbers(tmp_path) == {"checkpoints/best.pt": "m", "notes": "m"}


def test_a_folder_that_was_made_for_a_save_that_failed_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError):
        save(str(tmp_path / "new"), LOCAL, 1, error=ZeroDivisionError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_local", [True, False])
def test_a_failure_leaves_the_checkpoint_before_it(tmp_path, is_local):
    filesystem, path = (
        (LOCAL, str(tmp_path)) if is_local else (pyarrow.fs.SubTreeFileSystem(str(tmp_path), LOCAL), "")
    )
    write(tmp_path, 1)
    with pytest.raises(ZeroDivisionError):
        save(path, filesystem, 2, error=ZeroDivisionError)
    assert numbers(tmp_path) == of(1)


def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_before_it(tmp_path):
    write(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(DiskError, match=r"File too large; free space there, or save to another folder"):
            save(str(tmp_path), LOCAL, 2, size=2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert numbers(tmp_path) == of(1)


def test_a_killed_process_leaves_the_checkpoint_before_it_and_the_next_one_tidies_up(tmp_path):
    write(tmp_path, 1)
    program = """
        import os, signal, sys, pyarrow.fs
        from rayagi.rllib_run import replaced_checkpoint
        with replaced_checkpoint(sys.argv[1], pyarrow.fs.LocalFileSystem()) as folder:
            (folder / "algorithm_state.pkl").write_text("2")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = run_python(program, tmp_path, env=os.environ, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(".unfinished_*")
    assert numbers(tmp_path) == of(1) | {f"{left.name}/algorithm_state.pkl": "2"}
    save(str(tmp_path), LOCAL, 3)
    assert numbers(tmp_path) == of(3)


@pytest.mark.parametrize("iteration", [None, 7], ids=["a later iteration", "the same iteration"])
def test_killed_at_any_change_of_a_name_the_old_checkpoint_or_the_new_one_is_whole(tmp_path, iteration):
    found = []
    for num_changes in itertools.count():
        out = tmp_path / str(num_changes)
        save(str(out), LOCAL, 1, iteration=iteration)
        (out / "notes").write_text("mine")
        again = partial(save, str(out), LOCAL, 2, iteration=iteration)
        is_killed = dies_before_change(num_changes, again)
        complete_run(out)
        assert complete_run(out) is False
        there = {name: of for name, of in numbers(out).items() if not name.startswith(".unfinished_")}
        (whole,) = (number for number in (1, 2) if there == of(number, iteration) | {"notes": "m"})
        found.append(whole)
        if not is_killed:
            break
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 2)
    assert len(found) > 10


def test_who_opens_a_checkpoint_whose_save_was_interrupted_is_told_in_a_sentence(tmp_path, caplog):
    write(tmp_path, 1)
    write(tmp_path / ".ready", 2)
    (tmp_path / ".ready" / ".kept").write_text('["iteration_000002", "last.json"]')
    with caplog.at_level(logging.WARNING):
        complete_interrupted_save(tmp_path)
        complete_interrupted_save(tmp_path)
    assert caplog.messages == [
        f"{tmp_path}: the last save was interrupted while it replaced files; it is complete now"
    ]
    assert numbers(tmp_path) == of(2)


def test_one_that_cannot_be_completed_is_a_sentence(tmp_path):
    write(tmp_path / ".ready", 2)
    (tmp_path / "algorithm_state.pkl").mkdir()
    with pytest.raises(DiskError, match=r"algorithm_state.pkl.*interrupted and has to be completed"):
        complete_interrupted_save(tmp_path)


@pytest.mark.parametrize("link", ["checkpoints", ".ready", "notes"])
def test_a_run_folder_of_somebody_else_does_not_reach_out_of_itself(tmp_path, link):
    """Whoever opens it would move or remove his own files."""
    run, mine = tmp_path / "run", tmp_path / "mine"
    write(run, 1)
    write(mine, 3)
    write(run / ".ready", 2)
    (run / ".ready" / "notes").mkdir()
    (run / ".ready" / "notes" / "own").write_text("2")
    (run / ".ready" / ".kept").write_text("[]")
    if (run / link).exists():
        shutil.rmtree(run / link)
    (run / link).symlink_to(mine)
    before = numbers(run), numbers(mine)
    with pytest.raises(RunFolderError, match=rf"{link}.* leads out of the run folder"):
        complete_interrupted_save(run)
    assert (numbers(run), numbers(mine)) == before


@pytest.mark.parametrize("kept", ["", "{", '"iteration_000002"', "[1]"])
def test_a_damaged_list_of_what_is_kept_is_a_sentence_and_changes_nothing(tmp_path, kept):
    write(tmp_path, 1)
    write(tmp_path / ".ready", 2)
    (tmp_path / ".ready" / ".kept").write_text(kept)
    before = numbers(tmp_path)
    with pytest.raises(
        RunFolderError, match=r"\.kept: is damaged: remove this folder to use the checkpoint of before"
    ):
        complete_interrupted_save(tmp_path)
    assert numbers(tmp_path) == before
