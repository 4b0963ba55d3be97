"""The system's C compiler, and a cache of what it made."""

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

from collectives.mirrors import FILE, NOTHING, MirrorError, Mirrors, check, table
from collectives.private_folder import UntrustedFolderError, is_private_file, private_folder

_logger = logging.getLogger(__name__)

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-fopenmp-simd",  # the loops over lanes are marked; no threads of OpenMP
    "-fno-math-errno",  # else square roots are calls
    "-fno-trapping-math",  # else neither side of a choice is computed in advance
    "-w",
)
TIME_LIMIT_S = 180.0
_ERROR_LINES = 12


class CompilerError(Exception):
    """A program that cannot be had here: no compiler, or it refuses, or there is no room for what it makes."""


def load(program: str, flags: tuple[str, ...] = (), *, mirrors: Mirrors = NOTHING) -> ctypes.CDLL:
    """Compile a program in C, unless that was done before, and load it. Its functions release the GIL.

    Compiled libraries are kept in ``cache_directory()``. Where another user could change that folder or what is above it,
    one warning says so, and the program is compiled in a private temporary folder, in each process anew.

    Args:
        program: in C
        flags: for the compiler, beside FLAGS
        mirrors: structs and constants of the program that Python has, too

    Raises:
        MirrorError: program and Python disagree about one of them.
        CompilerError: no compiler; it refuses the program, with the first lines that it says; it takes longer than
            TIME_LIMIT_S; or what it makes can be kept nowhere.
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
        return _load_from(cache_directory(), name, command, program)
    except (UntrustedFolderError, OSError) as error:
        _warn_not_kept(str(error))
    try:
        with tempfile.TemporaryDirectory(prefix="rayagi-kernels-") as folder:
            return _load_from(Path(folder), name, command, program)  # it stays mapped
    except (UntrustedFolderError, OSError) as error:
        raise CompilerError(
            f"no folder for compiled kernels: {error}; set XDG_CACHE_HOME to one that only you can write to"
        ) from error


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``$XDG_CACHE_HOME/rayagi/kernels``, usually below ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "rayagi" / "kernels"


def _load_from(path: Path, name: str, command: list[str], program: str) -> ctypes.CDLL:
    """Load the library from a private folder, where it is made if it is missing or another user's.

    Raises:
        UntrustedFolderError: another user could change what is in the folder.
        OSError: the folder cannot be made, or written.
        CompilerError: the library cannot be made or loaded.
    """
    with private_folder(path) as folder:
        try:
            is_made = is_private_file(folder, name)
        except FileNotFoundError:
            is_made = False
        if not is_made:
            _compile(command, program, path / name)
        # By the folder's descriptor: no other user can put another file there since it was checked. A descriptor of the
        # file would not do: dlopen takes two files for one if they are opened by one name, such as /proc/self/fd/5.
        try:
            return ctypes.CDLL(f"/proc/self/fd/{folder}/{name}")
        except OSError as error:
            raise CompilerError(f"{path / name} cannot be loaded: {error}; delete it") from error


@cache
def _warn_not_kept(reason: str) -> None:
    """Once for each reason."""
    _logger.warning(
        "compiled kernels are not kept, and each process compiles them anew: %s; "
        "set XDG_CACHE_HOME to a folder that only you can write to",
        reason,
    )


def _compile(command: list[str], program: str, library: Path) -> None:
    """Into a file of its own first: other processes see all of a library or nothing."""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".making-") as folder:
        written, made = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
        written.write_text(program, encoding="utf-8")
        _run([*command, str(written), "-o", str(made), "-lm"])
        made.chmod(0o700)  # whatever the umask
        made.replace(library)


def _run(command: list[str]) -> str:
    """What it prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CompilerError(f"{command[0]} took longer than {TIME_LIMIT_S:.0f} s") from None
    except OSError as error:
        raise CompilerError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()[:_ERROR_LINES]
        # The compiler names the table of mirrors where a struct, a field or a constant of it is missing.
        kind = MirrorError if any(line.startswith(f"{FILE}:") for line in lines) else CompilerError
        raise kind("\n".join([f"{shlex.join(command)} failed with {done.returncode}:", *lines]))
    return done.stdout


def _compiler() -> list[str]:
    asked = os.environ.get("CC")
    names = [shlex.split(asked)] if asked else [["cc"], ["gcc"], ["clang"]]
    for name in names:
        if name and shutil.which(name[0]):
            return name
    looked = asked or "cc, gcc, clang"
    raise CompilerError(f"no C compiler (looked for {looked}); install one or set CC")


@cache
def _compiler_version(compiler: tuple[str, ...]) -> str:
    """A compiler is replaced in place by an update: libraries of the one before are not used any more."""
    return _run([*compiler, "--version"])


@cache
def machine() -> str:
    """What -march=native depends on: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
