"""Compiles C programs with the system's compiler, loads them, and caches the libraries."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from collectives.files import cache_folder
from collectives.mirrors import FILE, NOTHING, MirrorError, Mirrors, check, table

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


_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ROOT_UID = 0


class UntrustedFolderError(Exception):
    """Another user can change a folder, or one above it."""


def private_folder(path: Path) -> Path:
    """Find a folder; create it for this user only if it is missing.

    It rejects what sudo and ssh reject, on every level from the root down: folders of other users than this one and root,
    folders that others can write to (allowed above the last with a sticky bit), and symbolic links of other users. No other
    user can replace a level that was checked, and so none below it.

    Returns:
        Its path without symbolic links. It belongs to this user and has mode 0700.

    Raises:
        UntrustedFolderError: another user could change its contents.
        OSError: it cannot be created.
    """
    own = os.geteuid()
    path = Path(os.path.abspath(path))
    for each in (path, *path.parents):
        if os.path.islink(each) and (owner := os.lstat(each).st_uid) not in (_ROOT_UID, own):
            raise UntrustedFolderError(f"the symbolic link {each} belongs to user {owner}")
    folder = Path(os.path.realpath(path))
    for each in (*reversed(folder.parents), folder):
        if not os.path.lexists(each):
            with suppress(FileExistsError):  # another process of this user was faster
                each.mkdir(stat.S_IRWXU)
        found = os.lstat(each)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(each))
        if found.st_uid != own and (found.st_uid != _ROOT_UID or each == folder):
            raise UntrustedFolderError(f"{each} belongs to user {found.st_uid}, not to {own}")
        if found.st_mode & _WRITABLE_BY_OTHERS and (each == folder or not found.st_mode & stat.S_ISVTX):
            raise UntrustedFolderError(
                f"others can write to {each}, and so replace what is in it; delete it, or run chmod go-w {each}"
            )
    if stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
        folder.chmod(stat.S_IRWXU)
    return folder


def is_private_file(path: Path) -> bool:
    """Whether it exists, is regular, belongs to this user, and can be written by nobody else.

    It is in a ``private_folder``: no other user can put another file there afterwards.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return is_own and not found.st_mode & _WRITABLE_BY_OTHERS
