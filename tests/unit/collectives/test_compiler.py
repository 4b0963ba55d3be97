"""The system's compiler: messages, a limit, a cache."""

import os
import stat

import pytest

from collectives import compiler
from collectives.compiler import CompilerError


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


def test_a_missing_compiler_is_named_with_the_way_out(monkeypatch, empty_cache):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(CompilerError, match=r"no C compiler .looked for no-such-compiler.*set CC"):
        compiler.load("")


def test_a_compiler_that_hangs_is_ended(monkeypatch, empty_cache):
    monkeypatch.setenv("CC", script(empty_cache, "exec sleep 60"))
    monkeypatch.setattr(compiler, "TIME_LIMIT_S", 0.3)
    with pytest.raises(CompilerError, match="took longer than"):
        compiler.load("")


def test_a_kernel_is_compiled_once(monkeypatch, empty_cache):
    log = empty_cache / "log"
    monkeypatch.setenv("CC", script(empty_cache, f'echo called >> {log}\nexec cc "$@"'))
    for _ in range(2):
        compiler.load("int f(void) { return 1; }")
    assert log.read_text().count("called") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CompilerError, match="set XDG_CACHE_HOME"):
        compiler.load("")


def test_a_cache_that_is_no_folder_is_named(monkeypatch, tmp_path):
    (tmp_path / "rayagi").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CompilerError, match="set XDG_CACHE_HOME"):
        compiler.load("")
