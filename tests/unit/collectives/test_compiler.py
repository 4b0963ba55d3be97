"""The system's compiler: messages, a limit, a cache."""

import os
import re
import stat
import tempfile

import pytest

from collectives import compiler
from collectives.compiler import CompilerError, is_private_file, private_folder
from tests.programs import run_python

ONE = "int f(void) { return 1; }"
OTHER_UID = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def script(folder, text):
    """A compiler of our own."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_program_that_does_not_compile_is_reported_with_its_line(empty_cache):
    with pytest.raises(CompilerError, match=r"(?s)kernel\.c:2:.*nonsense"):
        compiler.load("int f(void) {\n return nonsense; }")
    assert not list((empty_cache / "cache" / "rayagi" / "kernels").iterdir())


def test_a_missing_compiler_is_named_with_a_hint(monkeypatch, empty_cache):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(CompilerError, match=r"no C compiler .looked for no-such-compiler.*set CC"):
        compiler.load("")


def test_a_compiler_that_hangs_is_ended(monkeypatch, empty_cache):
    monkeypatch.setenv("CC", script(empty_cache, "exec sleep 60"))
    monkeypatch.setattr(compiler, "TIME_LIMIT_S", 0.3)
    with pytest.raises(CompilerError, match="took longer than"):
        compiler.load("")


def compiler_calls(log):
    return [line for line in log.read_text().splitlines() if "kernel.c" in line]


@pytest.fixture
def logging_compiler(monkeypatch, empty_cache):
    """A compiler that writes down its calls, and says that it is of version 1."""
    log, version = empty_cache / "log", empty_cache / "version"
    version.write_text("1")
    text = f'echo "$@" >> {log}\n[ "$1" = --version ] && exec cat {version}\nexec cc "$@"'
    monkeypatch.setenv("CC", script(empty_cache, text))
    return log, version


def test_a_kernel_is_compiled_once(logging_compiler):
    for _ in range(2):
        compiler.load(ONE)
    assert len(compiler_calls(logging_compiler[0])) == 1


def test_another_version_of_the_compiler_compiles_again(logging_compiler):
    log, version = logging_compiler
    compiler.load(ONE)
    version.write_text("2")
    compiler._compiler_version.cache_clear()  # as in the next process
    compiler.load(ONE)
    assert len(compiler_calls(log)) == 2


def kept(folder):
    return [path.name for path in folder.rglob("*.so")]


def test_the_cache_is_this_users_only_whatever_the_umask(empty_cache):
    before = os.umask(0)
    try:
        compiler.load(ONE)
    finally:
        os.umask(before)
    folder = empty_cache / "cache" / "rayagi" / "kernels"
    (name,) = kept(folder)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, folder / name)] == [
        0o700
    ] * 3


def test_a_cache_that_others_could_read_is_closed_to_them_and_used(empty_cache):
    folder = empty_cache / "cache" / "rayagi" / "kernels"
    folder.mkdir(parents=True, mode=0o755)
    compiler.load(ONE)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert kept(folder)


def shared_above(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    return tmp_path / "shared" / "cache"


def shared_itself(tmp_path):
    folder = tmp_path / "cache" / "rayagi" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o1777)  # the sticky bit protects what is in a folder from renaming, not from being added
    return tmp_path / "cache"


def group_writable(tmp_path):
    folder = tmp_path / "cache" / "rayagi" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    return tmp_path / "cache"


def of_another_user(tmp_path):
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", OTHER_UID, -1)
    return tmp_path / "cache"


def behind_another_users_link(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    os.chown(tmp_path / "link", OTHER_UID, -1, follow_symlinks=False)
    return tmp_path / "link"


def linked_in_a_circle(tmp_path):
    (tmp_path / "link").symlink_to("link")
    return tmp_path / "link"


def no_folder(tmp_path):
    (tmp_path / "rayagi").write_text("")
    return tmp_path


CACHES = {
    shared_above: "others can write to .*shared",
    shared_itself: "others can write to .*kernels, .*chmod go-w",
    group_writable: "others can write to .*kernels,",
    linked_in_a_circle: "Not a directory: '.*link'",
    no_folder: "Not a directory: '.*rayagi'",
    of_another_user: f"cache belongs to user {OTHER_UID}",
    behind_another_users_link: f"the symbolic link .*link belongs to user {OTHER_UID}",
}


@pytest.mark.parametrize(
    "cache", [pytest.param(cache, marks=as_root if "another" in cache.__name__ else ()) for cache in CACHES]
)
def test_a_cache_that_others_could_change_is_not_used(cache, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache(tmp_path)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiler._warn_not_kept.cache_clear()
    assert [compiler.load(ONE).f() for _ in range(2)] == [1, 1]
    assert not kept(tmp_path)
    (warning,) = caplog.messages  # one for both
    assert re.search(CACHES[cache], warning)
    assert "set XDG_CACHE_HOME" in warning


def test_without_any_folder_of_its_own_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_above(tmp_path)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    with pytest.raises(CompilerError, match=r"others can write to .*shared, .*set XDG_CACHE_HOME"):
        compiler.load(ONE)


def test_a_link_of_our_own_is_followed(monkeypatch, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    compiler.load(ONE)
    assert kept(tmp_path / "cache")


def test_only_a_regular_file_that_nobody_else_can_write_is_private(tmp_path):
    for name, mode in (("own", 0o644), ("of_the_group", 0o664), ("of_all", 0o646)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "folder").mkdir(0o700)
    (tmp_path / "link").symlink_to("own")
    names = ["own", "of_the_group", "of_all", "folder", "link", "nothing"]
    assert [name for name in names if is_private_file(private_folder(tmp_path) / name)] == ["own"]


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_library_that_another_user_left_is_not_loaded(monkeypatch, tmp_path, mode):
    """As the review did: the right name, in a cache that was open to all before; a constructor would run on loading."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "attacker"))
    compiler.load(
        f'#include <stdio.h>\n__attribute__((constructor)) void run(void) {{ fclose(fopen("{tmp_path}/ran", "w")); }}'
    )
    (tmp_path / "ran").unlink()
    (planted,) = (tmp_path / "attacker").rglob("*.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler.load(ONE)
    (own,) = (tmp_path / "cache").rglob("*.so")
    planted.replace(own)
    os.chown(own, OTHER_UID, -1)
    own.chmod(mode)
    # Another process: this one has the right library by that name already.
    call = f"from collectives.compiler import load; print(load({ONE!r}).f())"
    done = run_python(call)
    assert done.stdout == "1\n"
    assert not (tmp_path / "ran").exists()
    assert own.stat().st_uid == os.geteuid()
