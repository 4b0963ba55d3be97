"""Calibrations on disk: one file for each machine, Python and program; and which of them fits a profile."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from collectives.files import cache_folder, replacing
from rayagi.profiler.calibration import Calibration
from rayagi.profiler.errors import ProfilerError
from rayagi.profiler.machine import machine_text, this_machine
from rayagi.profiler.measurement import Measured
from rayagi.profiler.program import program_of, script_of
from rayagi.profiler.trace import Profile

_VERSION = 1


@dataclass(frozen=True)
class StoredCalibration:
    """A calibration and what it is of.

    Attributes:
        calibration: the costs
        command: program with arguments that was measured
        python: its version
        machine: as of ``this_machine``
        unix_s: when
        rounds: of measurements
        counts: events of one run, by kind of hook
        script: path of the program's file; empty if it has none, or an earlier version calibrated
    """

    calibration: Calibration
    command: tuple[str, ...]
    rounds: int
    counts: Mapping[str, int]
    python: str
    machine: Mapping[str, Any] = field(default_factory=this_machine)
    unix_s: float = field(default_factory=time.time)
    script: str = ""

    @property
    def key(self) -> str:
        """The same for the same machine, Python, command and file."""
        identity = json.dumps([dict(self.machine), self.python, self.command, self.script], sort_keys=True)
        return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]


@dataclass(frozen=True)
class Recorded:
    """What a calibration has to fit: a program and its file, the machine, and the versions of its Pythons."""

    command: Sequence[str]
    machine: Mapping[str, Any]
    pythons: frozenset[str]
    script: str = ""


def recorded_in(profile: Profile) -> Recorded:
    """Of a profile."""
    pythons = frozenset(each.python for each in profile.processes)
    return Recorded(profile.command, profile.machine, pythons, profile.script)


def stored(measured: Measured, command: Sequence[str]) -> StoredCalibration:
    """What was measured just now, on this machine."""
    return StoredCalibration(
        measured.calibration,
        tuple(command),
        measured.rounds,
        measured.counts,
        measured.python,
        script=script_of(command),
    )


def default_folder() -> Path:
    """Where calibrations are kept."""
    return cache_folder("calibrations")


def save(calibration: StoredCalibration, folder: Path) -> Path:
    """Write it, in place of one of the same key. Returns the file.

    Raises:
        ProfilerError: the folder cannot be written.
    """
    path = folder / f"{calibration.key}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside:
            content = {"version": _VERSION, **asdict(calibration)}
            beside.write_text(json.dumps(content, indent=2), encoding="utf-8")
    except OSError as error:
        raise ProfilerError(f"{path} cannot be written: {error.strerror}; set XDG_CACHE_HOME") from error
    return path


def load(path: Path) -> StoredCalibration:
    """Read one.

    Raises:
        ProfilerError: there is no such file, or it is damaged or of another version.
    """
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != _VERSION:
            raise ProfilerError(
                f"{path} is of version {repr(content['version'])[:20]}; this rayagi reads {_VERSION}"
            )
        costs = content["calibration"]
        return StoredCalibration(
            calibration=Calibration(
                _numbers(costs["hooks"]),
                _numbers(costs["functions"]),
                float(costs["spread"]),
                _numbers(costs["errors"]),
            ),
            command=tuple(map(str, content["command"])),
            rounds=int(content["rounds"]),
            counts={str(kind): int(count) for kind, count in content["counts"].items()},
            python=str(content["python"]),
            machine=dict(content["machine"]),
            unix_s=float(content["unix_s"]),
            script=str(content.get("script", "")),
        )
    except OSError as error:
        raise ProfilerError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProfilerError(f"{path} is no calibration of rayagi's profiler, or it is damaged") from error


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {str(kind): float(value) for kind, value in values.items()}
    if not all(0 <= value < 1e12 for value in numbers.values()):
        raise ValueError("a cost below 0, or of many seconds")
    return numbers


def refusal(calibration: StoredCalibration, recorded: Recorded) -> str:
    """Why a calibration does not fit what was recorded, in one sentence; empty if it does."""
    whose = f"the calibration of `{' '.join(calibration.command)[:100]}` is of"
    again = "calibrate the program there"
    if dict(calibration.machine) != dict(recorded.machine):
        theirs, ours = machine_text(calibration.machine), machine_text(recorded.machine)
        return f"{whose} another machine ({theirs}) than the profile ({ours}): {again}"
    others = sorted(recorded.pythons - {calibration.python})
    if others:
        return f"{whose} another Python ({calibration.python}) than the profile ({others[0]}): {again}"
    return ""


def other_file(calibration: StoredCalibration, recorded: Recorded) -> str:
    """Says that a calibration is of another file of the same name; empty if it is not, or if that is not known."""
    if not calibration.script or not recorded.script or calibration.script == recorded.script:
        return ""
    return f"the calibration of `{' '.join(calibration.command)[:100]}` is of another file ({calibration.script})"


def choose(recorded: Recorded, path: Path | None, folder: Path) -> tuple[StoredCalibration | None, str]:
    """The calibration of a file, or the stored one that fits best.

    Returns:
        It and no text; or None, and why there is none and what to do.

    Raises:
        ProfilerError: the file cannot be read, or its calibration does not fit the profile.
    """
    if path is not None:
        given = load(path)
        if reason := refusal(given, recorded):
            raise ProfilerError(reason)
        return given, ""
    found, reason = find(recorded, folder)
    if found is None:
        program = " ".join(_without_profile(recorded.command))[:200]
        reason = f"Times include the profiler's own: {reason}. Run: rayagi profile calibrate -- {program}"
    return found, reason


def _without_profile(command: Sequence[str]) -> list[str]:
    """A command of ``rayagi train --profile N`` as it is calibrated: not into its profile and run folder, which exist."""
    if program_of(command)[0] != "rayagi":
        return list(command)
    words = [word for word in command if not word.startswith(("--profile=", "--name="))]
    for option in ("--profile", "--name"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    return words


def find(recorded: Recorded, folder: Path) -> tuple[StoredCalibration | None, str]:
    """The calibration that fits best: of this program, with the most arguments in common, then the newest.

    Returns:
        It, or None and the reason in one sentence.
    """
    name, arguments = program_of(recorded.command)
    same, others = list[tuple[int, float, StoredCalibration]](), list[tuple[float, str]]()
    for path in sorted(folder.glob("*.json")):
        try:
            each = load(path)
        except ProfilerError:
            continue  # of another version: calibrating again replaces it
        its_name, its_arguments = program_of(each.command)
        if its_name == name:
            if reason := refusal(each, recorded) or other_file(each, recorded):
                others.append((each.unix_s, reason))
            else:
                common = _num_common(arguments, its_arguments)
                same.append((common, each.unix_s, each))
    if same:
        return max(same, key=lambda each: each[:2])[2], ""
    return None, max(others)[1] if others else f"no calibration of {name} is stored"


def _num_common(first: Sequence[str], second: Sequence[str]) -> int:
    """How many leading arguments are the same."""
    different = (number for number, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    return next(different, min(len(first), len(second)))
