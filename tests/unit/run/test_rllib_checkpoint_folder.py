"""The folder of an RLlib checkpoint: what was there stays until the new one is complete."""

import os
import resource
import signal
import subprocess
import sys
import textwrap

import pyarrow.fs
import pytest

from rayagi.rllib_run import replaced_checkpoint
from rayagi.run.errors import DiskError

LOCAL = pyarrow.fs.LocalFileSystem()


def write(folder, number, size=10):
    """A checkpoint as RLlib and rayagi lay it out, with its number in every file."""
    run = folder / "checkpoints" / f"iteration_{number:06d}"
    run.mkdir(parents=True)
    for file in (folder / "algorithm_state.pkl", run / "shared.pt", folder / "checkpoints" / "last.json"):
        file.write_text(str(number) * size)


def save(path, filesystem, number, size=10, error=None):
    with replaced_checkpoint(path, filesystem) as folder:
        write(folder, number, size)
        if error is not None:
            raise error


def numbers(folder):
    """Each file, and the number in it."""
    return {
        file.relative_to(folder).as_posix(): file.read_text()[:1]
        for file in folder.rglob("*")
        if file.is_file()
    }


def of(number):
    return {
        "algorithm_state.pkl": str(number),
        "checkpoints/last.json": str(number),
        f"checkpoints/iteration_{number:06d}/shared.pt": str(number),
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
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], env=os.environ, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(".unfinished_*")
    assert numbers(tmp_path) == of(1) | {f"{left.name}/algorithm_state.pkl": "2"}
    save(str(tmp_path), LOCAL, 3)
    assert numbers(tmp_path) == of(3)
