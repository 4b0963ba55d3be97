"""Calibrations on disk, by program and machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rayagi.profiler.calibration import Calibration
from rayagi.profiler.errors import ProfilerError
from rayagi.profiler.native import SOURCES, machine

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*")


@dataclass(frozen=True)
class StoredCalibration:
    """A calibration and where it is from.

    Attributes:
        costs: of hooks
        setup_ns: CPU time of intercepting everything, once for each run
        program: see ``program_key``
        machine: see ``this_machine``
        rounds: runs of each kind
        unix_s: when it was made
    """

    costs: Calibration
    setup_ns: float
    program: str
    machine: str
    rounds: int
    unix_s: float

    @property
    def text(self) -> str:
        """What it says, for a report."""
        costs = ", ".join(f"{kind} {ns:,.0f} ns" for kind, ns in sorted(self.costs.hooks.items()))
        day = time.strftime("%Y-%m-%d", time.localtime(self.unix_s))
        return f"{costs}, measured on {day} by {self.rounds} rounds whose CPU times spread over {self.costs.spread:.1%}"


def program_key(command: Sequence[str], where: Path) -> str:
    """Names a program that ran in a folder, whatever its arguments: its script's path, its module, or its name."""
    rest = list(command)
    if len(rest) > 1 and _INTERPRETER.fullmatch(os.path.basename(rest[0])):
        if "-m" in rest[:-1]:
            return f"-m {rest[rest.index('-m') + 1]}"
        rest = [each for each in rest[1:] if not each.startswith("-")] or rest
    if rest[:1] and rest[0].endswith(".py"):
        return str((where / rest[0]).resolve())
    return os.path.basename(rest[0]) if rest else ""


def this_machine() -> str:
    """A digest of the processor, its cores, the version of Python and that of the recorder."""
    sources = b"".join(files(__package__).joinpath(name).read_bytes() for name in SOURCES)
    parts = (machine(), str(os.cpu_count()), platform.python_version(), hashlib.sha256(sources).hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def folder() -> Path:
    """Of all calibrations: ``$XDG_CACHE_HOME/rayagi/calibrations``, usually below ``~/.cache``."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "rayagi" / "calibrations"
    )


def _path(program: str, at: str) -> Path:
    return folder() / f"{hashlib.sha256(program.encode()).hexdigest()[:16]}-{at}.json"


def save(stored: StoredCalibration) -> Path:
    """Write it in place of the former one of this program and machine. Returns the file.

    Raises:
        ProfilerError: it cannot be written.
    """
    path = _path(stored.program, stored.machine)
    about = {
        "program": stored.program,
        "machine": stored.machine,
        "hooks": dict(stored.costs.hooks),
        "spread": stored.costs.spread,
        "setup_ns": stored.setup_ns,
        "rounds": stored.rounds,
        "unix_s": stored.unix_s,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(about, indent=1), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise ProfilerError(f"{path} cannot be written: {error.strerror}") from error
    return path


def find(program: str) -> StoredCalibration | None:
    """That of this program on this machine; None if there is none.

    Raises:
        ProfilerError: its file is damaged.
    """
    path = _path(program, this_machine())
    return load(path) if path.is_file() else None


def load(path: Path) -> StoredCalibration:
    """Read a file of ``save``.

    Raises:
        ProfilerError: it cannot be read, is damaged, or is of another machine.
    """
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        hooks = {str(kind): float(ns) for kind, ns in about["hooks"].items()}
        if not all(0 <= ns < 1e9 for ns in (*hooks.values(), float(about["spread"]))):
            raise ValueError("a cost outside 0 to 1e9 ns")
        found = StoredCalibration(
            Calibration(hooks, spread=float(about["spread"])),
            float(about["setup_ns"]),
            str(about["program"]),
            str(about["machine"]),
            int(about["rounds"]),
            float(about["unix_s"]),
        )
    except OSError as error:
        raise ProfilerError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProfilerError(
            f"{path} is no calibration: {error}; make it anew with `rayagi profile calibrate`"
        ) from error
    if found.machine != this_machine():
        raise ProfilerError(
            f"{path} is of another machine, Python or version of rayagi: calibrate here with `rayagi profile calibrate`"
        )
    return found
