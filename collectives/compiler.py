"""The system's C compiler, and a cache of what it made."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

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


def load(program: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile a program in C, unless that was done before, and load it. Its functions release the GIL.

    Args:
        program: in C
        flags: for the compiler, beside FLAGS

    Raises:
        CompilerError: no compiler; it refuses the program, with the first lines that it says; it takes longer than
            TIME_LIMIT_S; or the cache cannot be written.
    """
    command = [*_compiler(), *FLAGS, *flags]
    key = hashlib.sha256("\0".join([*command, _machine(), program]).encode()).hexdigest()
    library = cache_directory() / f"{key[:32]}.so"
    if not library.exists():
        _compile(command, program, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CompilerError(f"what the compiler made cannot be loaded: {error}; delete {library}") from error


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``$XDG_CACHE_HOME/rayagi/kernels``, usually below ``~/.cache``.

    Raises:
        CompilerError: it cannot be made.
    """
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(root) / "rayagi" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompilerError(
            f"no folder for compiled kernels: {error}; set XDG_CACHE_HOME to one that can be written"
        ) from error
    return folder


def _compile(command: list[str], program: str, library: Path) -> None:
    """Into a file of its own first: other processes see all of a library or nothing."""
    try:
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".making-") as folder:
            written, made = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
            written.write_text(program, encoding="utf-8")
            _run([*command, str(written), "-o", str(made), "-lm"])
            made.replace(library)
    except OSError as error:
        raise CompilerError(f"it cannot be compiled in {library.parent}: {error}") from error


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CompilerError(f"{command[0]} took longer than {TIME_LIMIT_S:.0f} s") from None
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[:_ERROR_LINES])
        raise CompilerError(f"{shlex.join(command)} failed with {done.returncode}:\n{said}")


def _compiler() -> list[str]:
    asked = os.environ.get("CC")
    names = [shlex.split(asked)] if asked else [["cc"], ["gcc"], ["clang"]]
    for name in names:
        if name and shutil.which(name[0]):
            return name
    looked = asked or "cc, gcc, clang"
    raise CompilerError(f"no C compiler (looked for {looked}); install one or set CC")


@cache
def _machine() -> str:
    """What -march=native depends on: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
