"""Compiles C programs with the system's compiler, loads them, and caches the libraries."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from collectives.files import cache_folder
from collectives.mirrors import FILE, NOTHING, MirrorError, Mirrors, check, table
from collectives.private_folder import UntrustedFolderError, is_private_file, private_folder

_logger = logging.getLogger(__name__)

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-fopenmp-simd",  # vectorizes marked loops; no OpenMP threads
    "-fno-math-errno",  # inlines square roots
    "-fno-trapping-math",  # allows both sides of a conditional to be computed
    "-w",
)
TIME_LIMIT_S = 180.0
_ERROR_LINES = 12


class CompilerError(Exception):
    """A program cannot be compiled or loaded: no compiler, a compile error, or no folder for the library."""


def load(program: str, flags: tuple[str, ...] = (), *, mirrors: Mirrors = NOTHING) -> ctypes.CDLL:
    """Compile a C program, or take it from the cache, and load it. Its functions release the GIL.

    Libraries are cached in ``cache_folder("kernels")``. If another user could change that folder or one above it, a
    warning says so, and each process compiles the program in a private temporary folder.

    Args:
        program: C source
        flags: for the compiler, in addition to FLAGS
        mirrors: structs and constants that are defined both in C and in Python

    Raises:
        MirrorError: C and Python disagree about one of them.
        CompilerError: no compiler; a compile error, with its first lines; more than TIME_LIMIT_S; or no folder for the
            library.
    """
    library = _load(f"{program}\n{table(mirrors)}\n", flags)
    check(library, mirrors)
    return library


def _load(program: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    compiler = _compiler()
    command = [*compiler, *FLAGS, *flags]
    parts = [*command, _compiler_version(tuple(compiler)), machine(), program]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32] + ".so"
    try:
        return _load_from(cache_folder("kernels"), name, command, program)
    except (UntrustedFolderError, OSError) as error:
        _warn_not_kept(str(error))
    try:
        with tempfile.TemporaryDirectory(prefix="rayagi-kernels-") as folder:
            return _load_from(
                Path(folder), name, command, program
            )  # stays mapped after the folder is removed
    except (UntrustedFolderError, OSError) as error:
        raise CompilerError(
            f"no folder for compiled kernels: {error}; set XDG_CACHE_HOME to one that only you can write to"
        ) from error


def _load_from(path: Path, name: str, command: list[str], program: str) -> ctypes.CDLL:
    """Load the library from a private folder. It is compiled first if it is missing or belongs to another user.

    Raises:
        UntrustedFolderError: another user could change the folder's contents.
        OSError: the folder cannot be made or written.
        CompilerError: the library cannot be compiled or loaded.
    """
    library = private_folder(path) / name
    if not is_private_file(library):
        _compile(command, program, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CompilerError(f"{library} cannot be loaded: {error}; delete it") from error


@cache
def _warn_not_kept(reason: str) -> None:
    """Once for each reason."""
    _logger.warning(
        "compiled kernels are not cached, so each process compiles them again: %s; "
        "set XDG_CACHE_HOME to a folder that only you can write to",
        reason,
    )


def _compile(command: list[str], program: str, library: Path) -> None:
    """Compile into a temporary file, then rename it: other processes see a complete library or none."""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".making-") as folder:
        written, made = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
        written.write_text(program, encoding="utf-8")
        _run([*command, str(written), "-o", str(made), "-lm"])
        made.chmod(0o700)  # whatever the umask
        made.replace(library)


def _run(command: list[str]) -> str:
    """Run a command and return its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CompilerError(f"{command[0]} took longer than {TIME_LIMIT_S:.0f} s") from None
    except OSError as error:
        raise CompilerError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()[:_ERROR_LINES]
        # An error in the mirror table means that a struct, a field or a constant is missing in C.
        kind = MirrorError if any(line.startswith(f"{FILE}:") for line in lines) else CompilerError
        raise kind("\n".join([f"{shlex.join(command)} failed with {done.returncode}:", *lines]))
    return done.stdout


def _compiler() -> list[str]:
    requested = os.environ.get("CC")
    names = [shlex.split(requested)] if requested else [["cc"], ["gcc"], ["clang"]]
    for name in names:
        if name and shutil.which(name[0]):
            return name
    candidates = requested or "cc, gcc, clang"
    raise CompilerError(f"no C compiler (looked for {candidates}); install one or set CC")


@cache
def _compiler_version(compiler: tuple[str, ...]) -> str:
    """Part of a library's cache key: an update replaces the compiler in place."""
    return _run([*compiler, "--version"])


@cache
def machine() -> str:
    """Processor model and features, on which -march=native depends: machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
